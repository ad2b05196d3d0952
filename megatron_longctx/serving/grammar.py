"""Answers that follow a JSON schema, a regular expression or a list of choices, by the library xgrammar."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..config.extras import install
from ..core.errors import refuse
from ..inference.session import Matcher

_MAX_CHARS = 2**16  # of a grammar: compiling one cannot be interrupted
_CACHE_BYTES = 2**28
_RANGE = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_READ: dict[str, set[str]] = {
    "integer": _RANGE,
    "number": _RANGE,
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems", "additionalItems", "unevaluatedItems"},
    "object": {
        *("properties", "required", "additionalProperties", "unevaluatedProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    },
}
"""What xgrammar reads of a schema with this type. It leaves out other keywords without an error."""
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Of a schema with one of these it reads nothing else."""
_NOTES = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples"),
    *("deprecated", "readOnly", "writeOnly", "nullable", "discriminator"),
}
"""Keywords that restrict no answer."""
_FORMATS = {"idn-email", "idn-hostname", "iri", "iri-reference", "regex"}
"""Formats of JSON Schema that it leaves out. Others that it does not know have no meaning there."""
_ESCAPES = "dDwWsSbBpPkxucnrtfv"
"""Letters after a backslash that it reads or refuses; others would stand for themselves."""
_WRITTEN = {"\\", *"xucnrtfv0"}
"""What stands after a backslash for one character, which JSON may have to write otherwise."""
_LIBRARIES = ("byte-level", "huggingface")


class Grammars:
    """Compiles grammars for a tokenizer and keeps the latest. See `inference.session.Grammars`.

    Refuse a tokenizer whose tokens are not known as bytes, and any if xgrammar is not installed.
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

        Refuse one that is too long, or that xgrammar refuses.
        """
        if len(grammar) > _MAX_CHARS:
            raise refuse("grammar", f"{len(grammar)} characters", f"at most {_MAX_CHARS}", "Shorten it.")
        ((kind, value),) = json.loads(grammar).items()
        try:
            if kind == "json":  # on one line: models may go on with spaces where any number is allowed
                schema = json.loads(value) if isinstance(value, str) else value
                _check_followed(schema)
                return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)
            if kind == "regex":
                _refuse(_left_out_of_regex(value))
                return self._compiler.compile_regex(value)
            choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value)
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


def _refuse(left_out: Iterator[str]) -> None:
    for each in left_out:
        raise ValueError(f"{each} is not supported: leave it out")


def _check_followed(schema: Any) -> None:
    """Raise ValueError for what xgrammar leaves out of a schema: an answer might break it."""
    left = [schema]
    while left:
        each = left.pop()
        if not isinstance(each, dict):
            continue
        _refuse(_ignored(each))
        for key in ("properties", "patternProperties", "$defs", "definitions"):
            left += (each.get(key) or {}).values()
        for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            left += each.get(key) or []
        left += [each.get(key) for key in ("items", "additionalProperties", "propertyNames")]


def _ignored(schema: dict[str, Any]) -> Iterator[str]:
    """Yield what xgrammar leaves out of a schema itself."""
    if alone := next((key for key in _ALONE if key in schema), None):
        read, where = {alone, *(("type",) if alone in ("const", "enum") else ())}, f"beside {alone}"
    else:
        implied = (
            ["object"] if "properties" in schema else ["array"] * (not {"items", "prefixItems"}.isdisjoint(schema))
        )
        kinds = schema.get("type", implied)
        kinds = [kinds] if isinstance(kinds, str) else kinds
        read = {"type"}.union(*(_READ.get(kind, ()) for kind in kinds))
        where = f"with type {' or '.join(kinds)}" if kinds else "without a type"
    for key in sorted(schema.keys() - read - _NOTES):
        if schema[key] is not False and not key.startswith("x-"):
            yield f"{key} {where}"
    if not {"pattern", "format"}.isdisjoint(schema) and not {"minLength", "maxLength"}.isdisjoint(schema):
        yield "a length beside pattern or format"
    if len(schema.get("allOf") or ()) > 1:
        yield "allOf of several schemas"
    known = list(schema.get("properties") or ())
    yield from (f"required {name!r} without a property" for name in schema.get("required") or () if name not in known)
    yield from (f"an empty {key}" for key in ("anyOf", "oneOf", "type") if schema.get(key) == [])
    if not str(schema.get("$ref", "#")).startswith("#"):
        yield "$ref to elsewhere"
    if schema.get("format") in _FORMATS:
        yield f"the format {schema['format']}"
    if "propertyNames" in schema and known:
        yield "propertyNames beside properties"
    for pattern in (schema.get("pattern", ""), *(schema.get("patternProperties") or ())):
        yield from _left_out_of_regex(pattern)
        if any(char < " " or char == '"' for char in pattern) or not _WRITTEN.isdisjoint(_escaped(pattern)):
            yield f"the pattern {pattern!r}, of characters that JSON may escape,"


def _escaped(regex: str) -> set[str]:
    return set(re.findall(r"\\(.)", regex, re.DOTALL))


def _left_out_of_regex(regex: str) -> Iterator[str]:
    """Yield what xgrammar leaves out of a regular expression, which matches whole texts."""
    if letters := {char for char in _escaped(regex) if char.isascii() and char.isalpha()}.difference(_ESCAPES):
        yield f"the escape \\{min(letters)} in a regular expression"
    plain = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", regex, flags=re.DOTALL)  # without escapes and sets
    ends = r"^\^|\$$" if "(" in plain else r"(?:^|(?<=\|))\^|\$(?=\||$)"  # of the whole, or of its alternatives
    if not {"^", "$"}.isdisjoint(re.sub(ends, "", plain)):
        yield "^ or $ inside a regular expression"
