"""Bookkeeping for the sharded KV cache: which page of which rank stores which token of which session.

Every rank keeps the state of all ranks, in integers alone. Sizes and places are therefore known everywhere, and ranks
exchange nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..core.errors import refuse
from ..core.layout import Layout, contiguous, zigzag
from .pages import BlockPool, Shard

MAX_CONTIGUOUS = 512
"""The number of new tokens per rank up to which each rank gets one contiguous part.

The last rank then sees more of the new tokens than the first: at most `MAX_CONTIGUOUS` times `n * MAX_CONTIGUOUS / 2`
pairs more than the mean, or 0.03 ms in FlashAttention-2 with 32 heads of 128 on 4 H200s (330 TFLOP/s). Two parts per
rank need more kernel calls and merges for the same keys, and the host takes about 0.15 ms for each
(`schedules.Costs.of_cluster`): for 66 tokens over a long cache, 15 operations per layer instead of 9, with `one_hop` on
4 ranks."""


class CacheFull(ValueError):
    """Raised for tokens that do not fit into the cache; nothing has changed then."""


@dataclass
class _Session:
    """first: the rank that comes first among ranks with equally many tokens."""

    first: int
    shards: list[Shard]


@dataclass(frozen=True)
class Fork:
    """A session that begins with the tokens of another.

    Attributes:
        copies: per rank, source and target slots of the keys and values that must be copied before any new token is
            placed. Both are empty if only full pages are shared.
    """

    session: int
    copies: tuple[tuple[range, range], ...]


@dataclass(frozen=True)
class ScheduledChunk:
    """New tokens of one session, with their places in the cache.

    Attributes:
        cached: the number of tokens cached before, at positions `0..cached-1`; the new tokens follow.
        new: the number of new tokens.
        new_spans: per rank, its new tokens, counted from 0.
        cached_slots, new_slots: per rank, the slots of its cached and of its new tokens, in the order of positions.
        cached_positions: per rank, the positions of its cached tokens, in the order of `cached_slots`.
    """

    session: int
    cached: int
    new: int
    new_spans: tuple[tuple[range, ...], ...]
    cached_slots: tuple[tuple[range, ...], ...]
    new_slots: tuple[tuple[range, ...], ...]
    cached_positions: tuple[tuple[range, ...], ...]

    def num_new(self, rank: int) -> int:
        return sum(map(len, self.new_spans[rank]))

    def new_positions(self, rank: int) -> list[range]:
        return [range(span.start + self.cached, span.stop + self.cached) for span in self.new_spans[rank]]


class CacheManager:
    """The pages of all sessions on all ranks.

    New tokens are cut into one part per rank (`split_new_tokens`). The larger parts go to the ranks that hold fewest
    tokens of the session, so ranks never differ by more than 2 tokens. Among ranks with equally many tokens the order
    is round robin, starting from rank `session mod n`. Decoded token t of session b is stored on rank (b + t) mod n.

    Sessions with a common prefix share its pages (`fork`). Shared pages are counted once, and the last holder frees
    them. Only full pages are shared and only the sole holder of a page writes to it, so a fork copies each rank's last
    partial page. A fork continues as its source would: places depend only on the history of the tokens. A fork inside
    a chunk of T tokens may be more uneven than before by `ceil(T / 2n)` tokens (`ceil(T / n)` if the parts are
    contiguous); later chunks never add to that.

    Args:
        n: ranks of the context-parallel group.
        pages_per_rank, page_tokens: the size of each rank's cache.
        max_contiguous: new tokens per rank up to which the parts are contiguous.
    """

    def __init__(self, n: int, pages_per_rank: int, page_tokens: int, max_contiguous: int = MAX_CONTIGUOUS) -> None:
        for name, value in (("n", n), ("pages_per_rank", pages_per_rank), ("page_tokens", page_tokens)):
            if value < 1:
                raise refuse(name, value, "1 or more", f"Raise {name}.")
        self.n = n
        self.page_tokens = page_tokens
        self.pages_per_rank = pages_per_rank
        self._max_contiguous = max_contiguous
        self._pools = [BlockPool(pages_per_rank) for _ in range(n)]
        self._sessions: dict[int, _Session] = {}
        self._opened = 0

    @property
    def sessions(self) -> tuple[int, ...]:
        return tuple(self._sessions)

    @property
    def slots_per_rank(self) -> int:
        return self.pages_per_rank * self.page_tokens

    def free_pages(self, rank: int) -> int:
        return self._pools[rank].num_free

    def used_pages(self) -> int:
        """Return the number of pages in use on all ranks, shared ones counted once."""
        return sum(self.pages_per_rank - pool.num_free for pool in self._pools)

    def shards(self, session: int) -> list[Shard]:
        """Return the session's pages and positions on every rank. They change with the session.

        Raises:
            ValueError: the session is not open.
        """
        return self._session(session).shards

    def length(self, session: int) -> int:
        return sum(shard.tokens for shard in self.shards(session))

    def held_pages(self, sessions: Iterable[int], rank: int) -> int:
        """Return the number of pages that any of these sessions holds, each counted once."""
        return len(set().union(*(self.shards(session)[rank].pages for session in sessions)))

    def max_pages(self, session: int, more: int) -> int:
        """Return the most pages that the session can hold on a rank after `more` tokens, in chunks of any sizes."""
        sizes = [shard.tokens for shard in self.shards(session)]
        spread = max(2, max(sizes) - min(sizes))
        return self._pages(-(-(sum(sizes) + more) // self.n) + spread)

    def open(self) -> int:
        """Open an empty session and return its number; it takes no memory yet."""
        number = self._opened
        self._opened += 1
        self._sessions[number] = _Session(number % self.n, self._no_shards())
        return number

    def fork(self, session: int, tokens: int) -> Fork:
        """Open a session that begins with the first `tokens` cached tokens of another.

        Raises:
            ValueError: the session is not open, or has fewer tokens.
            CacheFull: a rank's last page cannot be copied.
        """
        source, length = self._session(session), self.length(session)
        if not 0 <= tokens <= length:
            raise refuse("tokens of the fork", tokens, f"at most the {length} that are cached", "Fork at fewer.")
        prefixes = [shard.prefix(tokens) for shard in source.shards]
        counts = [sum(map(len, prefix)) for prefix in prefixes]
        for rank, count in enumerate(counts):
            if count % self.page_tokens and not self.free_pages(rank):
                raise CacheFull(
                    f"a fork needs 1 page on rank {rank}: expected one that is free, of {self.pages_per_rank}. Close "
                    "sessions, or raise inference.cache_tokens."
                )
        number = self.open()
        fork = self._sessions[number]
        fork.first = source.first
        copies = []
        for rank, (old, new) in enumerate(zip(source.shards, fork.shards, strict=True)):
            full, rest = divmod(counts[rank], self.page_tokens)
            shared = old.pages[:full]
            self._pools[rank].share(shared)
            own = self._pools[rank].allocate(1 if rest else 0, shared[-1] if shared else -1)
            new.add_pages([*shared, *own])
            new.extend(prefixes[rank])
            copies.append((old.page_slots(full, rest), new.page_slots(full, rest)))
        return Fork(number, tuple(copies))

    def truncate(self, session: int, tokens: int) -> Fork:
        """Drop all but a session's first `tokens` cached tokens without touching shared pages. See `fork`."""
        fork = self.fork(session, tokens)
        self._sessions[session], self._sessions[fork.session] = self._sessions[fork.session], self._sessions[session]
        self.close(fork.session)
        return replace(fork, session=session)

    def append(self, counts: Mapping[int, int]) -> tuple[ScheduledChunk, ...]:
        """Place `counts[session]` new tokens of every session: all of them or none.

        Raises:
            ValueError: a session is not open, or gets fewer than 1 token.
            CacheFull: they do not fit.
        """
        spans = {}
        need = [0] * self.n
        for session, count in counts.items():
            shards = self.shards(session)
            if count < 1:
                raise refuse("new tokens", count, "1 or more", "Give the session some tokens.")
            spans[session] = self._assign(session, count)
            for rank, (shard, own) in enumerate(zip(shards, spans[session], strict=True)):
                need[rank] += self._pages(shard.tokens + sum(map(len, own))) - len(shard.pages)
        for rank, pages in enumerate(need):
            if pages > (free := self.free_pages(rank)):
                raise CacheFull(
                    f"{sum(counts.values())} new tokens need {pages} pages of {self.page_tokens} tokens on rank "
                    f"{rank}: expected at most the {free} of {self.pages_per_rank} that are free. Close sessions, "
                    "give fewer tokens, or raise inference.cache_tokens."
                )
        return tuple(self._place(session, count, spans[session]) for session, count in counts.items())

    def undo(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Undo the latest `append`, whose tokens were never computed."""
        for chunk in reversed(chunks):
            for rank, shard in enumerate(self.shards(chunk.session)):
                self._pools[rank].release(shard.remove_last(chunk.num_new(rank)))

    def evict(self, session: int) -> list[Shard]:
        """Release a session's pages and return what it held on every rank. It stays open, with nothing cached."""
        shards = self.shards(session)
        for pool, shard in zip(self._pools, shards, strict=True):
            pool.release(shard.pages)
        self._sessions[session].shards = self._no_shards()
        return shards

    def restore(self, session: int, shards: list[Shard]) -> None:
        """Undo an `evict`, after every later placement was undone without having been computed."""
        for pool, shard in zip(self._pools, shards, strict=True):
            pool.hold(shard.pages)
        self._sessions[session].shards = shards

    def close(self, session: int) -> None:
        """Release a session's pages and remove it."""
        self.evict(session)
        del self._sessions[session]

    def _session(self, session: int) -> _Session:
        if session not in self._sessions:
            raise refuse("session", session, "an open session", "Open another; closed ones cannot go on.")
        return self._sessions[session]

    def _no_shards(self) -> list[Shard]:
        return [Shard(self.page_tokens) for _ in range(self.n)]

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _assign(self, session: int, count: int) -> tuple[tuple[range, ...], ...]:
        """Return every rank's part of new tokens: the larger parts for ranks that hold less of the session."""
        layout = split_new_tokens(self.n, count, self._max_contiguous)
        state = self._sessions[session]
        ranks = sorted(range(self.n), key=lambda r: (state.shards[r].tokens, (r - state.first) % self.n))
        by_size = sorted(range(self.n), key=lambda part: -layout.num_tokens(part))
        part_of = dict(zip(ranks, by_size, strict=True))
        return tuple(tuple(span for span in layout.spans[part_of[rank]] if span) for rank in range(self.n))

    def _place(self, session: int, count: int, new_spans: tuple[tuple[range, ...], ...]) -> ScheduledChunk:
        shards, cached = self.shards(session), self.length(session)
        held = [shard.tokens for shard in shards]
        positions = tuple(tuple(shard.positions) for shard in shards)
        for pool, shard, spans in zip(self._pools, shards, new_spans, strict=True):
            shard.extend([range(span.start + cached, span.stop + cached) for span in spans])
            missing = self._pages(shard.tokens) - len(shard.pages)
            shard.add_pages(pool.allocate(missing, shard.pages[-1] if shard.pages else -1))
        return ScheduledChunk(
            session=session,
            cached=cached,
            new=count,
            new_spans=new_spans,
            cached_slots=tuple(s.slots(0, h) for s, h in zip(shards, held, strict=True)),
            new_slots=tuple(s.slots(h, s.tokens) for s, h in zip(shards, held, strict=True)),
            cached_positions=positions,
        )


@functools.lru_cache(maxsize=64)  # decode asks for the layout of 1 token over and over
def split_new_tokens(n: int, new: int, max_contiguous: int = MAX_CONTIGUOUS) -> Layout:
    """Cut new tokens into n parts: contiguous up to `max_contiguous` tokens per rank, otherwise zigzag, whose parts
    have equal causal work."""
    return (contiguous if new <= max_contiguous * n else zigzag)(n, new)
