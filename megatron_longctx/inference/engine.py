"""Sessions over a model whose cache is sharded: append tokens, generate, go on, on any number of ranks.

All ranks make the same calls with the same arguments, as in training; each gets the same answers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..comm import all_reduce_sum
from ..errors import refuse
from ..topology.cluster import GIB
from .batch import Batch
from .cache_manager import CacheFull, CacheManager, Fork, ScheduledChunk
from .cached_attention import CachedModel, rows_of
from .choice import Chooser
from .decode import Decoder
from .pages import Shard
from .sampling import Sampling
from .session import NOT_FINITE, Generation, NextToken, Session, check_ids, draw, plain_ids
from .settings import EngineSettings
from .warm_up import meet_batches, meet_rows, run_prompts

__all__ = ["CachedModel", "EngineSettings", "Generation", "LongContextEngine", "Session"]

_T = TypeVar("_T")


class _Lost(NamedTuple):
    """An evicted session, what it held, and what was known of its next token."""

    session: Session
    shards: list[Shard]
    next_token: NextToken | None


class LongContextEngine:
    """Prefill, multi-turn cache and decode over a model.

    Args:
        model: its attention holds the cache's tensors.
        manager: the cache's books, of as many slots a rank as the attention has.
        chooser: of the mode of every batch.
    """

    def __init__(
        self, model: CachedModel, manager: CacheManager, chooser: Chooser, settings: EngineSettings | None = None
    ) -> None:
        self.model = model
        self.cache_manager = manager
        self.settings = settings or EngineSettings()
        self._attention = model.attention
        self._chooser = chooser
        self._open: dict[int, Session] = {}
        self._clock = itertools.count(1)
        self._decoder = Decoder(model, manager, self.settings, chooser.mode)

    @property
    def decoding(self) -> str:
        """How batches of single tokens are computed."""
        return self._decoder.name

    def replicates(self, new: int) -> bool:
        """Whether a prompt of so many tokens, given alone, is computed as decode is: by every rank."""
        return self._chooser.mode == "auto" and not self.settings.exact and 1 < new <= self._decoder.most_prompt

    def release(self) -> None:
        """Let go of what refers to process groups; call it before they are destroyed. Sessions can still go on."""
        self._decoder.release()

    def warm_up(self, sequences: int = 1) -> None:
        """Compile kernels, capture graphs, compute a few tokens in every mode and forget them: no prompt or step has to
        wait for it, nor for ranks to connect.

        Args:
            sequences: most that are decoded together.
        """
        self._attention.compile_kernels(self.cache_manager.page_tokens)
        pages = min(map(self.cache_manager.free_pages, range(self.cache_manager.n)))
        most = int(min(self._most_tokens, pages * self.cache_manager.page_tokens * self.cache_manager.n))
        for mode in self._chooser.candidates if self.cache_manager.n > 1 else ("pass_kv",):  # each links other ranks
            with self._chooser.taking(mode):
                run_prompts(self, most)
        if self.replicates(2):
            meet_rows(self, self._decoder.prompt_sizes, most)
        if not self.settings.exact:  # single tokens of a prompt are computed otherwise
            meet_batches(self, self._decoder.batch_sizes(sequences), pages)

    def open(self, prefix_of: Session | None = None, tokens: int | None = None) -> Session:
        """A new session: empty, or with the first `tokens` tokens (default: all) of another, which may go on itself.

        What the other has cached of them is shared, not computed again; each frees it when it closes, the last for
        good. A batch of sessions that share keys passes these among the ranks once.

        Raises:
            ValueError: a closed session, more tokens than it has, or a number of them without a session.
            CacheFull: not even the tokens that do not fill a page can be copied; nothing has changed.
        """
        if prefix_of is None:
            if tokens is not None:
                raise refuse("tokens", tokens, "a session to take them from", "Name it as prefix_of.")
            return self._opened(Session(self, self.cache_manager.open()))
        self._check_open(prefix_of)
        total = len(prefix_of.tokens)
        count = total if tokens is None else tokens
        if not 0 <= count <= total:
            raise refuse("tokens", count, f"at most the {total} of session {prefix_of.number}", "Take fewer.")
        cached = min(count, prefix_of.cached_tokens)
        fork = self._with_room({prefix_of}, lambda: self.cache_manager.fork(prefix_of.number, cached))
        self._copy(fork)
        session = self._opened(Session(self, fork.session))
        session.tokens = prefix_of.tokens[:count]
        session.exact_chunks = prefix_of.exact_chunks
        session.last_used = prefix_of.last_used
        if count == total:
            session.next_token = prefix_of.next_token
        return session

    def _opened(self, session: Session) -> Session:
        self._open[session.number] = session
        return session

    def _copy(self, fork: Fork) -> None:
        source, target = fork.copies[self._attention.rank]
        if source:
            self._attention.copy(source, target)

    def close(self, session: Session) -> None:
        if not session.closed:
            self.cache_manager.close(session.number)
            del self._open[session.number]
            session.closed = True
            session.next_token = None

    @property
    def _most_tokens(self) -> float:
        return self.model.max_positions or math.inf

    @property
    def cache_gib(self) -> float:
        """Of pages in use, over all context-parallel ranks."""
        return (
            self.cache_manager.used_pages() * self.cache_manager.page_tokens * self._attention.shape.token_bytes / GIB
        )

    def append(self, new: Mapping[Session, Sequence[int]]) -> None:
        """Prefill: add tokens to several sessions and compute them in one batch.

        Raises:
            ValueError: a closed session, no tokens, what are no integers, ids outside the vocabulary, or more tokens
                than the model has positions for; no session has changed.
            CacheFull: they do not fit; no session has changed.
        """
        ids = {session: plain_ids(tokens) for session, tokens in new.items()}
        for session, tokens in ids.items():
            self._check_open(session)
            check_ids(tokens, self.model.vocab_size)
            if (total := len(session.tokens) + len(tokens)) > self._most_tokens:
                most = f"at most the model's {self.model.max_positions} positions"
                raise refuse("tokens of the session", total, most, "Shorten it.")
        self._advance(ids)

    def next_logits(self, sessions: Sequence[Session]) -> Tensor:
        """fp32 `[len(sessions), vocab_size]`: of each session's next token, the same on every rank.

        Raises:
            ValueError: a closed or empty session.
            CacheFull: what is not computed yet of them does not fit.
        """
        for session in sessions:
            self._check_begun(session)
        self._ready(sessions)
        rows = torch.zeros(len(sessions), self.model.vocab_size, device=self._attention.device)
        for i, session in enumerate(sessions):
            if session.next_token is not None and session.next_token.logits is not None:
                rows[i] = session.next_token.logits
        return all_reduce_sum(self._attention.group, rows)

    def start(self, session: Session, sampling: Sampling, stream: int = 0) -> Generation:
        """Begin to continue a session; `step` computes.

        Raises:
            ValueError: a closed or empty session, or one with no positions left.
        """
        self._check_begun(session)
        if len(session.tokens) >= self._most_tokens:
            most = f"less than {self.model.max_positions}"
            raise refuse("tokens of the session", len(session.tokens), most, "Open another.")
        session.finish_reason = None
        return Generation(session, sampling, stream)

    def step(self, generations: Sequence[Generation]) -> dict[Generation, int]:
        """One more token of every generation, in one batch; what is not computed yet of their sessions comes first.

        Returns:
            the tokens, of those that got one. Stop tokens become part of their session only.

        Raises:
            CacheFull: what has to be computed does not fit; nothing has changed.
        """
        self._ready([generation.session for generation in generations])
        emitted: dict[Generation, int] = {}
        drawn = draw(generations, self._attention.group, self._attention.device)
        for generation, token in zip(generations, drawn, strict=True):
            session, sampling = generation.session, generation.sampling
            if token == NOT_FINITE:
                generation.finish_reason = "error"
                continue
            session.tokens.append(token)
            if token in sampling.stop:
                generation.finish_reason = "stop"
            else:
                emitted[generation] = token
                generation.tokens.append(token)
                if len(generation.tokens) == sampling.max_new_tokens or len(session.tokens) >= self._most_tokens:
                    generation.finish_reason = "length"
            session.finish_reason = generation.finish_reason
        return emitted

    def stream(self, sessions: Sequence[Session], sampling: Sampling) -> Iterator[dict[Session, int]]:
        """Generate for several sessions in one batch; each ends by itself.

        Yields:
            by step, the token of every session that got one.

        Raises:
            ValueError: as `start`, or logits that are not finite.
            CacheFull: the tokens asked for do not fit; nothing has been generated.
        """
        active = [self.start(session, sampling, i) for i, session in enumerate(sessions)]
        if len(set(sessions)) < len(sessions):
            raise refuse("sessions", [s.number for s in sessions], "each one once", "Leave the repeated ones out.")
        # The last token is given out and not computed.
        self._reserve({s: int(min(sampling.max_new_tokens, self._most_tokens - len(s.tokens))) - 1 for s in sessions})
        while active:
            emitted = self.step(active)
            if any(generation.finish_reason == "error" for generation in active):
                raise refuse("logits", "not finite", "numbers", "Check the checkpoint, or use train.precision=fp32.")
            yield {generation.session: token for generation, token in emitted.items()}
            active = [generation for generation in active if generation.finish_reason is None]

    def continue_all(self, sessions: Sequence[Session], sampling: Sampling) -> list[list[int]]:
        """Every session's next tokens."""
        found: dict[Session, list[int]] = {session: [] for session in sessions}
        for step in self.stream(sessions, sampling):
            for session, token in step.items():
                found[session].append(token)
        return list(found.values())

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Continue several prompts in one batch, in sessions that are closed again."""
        with ExitStack() as opened:
            sessions = [opened.enter_context(closing(self.open())) for _ in prompts]
            self.append(dict(zip(sessions, prompts, strict=True)))
            return self.continue_all(sessions, sampling)

    def _check_open(self, session: Session) -> None:
        if session.closed or self._open.get(session.number) is not session:
            raise refuse("session", session.number, "an open session of this engine", "Open another.")

    def _check_begun(self, session: Session) -> None:
        self._check_open(session)
        if not session.tokens:
            raise refuse("session", session.number, "some tokens to go on from", "Append a prompt first.")

    def _ready(self, sessions: Sequence[Session]) -> None:
        """Compute what is not cached yet: tokens generated last, everything of an evicted session, the last token of a
        fork, whose logits nobody has."""
        late: dict[Session, list[int]] = {}
        for session in sessions:
            if session.tokens and session.next_token is None and session.cached_tokens == len(session.tokens):
                keep = session.cached_tokens - 1
                self._copy(self._with_room(sessions, partial(self.cache_manager.shorten, session.number, keep)))
            if session.cached_tokens < len(session.tokens):
                late[session] = []
        self._advance(late)

    def _reserve(self, more: Mapping[Session, int]) -> None:
        """See that so many more tokens of every session will fit, evicting others if that is allowed."""
        counts = {s: len(s.tokens) - s.cached_tokens + count for s, count in more.items()}
        self.cache_manager.undo(self._placed({s: count for s, count in counts.items() if count}, more))

    def _placed(
        self, counts: Mapping[Session, int], busy: Collection[Session], evicted: list[_Lost] | None = None
    ) -> tuple[ScheduledChunk, ...]:
        numbers = {session.number: count for session, count in counts.items()}
        return self._with_room(busy, lambda: self.cache_manager.append(numbers), evicted)

    def _with_room(self, busy: Collection[Session], place: Callable[[], _T], evicted: list[_Lost] | None = None) -> _T:
        """`place`, with others than `busy` sessions evicted until it fits, if that is allowed.

        Args:
            evicted: is told of them, to restore them where more that has to fit does not; without it, they are restored
                if this does not.
        """
        lost = [] if evicted is None else evicted
        while True:
            try:
                return place()
            except CacheFull:
                idle = [s for s in self._open.values() if s not in busy and s.cached_tokens]
                if not (self.settings.evict and idle):
                    if evicted is None:
                        self._restore(lost)
                    raise
                oldest = min(idle, key=lambda session: session.last_used)
                lost.append(_Lost(oldest, self.cache_manager.evict(oldest.number), oldest.next_token))
                oldest.next_token = None

    def _restore(self, lost: Sequence[_Lost]) -> None:
        """Nothing has been computed since they were evicted, so that what they had cached is still there."""
        for session, shards, next_token in reversed(lost):
            self.cache_manager.restore(session.number, shards)
            session.next_token = next_token

    def _advance(self, new: Mapping[Session, list[int]]) -> None:
        """Compute every session's tokens that are not cached, then `new` ones, pass by pass; all of it or nothing."""
        if not new:
            return
        todo = {session: session.tokens[session.cached_tokens :] + tokens for session, tokens in new.items()}
        reused = {session: session.cached_tokens for session in new}
        exact = {session: session.exact_tokens for session in new}
        placed: list[tuple[list[Session], tuple[ScheduledChunk, ...]]] = []
        evicted: list[_Lost] = []
        try:
            for together in self.settings.batches(new, todo):
                for counts in self.settings.passes(
                    {session: len(todo[session]) for session in together}, self.cache_manager.n
                ):
                    placed.append((list(counts), self._placed(counts, new, evicted)))
            evicted = []  # for good: their pages are written from here on
            found: dict[Session, NextToken] = {}
            for sessions, chunks in placed:
                texts = [todo[s][t.cached - reused[s] :][: t.new] for s, t in zip(sessions, chunks, strict=True)]
                ends = [t.cached + t.new == reused[s] + len(todo[s]) for s, t in zip(sessions, chunks, strict=True)]
                prompts = self.settings.exact and any(new[s] or len(todo[s]) > 1 for s in sessions)
                found |= self._forward(sessions, chunks, texts, ends, single=not prompts)
                whole = self.settings.prefill_chunk if self.settings.exact else None
                if whole and [(t.cached, t.new) for t in chunks] == [(exact[sessions[0]], whole)]:
                    exact[sessions[0]] += whole
        except BaseException:
            for _, chunks in reversed(placed):
                self.cache_manager.undo(chunks)
            self._restore(evicted)
            raise
        now = next(self._clock)
        for session, tokens in new.items():
            session.tokens += tokens
            session.next_token = found.get(session, NextToken())
            session.exact_chunks = exact[session] // (self.settings.prefill_chunk or 1)
            session.last_used = now
            if tokens:
                session.reused_tokens = reused[session]

    def _forward(
        self,
        sessions: Sequence[Session],
        chunks: tuple[ScheduledChunk, ...],
        texts: Sequence[list[int]],
        ends: Sequence[bool],
        single: bool,
    ) -> dict[Session, NextToken]:
        """One pass of the model; what is known of the next token of sessions that end in it. single: it may go through
        the decoder, whose results depend on where a session's pages lie."""
        if single and self._decoder.takes(chunks, self._chooser.mode != "auto"):
            decoded = self._decoder(chunks, texts)
            return {session: found for session, found, end in zip(sessions, decoded, ends, strict=True) if end}
        rank, device = self._attention.rank, self._attention.device
        exact, widest = self.settings.exact, self._attention.shape.widest
        batch = Batch(self.cache_manager.n, self.cache_manager.slots_per_rank, chunks, widest)
        mode = self._chooser.choose(batch, self._attention.target(exact, widest)).mode
        self._attention.begin(batch, mode, joined=exact)
        tokens, positions = rows_of(chunks, texts, rank)
        last = [batch.last_row(i) if end else (-1, -1) for i, end in enumerate(ends)]
        mine = [(session, row) for session, (home, row) in zip(sessions, last, strict=True) if home == rank]
        found = self.model.logits(
            tokens.to(device),
            positions.to(device),
            torch.tensor([row for _, row in mine], dtype=torch.int64, device=device),
        )
        rows = {session: found[i] for i, (session, _) in enumerate(mine)}
        return {session: NextToken(rows.get(session)) for session, end in zip(sessions, ends, strict=True) if end}
