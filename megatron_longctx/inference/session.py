"""Sessions: a conversation and its generations, and how an engine divides their tokens into passes."""

from __future__ import annotations

import operator
import reprlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import NamedTuple, Protocol

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from ..config import InferenceConfig
from ..core.comm import all_reduce_sum
from ..core.errors import refuse
from .cache_manager import CacheManager
from .sampling import PromptScores, Sampling, Score, sample, score_table

NOT_FINITE = -1
"""The id in place of a token whose logits are not finite."""
NO_TOKEN = -2
"""The id in place of a token where the grammar allows none."""


class NextToken(NamedTuple):
    """The result of a session's last pass.

    Attributes:
        logits: fp32 `[vocabulary]`, on one rank.
        greedy: the likeliest token or NOT_FINITE, on all ranks after a replicated step.
    """

    logits: Tensor | None = None
    greedy: int | None = None


class RunningToken:
    """A `NextToken` of a step that may still run. Its logits are not kept.

    Attributes:
        row: of the step.
    """

    logits = None

    def __init__(self, ids: Callable[[], Sequence[int]], row: int) -> None:
        self.ids, self.row = ids, row

    @property
    def greedy(self) -> int:
        """The likeliest token or NOT_FINITE, for which the host waits."""
        return self.ids()[self.row]


Matcher = Callable[[Sequence[int]], Tensor]
"""Returns the tokens that may follow an answer, which has grown since the last call, in a grammar: bool
`[vocabulary]`."""

Grammars = Callable[[str, Sequence[int]], Matcher]
"""Returns a matcher of `Sampling.grammar`, whose text is ended by these stop tokens."""


class Engine(Protocol):
    """What sessions use of `LongContextEngine`."""

    cache_manager: CacheManager
    settings: InferenceConfig

    def append(self, new: Mapping[Session, Sequence[int]]) -> None: ...
    def continue_all(self, sessions: Sequence[Session], sampling: Sampling) -> list[list[int]]: ...
    def stream(self, sessions: Sequence[Session], sampling: Sampling) -> Iterator[dict[Session, list[int]]]: ...
    def fork(self, session: Session, tokens: int | None = None) -> Session: ...
    def close(self, session: Session) -> None: ...


class Session:
    """One conversation: its tokens, most of them cached. `LongContextEngine.open` creates it."""

    def __init__(self, engine: Engine, number: int, salt: int = 0) -> None:
        self.number = number
        self.salt = salt  # sessions with another salt do not find this one's pages
        self.tokens: list[int] = []
        self.closed = False
        self.finish_reason: str | None = None  # of the latest generation: stop or length
        self.reused_tokens = 0  # cached before the latest append
        self.next_token: NextToken | RunningToken | None = None  # None: no rank has its logits
        self.ahead: list[tuple[int, NextToken]] = []  # drafted tokens that are cached, and what follows each
        self.exact_chunks = 0  # see `exact_tokens`
        self.keep_at: int | None = None  # tokens after which a recurrent state is kept; None: before every last page
        self.scores: PromptScores | None = None  # set before the first tokens to collect them
        self._engine = engine

    @property
    def cached_tokens(self) -> int:
        return 0 if self.closed else self._engine.cache_manager.length(self.number)

    @property
    def awaits_last(self) -> bool:
        """Whether its last token alone is not cached."""
        return self.cached_tokens == len(self.tokens) - 1

    @property
    def exact_tokens(self) -> int:
        """The number of cached tokens that any session with the same tokens computes in the very same calls.

        With `exact_reuse` these are whole chunks from the first token on. A session that finds pages up to here
        continues, bit for bit, as if it had computed them itself."""
        chunk = self._engine.settings.prefill_chunk or 1
        return min(self.exact_chunks, self.cached_tokens // chunk) * chunk

    def cut(self, new: int, unit: int) -> int:
        """Return how many of the `new` tokens that follow the cached ones come before the place where a state is kept;
        0 if it is not among them."""
        end = self.cached_tokens + new
        at = (end - 1) // unit * unit if self.keep_at is None else self.keep_at
        return at - self.cached_tokens if self.cached_tokens < at <= end else 0

    def resume(self, text: Sequence[int]) -> None:
        """Take the next tokens of a text, which were cached without having been computed here."""
        self.tokens += text[len(self.tokens) : self.cached_tokens]
        self.exact_chunks = self.cached_tokens // (self._engine.settings.prefill_chunk or 1)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens to the conversation; only they are computed. See `LongContextEngine.append`."""
        self._engine.append({self: tokens})

    def generate(self, sampling: Sampling | None = None) -> list[int]:
        """Generate the next tokens, add them to the conversation and return them."""
        return self._engine.continue_all([self], sampling or Sampling())[0]

    def stream(self, sampling: Sampling | None = None) -> Iterator[int]:
        """Generate token by token; the conversation gets the tokens of every step that has begun."""
        for step in self._engine.stream([self], sampling or Sampling()):
            yield from step[self]

    def fork(self, tokens: int | None = None) -> Session:
        """Open a session with the same prefix. See `LongContextEngine.fork`."""
        return self._engine.fork(self, tokens)

    def drop_drafts(self) -> None:
        """Remove drafted tokens that were not drawn from the cache."""
        if self.ahead:
            self._engine.cache_manager.truncate(self.number, self.cached_tokens - len(self.ahead))
            self.ahead = []

    def close(self) -> None:
        """Free the session's pages unless other sessions share them. Closing twice has no effect."""
        self._engine.close(self)


@dataclass(eq=False)
class Generation:
    """A continuation of a session in progress. `LongContextEngine.start` creates it.

    Attributes:
        stream: see `Sampling.seed`.
        tokens: the tokens generated so far.
        finish_reason: None while it runs; then stop, length or error (logits that are not finite, or `dead_end`).
        dead_end: whether the grammar allows no token after these.
        grammars: of the engine; None if it has none.
    """

    session: Session
    sampling: Sampling
    stream: int = 0
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    dead_end: bool = False
    grammars: Grammars | None = None

    def __post_init__(self) -> None:
        if self.sampling.grammar is not None and self.grammars is None:
            raise refuse("grammar", "", "an engine with `grammars`", "Set them, or leave the grammar out.")
        if self.sampling.max_new_tokens == 0:
            self.finish_reason = "length"

    @property
    def is_plain(self) -> bool:
        """Whether every token is the likeliest one, and nothing else is asked of it."""
        how = self.sampling
        return how.temperature == 0 and not how.adjusts and how.logprobs is None

    def ends_with_next(self, max_tokens: float) -> bool:
        """Whether the next token is the last one, whatever it is."""
        is_last = len(self.tokens) + 1 >= self.sampling.max_new_tokens
        return self.finish_reason is not None or is_last or len(self.session.tokens) + 1 >= max_tokens

    @cached_property
    def _prompt(self) -> frozenset[int]:
        return frozenset(self.session.tokens[: len(self.session.tokens) - len(self.tokens)])

    @cached_property
    def _matcher(self) -> Matcher:
        """The state of the grammar; only ranks that draw have it."""
        assert self.grammars is not None and self.sampling.grammar is not None
        return self.grammars(self.sampling.grammar, self.sampling.stop)

    def draw(self, logits: Tensor) -> int:
        """Return the next token, or NOT_FINITE or NO_TOKEN, which all ranks report; this one alone does not raise."""
        if not torch.isfinite(logits).all():
            return NOT_FINITE
        prompt = () if self.sampling.repetition_penalty == 1 else self._prompt
        allowed = None if self.sampling.grammar is None else self._matcher(self.tokens)
        if allowed is not None and not allowed.any():
            return NO_TOKEN
        return sample(logits, self.sampling, self.stream, len(self.session.tokens), prompt, self.tokens, allowed)

    @cached_property
    def _text(self) -> array[int]:
        return array("i")

    def draft(self, most: int, max_tokens: float) -> list[int]:
        """Return up to `most` tokens that may follow: those after the latest place in the text that ends like it.

        At least 2 tokens have to be equal; a place with 3 of them is preferred, and one that `most` tokens follow.

        Args:
            max_tokens: the length at which the session ends.
        """
        tokens = self.session.tokens
        most = int(min(most, self.sampling.max_new_tokens - len(self.tokens) - 1, max_tokens - len(tokens) - 1))
        self._text.extend(tokens[len(self._text) :])
        if most < 1 or len(tokens) < 3:
            return []
        text = numpy.frombuffer(self._text, dtype=numpy.int32)
        places = 1 + numpy.flatnonzero(text[1:-1] == text[-1])
        places = places[text[places - 1] == text[-2]]
        three = places[text[places - 2] == text[-3]]  # at the first place this compares with the end, which is harmless
        places = three if len(three) else places
        if not len(places):
            return []
        early = places[places < len(text) - most]
        at = int(early[-1] if len(early) else places[0]) + 1
        return tokens[at : at + most]

    def follow(self) -> bool:
        """Go on after the token that was drawn last if it was drafted, else drop the drafts. Return whether the next
        token can be drawn."""
        session, ahead = self.session, self.session.ahead
        if ahead and self.finish_reason != "error" and ahead[0][0] == session.tokens[-1]:
            session.next_token = ahead.pop(0)[1]
            if self.finish_reason is None:
                return True
        session.drop_drafts()
        return False

    def add(self, token: int, max_tokens: float) -> bool:
        """Add a drawn token to the session, and return whether it is part of the output.

        Args:
            max_tokens: the length at which the session ends.
        """
        if token < 0:
            self.finish_reason, self.dead_end = "error", token == NO_TOKEN
            return False
        self.session.tokens.append(token)
        is_output = token not in self.sampling.stop
        if not is_output:
            self.finish_reason = "stop"
        else:
            self.tokens.append(token)
            if len(self.tokens) == self.sampling.max_new_tokens or len(self.session.tokens) >= max_tokens:
                self.finish_reason = "length"
        self.session.finish_reason = self.finish_reason
        return is_output


def passes(
    settings: InferenceConfig,
    new: Mapping[Session, list[int]],
    pending: Mapping[Session, list[int]],
    most: int,
    cuts: Mapping[Session, int],
) -> Iterator[dict[Session, int]]:
    """Yield the passes of the model in order, as the number of tokens that each of their sessions computes.

    With `exact_reuse`, prompts have separate passes, whose results depend, bit for bit, only on the session's tokens:
    not on other sessions, nor on whether a prefix of whole chunks was cached. Single tokens that follow are still
    computed together.

    Args:
        new: the tokens that are being appended.
        pending: all tokens to compute.
        most: the most tokens of a pass, over all sessions, unless a chunk is larger.
        cuts: how many first tokens of `pending` end with a pass.
    """
    together = [list(pending)]
    if settings.exact_reuse:
        decoding = [session for session, tokens in pending.items() if len(tokens) == 1 and not new[session]]
        together = [[session] for session in pending if session not in decoding] + [decoding] * bool(decoding)
    pieces = {}
    for session, tokens in pending.items():
        ends = {*range(0, len(tokens), settings.prefill_chunk or most), cuts.get(session, 0), len(tokens)}
        pieces[session] = [stop - start for start, stop in pairwise(sorted(ends))]
    for sessions in together:
        for counts in zip_longest(*(pieces[session] for session in sessions), fillvalue=0):
            taken: dict[Session, int] = {}
            room = most
            for session, count in zip(sessions, counts, strict=True):
                if not count:
                    continue
                if taken and count > room:
                    yield taken
                    taken, room = {}, most
                taken[session] = count
                room -= count
            yield taken


def draw(
    generations: Sequence[Generation], group: dist.ProcessGroup | None, device: torch.device
) -> dict[Generation, tuple[int, Score | None]]:
    """Draw the next token of every generation where its logits are, and return them on all ranks. Collective, unless
    all ranks know all tokens already."""
    known: dict[Generation, tuple[int, Score | None]] = {}
    for generation in generations:
        next_token = generation.session.next_token
        if generation.is_plain and next_token is not None and (token := next_token.greedy) is not None:
            known[generation] = token, None
    generations = [generation for generation in generations if generation not in known]
    if not generations:
        return known
    following = [generation.session.next_token or NextToken() for generation in generations]
    settings = [generation.sampling for generation in generations]
    most = max((each.logprobs for each in settings if each.logprobs is not None), default=-1)
    rows = torch.zeros(len(generations), 1 + max(0, 2 + 2 * most), dtype=torch.float64, device=device)
    for row, generation, each in zip(rows, generations, following, strict=True):
        if each.logits is not None:
            token = generation.draw(each.logits)
            row[0] = token
            if most >= 0 and token >= 0:
                row[1:] = score_table(each.logits[None], torch.tensor([token], device=device), most)[0]
    found = all_reduce_sum(group, rows).tolist()
    return known | {
        generation: (int(row[0]), None if each.logprobs is None else Score.of(int(row[0]), row[1:], each.logprobs))
        for generation, row, each in zip(generations, found, settings, strict=True)
    }


def plain_ids(tokens: Sequence[int]) -> list[int]:
    """Return token ids as Python integers, also if they come from NumPy or torch.

    Raises:
        ValueError: they are not integers.
    """
    try:
        return list(map(operator.index, tokens))
    except TypeError:
        raise refuse("tokens", reprlib.repr(tokens), "integers, one after another", "Tokenize text first.") from None


def check_length(name: str, tokens: int, most: int | None) -> None:
    """Raise ValueError if a text has more tokens than the model may read and generate together (None: any number)."""
    if most is not None and tokens > most:
        expected = f"at most {most} tokens (inference.max_model_len)"
        default = "by default the length that the model was trained with, or its RoPE is scaled to"
        raise refuse(name, tokens, expected, f"Shorten it, or raise the key ({default}).")


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError if there are no tokens, or an id is outside the vocabulary."""
    if not tokens:
        raise refuse("tokens", list(tokens), "1 or more", "Give the session some tokens.")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        token = next(token for token in tokens if not 0 <= token < vocab_size)
        raise refuse("token", token, f"an id from 0 to {vocab_size - 1}", "Check the tokenizer.")
