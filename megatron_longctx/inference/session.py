"""What users hold of an engine: a conversation, a continuation of it under way, and the next tokens of these."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import all_reduce_sum
from ..errors import refuse
from .sampling import Sampling, sample

if TYPE_CHECKING:
    from .engine import LongContextEngine


NOT_FINITE = -1
"""In the place of a token whose logits are not finite."""


class NextToken(NamedTuple):
    """What is known of a session's next token.

    logits: fp32 `[vocabulary]`, on one rank. likeliest: on all ranks, after a replicated step: a token, or NOT_FINITE.
    """

    logits: Tensor | None = None
    likeliest: int | None = None


class Session:
    """One conversation: its tokens, most of them cached. Made by `LongContextEngine.open`."""

    def __init__(self, engine: LongContextEngine, number: int) -> None:
        self.number = number
        self.salt = 0  # requests of another one do not find what it has cached
        self.tokens: list[int] = []
        self.closed = False
        self.finish_reason: str | None = None  # of the latest generation: stop or length
        self.reused_tokens = 0  # found in the cache by the latest append
        self.last_used = 0
        self.next_token: NextToken | None = None  # None: no rank has its logits
        self.exact_chunks = 0  # see `exact_tokens`
        self._engine = engine

    @property
    def cached_tokens(self) -> int:
        return 0 if self.closed else self._engine.cache_manager.length(self.number)

    @property
    def exact_tokens(self) -> int:
        """Of the cached tokens, those that any session with these tokens computes in the very same calls: whole chunks
        from the first token on, with `EngineSettings.exact`. A fork at a multiple of the chunk up to here goes on, bit
        for bit, as if it had computed them itself."""
        chunk = self._engine.settings.prefill_chunk or 1
        return min(self.exact_chunks, self.cached_tokens // chunk) * chunk

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the conversation; only they are computed. See `LongContextEngine.append`."""
        self._engine.append({self: tokens})

    def generate(self, sampling: Sampling | None = None) -> list[int]:
        """The conversation's next tokens, which become part of it."""
        return self._engine.continue_all([self], sampling or Sampling())[0]

    def stream(self, sampling: Sampling | None = None) -> Iterator[int]:
        """As `generate`, token by token; the conversation has what was taken."""
        for step in self._engine.stream([self], sampling or Sampling()):
            yield from step.values()

    def fork(self, tokens: int | None = None) -> Session:
        """A new session with the same beginning. See `LongContextEngine.open`."""
        return self._engine.open(self, tokens)

    def close(self) -> None:
        """Free its pages, but for those that others share; closing twice is nothing."""
        self._engine.close(self)


@dataclass(eq=False)
class Generation:
    """A session's continuation under way. Made by `LongContextEngine.start`.

    Attributes:
        stream: see `Sampling.seed`.
        tokens: given out so far.
        finish_reason: None while it goes on; then stop, length or error (logits that are not finite).
    """

    session: Session
    sampling: Sampling
    stream: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


def draw(generations: Sequence[Generation], group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """Every generation's next token, drawn where its logits are, then known everywhere. Collective."""
    following = [generation.session.next_token or NextToken() for generation in generations]
    known = [each.likeliest for each in following if each.likeliest is not None]
    if len(known) == len(generations) and all(generation.sampling.temperature == 0 for generation in generations):
        return known
    ids = torch.zeros(len(generations), dtype=torch.int64, device=device)
    for i, (generation, each) in enumerate(zip(generations, following, strict=True)):
        if each.logits is not None:
            try:
                ids[i] = sample(each.logits, generation.sampling, generation.stream, len(generation.session.tokens))
            except ValueError:  # all ranks have to hear of it, not this one alone
                ids[i] = NOT_FINITE
    tokens: list[int] = all_reduce_sum(group, ids).tolist()
    return tokens


def plain_ids(tokens: Sequence[int]) -> list[int]:
    """NumPy's and torch's integers too as Python's own.

    Raises:
        ValueError: they are no integers.
    """
    try:
        return [operator.index(token) for token in tokens]
    except TypeError:
        raise refuse("tokens", reprlib.repr(tokens), "integers, one after another", "Tokenize text first.") from None


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError for no tokens, and for ids outside the vocabulary."""
    if not tokens:
        raise refuse("tokens", list(tokens), "1 or more", "Give the session some tokens.")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        token = next(token for token in tokens if not 0 <= token < vocab_size)
        raise refuse("token", token, f"an id from 0 to {vocab_size - 1}", "Check the tokenizer.")
