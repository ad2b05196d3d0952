"""Answers that follow a JSON schema, a regular expression or a list of choices, by the library xgrammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..config.extras import install
from ..core.errors import refuse
from ..inference.session import Matcher

_MAX_CHARS = 2**16  # of a grammar: compiling one cannot be interrupted
_CACHE_BYTES = 2**28
_LIBRARIES = ("byte-level", "huggingface")


class Grammars:
    """Compiles grammars for a tokenizer and keeps the latest. See `inference.session.Grammars`.

    Raises:
        ValueError: xgrammar is not installed, or the tokenizer's tokens are not known as bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        try:
            import xgrammar
        except ImportError as error:
            raise refuse("grammar", f"({error})", "the package xgrammar", f"Run {install('serve')}.") from None
        if tokenizer.library not in _LIBRARIES:
            raise refuse("grammar", tokenizer.library, f"a tokenizer of {' or '.join(_LIBRARIES)}", "Leave it out.")
        self._vocab_size, stop = tokenizer.vocab_size, [tokenizer.eod]
        if tokenizer.library == "byte-level":
            tokens = [bytes([i]) if i < 256 else b"" for i in range(self._vocab_size)]
            info = xgrammar.TokenizerInfo(tokens, vocab_size=self._vocab_size, stop_token_ids=stop)
        else:
            library = tokenizer._tokenizer.tokenizer
            info = xgrammar.TokenizerInfo.from_huggingface(library, vocab_size=self._vocab_size, stop_token_ids=stop)
        self._library = xgrammar
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)

    def compile(self, grammar: str) -> Any:
        """Compile a grammar: a JSON object with `json`, a schema, `regex` or `choice`.

        Raises:
            ValueError: it is too long, or xgrammar refuses it.
        """
        if len(grammar) > _MAX_CHARS:
            raise refuse("grammar", f"{len(grammar)} characters", f"at most {_MAX_CHARS}", "Shorten it.")
        ((kind, value),) = json.loads(grammar).items()
        try:
            if kind == "json":  # on one line: models may go on with spaces where any number is allowed
                schema = value if isinstance(value, str) else json.dumps(value)
                return self._compiler.compile_json_schema(schema, any_whitespace=False)
            if kind == "regex":
                return self._compiler.compile_regex(value)
            choices = " | ".join(json.dumps(choice) for choice in value)
            return self._compiler.compile_grammar(f"root ::= {choices}")
        except Exception as error:  # the library raises several classes
            raise ValueError(f"{kind}: expected a grammar that xgrammar compiles ({str(error)[-300:]})") from None

    def __call__(self, grammar: str, stop: Sequence[int]) -> Matcher:
        matcher = self._library.GrammarMatcher(self.compile(grammar), override_stop_tokens=list(stop))
        mask, accepted = self._library.allocate_token_bitmask(1, self._vocab_size), 0  # 32 tokens in a word

        def allowed(answer: Sequence[int]) -> Tensor:
            nonlocal accepted
            for token in answer[accepted:]:
                assert matcher.accept_token(token), "only tokens that the mask allows are drawn"
            accepted = len(answer)
            matcher.fill_next_token_bitmask(mask)
            bits: Tensor = mask[0, :, None] >> torch.arange(32, dtype=torch.int32) & 1
            return bits.bool().flatten()[: self._vocab_size]

        return allowed
