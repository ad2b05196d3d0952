"""Which cached token lies where: pages per session and rank. Pure bookkeeping, the same on every rank.

Every rank keeps the books of all ranks, so that sizes and places are known everywhere and nothing is exchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ..errors import refuse
from ..layout import Layout, contiguous, zigzag
from .pages import BlockPool, Shard

FEW = 512
"""New tokens a rank up to which shares are single stretches. The last one then sees more of the new tokens than the
first, at most `FEW` times `n * FEW / 2` pairs more than the mean: 0.03 ms in FlashAttention-2 with 32 heads of 128 on 4
H200s (330 TFLOP/s). Two stretches see what they see in more kernel calls and merges, of which hosts take about 0.15 ms
each (`schedules.Costs.of_device`): at 66 tokens over a long cache 15 operations a layer instead of 9, with `one_hop` on
4 ranks."""


class CacheFull(ValueError):
    """Tokens that do not fit into the cache; nothing has been changed."""


@dataclass
class _Session:
    """first: the rank that comes first where all hold the same."""

    first: int
    shards: list[Shard]


@dataclass(frozen=True)
class Fork:
    """A session that begins as another one.

    Attributes:
        copies: per rank, the slots whose keys and values have to be copied before anything else is placed, and where
            to; both are empty where full pages are all there is to share.
    """

    session: int
    copies: tuple[tuple[range, range], ...]


@dataclass(frozen=True)
class ScheduledChunk:
    """New tokens of one session, given their places.

    Attributes:
        session: whose.
        cached: tokens it had before, at positions `0..cached-1`; the new ones follow.
        new: how many.
        layout: how the new tokens are cut into shares, and `shares` which of them each rank has.
        cached_runs, new_runs: per rank, the slots of its cache that hold them, in the order of their positions.
        positions: per rank, those of its cached tokens, in the order of `cached_runs`.
    """

    session: int
    cached: int
    new: int
    layout: Layout
    shares: tuple[int, ...]
    cached_runs: tuple[tuple[range, ...], ...]
    new_runs: tuple[tuple[range, ...], ...]
    positions: tuple[tuple[range, ...], ...]

    def new_spans(self, rank: int) -> tuple[range, ...]:
        """Which of the new tokens, counted from 0, `rank` has."""
        return tuple(span for span in self.layout.spans[self.shares[rank]] if span)

    def num_new(self, rank: int) -> int:
        return sum(map(len, self.new_spans(rank)))


class CacheManager:
    """Pages of all sessions on all ranks.

    New tokens are cut into shares (`shares_of`); the larger ones go to the ranks that hold less of the session, and
    where they hold the same, round robin from rank `session mod n` on. So a session's tokens are even over the ranks
    to 2 tokens whatever its history, and a decoded token t of session b lies on rank (b + t) mod n.

    Sessions with a common beginning share its pages (`fork`), which are counted once and freed by the last that holds
    them. Only full pages are shared and only the sole holder writes into a page: of each rank's last page a fork gets
    a copy. A fork goes on as its source would have, so places depend on the history of the tokens alone. Forked within
    a chunk of T tokens it may be uneven by `ceil(T / 2n)` tokens more than before (`ceil(T / n)` where shares are
    single stretches); later chunks never add to that.

    Args:
        n: ranks of the context-parallel group.
        pages_per_rank, page_tokens: size of each rank's cache.
        few: new tokens a rank up to which shares are single stretches.
    """

    def __init__(self, n: int, pages_per_rank: int, page_tokens: int, few: int = FEW) -> None:
        for name, value in (("n", n), ("pages_per_rank", pages_per_rank), ("page_tokens", page_tokens)):
            if value < 1:
                raise refuse(name, value, "1 or more", f"Raise {name}.")
        self.n = n
        self.page_tokens = page_tokens
        self.pages_per_rank = pages_per_rank
        self._few = few
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
        """Over all ranks, shared ones counted once."""
        return sum(self.pages_per_rank - pool.num_free for pool in self._pools)

    def pages(self, session: int, rank: int) -> Sequence[int]:
        """The pages that hold the session's tokens on `rank`, in order. They change with the session."""
        return self._shards(session)[rank].pages

    def open(self) -> int:
        """A new, empty session's number; it takes no memory yet."""
        number = self._opened
        self._opened += 1
        self._sessions[number] = _Session(number % self.n, [Shard() for _ in range(self.n)])
        return number

    def fork(self, session: int, tokens: int) -> Fork:
        """A new session that begins with the first `tokens` cached tokens of another.

        Raises:
            ValueError: a session that is not open, or has fewer tokens.
            CacheFull: no room for a copy of a rank's last page; nothing has changed.
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
            own = self._pools[rank].take(1 if rest else 0, shared[-1] if shared else -1)
            new.add_pages([*shared, *own], self.page_tokens)
            new.extend(prefixes[rank])
            copies.append((old.page_slots(full, rest, self.page_tokens), new.page_slots(full, rest, self.page_tokens)))
        return Fork(number, tuple(copies))

    def shorten(self, session: int, tokens: int) -> Fork:
        """Forget all but a session's first `tokens` cached tokens, leaving alone what others share. See `fork`."""
        fork = self.fork(session, tokens)
        self._sessions[session], self._sessions[fork.session] = self._sessions[fork.session], self._sessions[session]
        self.close(fork.session)
        return replace(fork, session=session)

    def length(self, session: int) -> int:
        return sum(shard.tokens for shard in self._shards(session))

    def num_tokens(self, session: int, rank: int) -> int:
        return self._shards(session)[rank].tokens

    def num_pages(self, session: int, rank: int) -> int:
        """Shared ones included."""
        return len(self._shards(session)[rank].pages)

    def held_pages(self, sessions: Iterable[int], rank: int) -> int:
        """Pages that any of these sessions holds, each counted once."""
        return len(set().union(*(self._shards(session)[rank].pages for session in sessions)))

    def most_pages(self, session: int, more: int) -> int:
        """Pages that the session holds on any rank once it has got so many more tokens, at most, in whatever chunks."""
        sizes = [shard.tokens for shard in self._shards(session)]
        spread = max(2, max(sizes) - min(sizes))
        return self._pages(-(-(sum(sizes) + more) // self.n) + spread)

    def append(self, counts: Mapping[int, int]) -> tuple[ScheduledChunk, ...]:
        """Give places to `counts[session]` new tokens of every session named: to all of them, or to none.

        Raises:
            ValueError: a session that is not open, or fewer than 1 token.
            CacheFull: they do not fit; nothing has changed.
        """
        shares = {}
        need = [0] * self.n
        for session, count in counts.items():
            shards = self._shards(session)
            if count < 1:
                raise refuse("new tokens", count, "1 or more", "Give the session some tokens.")
            shares[session] = self._shares(session, count)
            sizes = [shares_of(self.n, count, self._few).num_tokens(share) for share in shares[session]]
            for rank, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
                need[rank] += self._pages(shard.tokens + size) - len(shard.pages)
        for rank, pages in enumerate(need):
            if pages > self._pools[rank].num_free:
                free = self._pools[rank].num_free
                raise CacheFull(
                    f"{sum(counts.values())} new tokens need {pages} pages of {self.page_tokens} tokens on rank "
                    f"{rank}: expected at most the {free} of {self.pages_per_rank} that are free. Close sessions, "
                    "give fewer tokens, or raise inference.cache_tokens."
                )
        return tuple(self._place(session, count, shares[session]) for session, count in counts.items())

    def undo(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Take back the latest `append`, whose tokens were never computed."""
        for chunk in reversed(chunks):
            for rank, shard in enumerate(self._shards(chunk.session)):
                shard.shrink(chunk.num_new(rank))
                self._pools[rank].give_back(shard.drop_pages(self._pages(shard.tokens)))

    def evict(self, session: int) -> list[Shard]:
        """Give up a session's pages; it stays open, with nothing cached. Returns what it held on every rank."""
        shards = self._shards(session)
        for rank, shard in enumerate(shards):
            self._pools[rank].give_back(shard.pages)
        self._sessions[session].shards = [Shard() for _ in range(self.n)]
        return shards

    def restore(self, session: int, shards: list[Shard]) -> None:
        """Take back an `evict`, after all that was placed since is taken back too, and nothing of it computed."""
        for pool, shard in zip(self._pools, shards, strict=True):
            pool.take_back(shard.pages)
        self._sessions[session].shards = shards

    def close(self, session: int) -> None:
        """Give up a session's pages and forget it."""
        self.evict(session)
        del self._sessions[session]

    def slots(self, session: int, rank: int) -> tuple[range, ...]:
        """The slots that hold the session's tokens on `rank`, in the order of `positions`."""
        shard = self._shards(session)[rank]
        return shard.runs(0, shard.tokens, self.page_tokens)

    def positions(self, session: int, rank: int) -> tuple[range, ...]:
        return tuple(self._shards(session)[rank].positions)

    def _session(self, session: int) -> _Session:
        if session not in self._sessions:
            raise refuse("session", session, "an open session", "Open another; closed ones cannot go on.")
        return self._sessions[session]

    def _shards(self, session: int) -> list[Shard]:
        return self._session(session).shards

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _shares(self, session: int, count: int) -> tuple[int, ...]:
        """Larger shares to ranks that hold less."""
        layout = shares_of(self.n, count, self._few)
        books = self._sessions[session]
        ranks = sorted(range(self.n), key=lambda r: (books.shards[r].tokens, (r - books.first) % self.n))
        by_size = sorted(range(self.n), key=lambda share: -layout.num_tokens(share))
        share_of = dict(zip(ranks, by_size, strict=True))
        return tuple(share_of[rank] for rank in range(self.n))

    def _place(self, session: int, count: int, shares: tuple[int, ...]) -> ScheduledChunk:
        shards = self._shards(session)
        cached = self.length(session)
        held = [shard.tokens for shard in shards]
        positions = tuple(tuple(shard.positions) for shard in shards)
        layout = shares_of(self.n, count, self._few)
        for rank, shard in enumerate(shards):
            shard.extend([range(s.start + cached, s.stop + cached) for s in layout.spans[shares[rank]]])
            missing = self._pages(shard.tokens) - len(shard.pages)
            shard.add_pages(self._pools[rank].take(missing, shard.pages[-1] if shard.pages else -1), self.page_tokens)
        return ScheduledChunk(
            session=session,
            cached=cached,
            new=count,
            layout=layout,
            shares=shares,
            cached_runs=tuple(s.runs(0, h, self.page_tokens) for s, h in zip(shards, held, strict=True)),
            new_runs=tuple(s.runs(h, s.tokens, self.page_tokens) for s, h in zip(shards, held, strict=True)),
            positions=positions,
        )


@functools.lru_cache(maxsize=64)  # a decode asks for that of 1 token, over and over
def shares_of(n: int, new: int, few: int = FEW) -> Layout:
    """New tokens cut into a share for every rank: up to `few` a rank lie in a row (contiguous), more are cut for equal
    causal work (zigzag)."""
    return (contiguous if new <= few * n else zigzag)(n, new)


def slots_of(runs: Sequence[range]) -> list[int]:
    """Every slot of some runs, in order."""
    return list(chain.from_iterable(runs))
