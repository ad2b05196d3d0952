"""Bookkeeping for the sharded KV cache: which page of which rank stores which token of which session.

Every rank keeps the state of all ranks, in integers alone. Sizes and places are therefore known everywhere, and ranks
exchange nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..core.errors import refuse
from .pages import Copy, Held, Key, PagePool, Place, Shard

MAX_CONTIGUOUS = 512
"""The number of new tokens per rank up to which each rank gets one contiguous part.

The last rank then sees more of the new tokens than the first: at most `MAX_CONTIGUOUS` times `n * MAX_CONTIGUOUS / 2`
pairs more than the mean, or 0.03 ms in FlashAttention-2 with 32 heads of 128 on 4 H200s (330 TFLOP/s). Two parts per
rank need more kernel calls and merges for the same keys, and the host takes about 0.15 ms for each
(`schedules.Costs.of_cluster`): for 66 tokens over a long cache, 15 operations per layer instead of 9, with `one_hop` on
4 ranks."""


class CacheFull(ValueError):
    """Raised for tokens that do not fit into the cache; nothing has changed then."""


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

    A page holds `page_tokens` consecutive tokens of a session, from a multiple of `page_tokens` on; all of them are on
    one rank. The index finds every complete and computed page by its tokens and the page before it, and thus by all
    tokens from the first on. So a prefix is on the same ranks in the same slots for every session that finds it,
    whoever computed it, in chunks of any sizes. It is compared, not only hashed: no client can make up a text that
    finds the pages of another. Pages that no session holds stay in the index until their room is needed, the least
    recently used first. All of this is determined by the calls, which all ranks make alike.

    The pages that new tokens begin are cut into one part per rank (`split_pages`). The larger parts go to the ranks
    that hold fewest pages of the session, so ranks differ by at most one page. Among ranks with equally many pages the
    order is round robin, starting from rank `session mod n`. A prefix that ends inside a chunk may be more uneven;
    later chunks never add to that.

    The index is of one model's keys and values. What else they depend on belongs into `salt`.

    Args:
        n: ranks of the context-parallel group.
        pages_per_rank, page_tokens: the size of each rank's cache.
        max_contiguous: new tokens per rank up to which the parts are contiguous.
        repeatable: the order starts from the rank of the session's first page if it has any. Relative to that rank,
            places then depend only on the history of the tokens, but sessions with a common prefix go on on one rank.
    """

    def __init__(
        self,
        n: int,
        pages_per_rank: int,
        page_tokens: int,
        max_contiguous: int = MAX_CONTIGUOUS,
        repeatable: bool = False,
    ) -> None:
        for name, value in (("n", n), ("pages_per_rank", pages_per_rank), ("page_tokens", page_tokens)):
            if value < 1:
                raise refuse(name, value, "1 or more", f"Raise {name}.")
        self.n = n
        self.page_tokens = page_tokens
        self.pages_per_rank = pages_per_rank
        self._max_contiguous, self._repeatable = max_contiguous, repeatable
        self._index: dict[Key, Place] = {}
        self._pools = [PagePool(pages_per_rank, self._index, rank) for rank in range(n)]
        self._sessions: dict[int, Held] = {}
        self.copies: Mapping[Key, Copy] = {}  # of pages, elsewhere
        self._opened = self._named = 0

    @property
    def pools(self) -> Sequence[PagePool]:
        return self._pools

    @property
    def sessions(self) -> tuple[int, ...]:
        return tuple(self._sessions)

    @property
    def slots_per_rank(self) -> int:
        return self.pages_per_rank * self.page_tokens

    def free_pages(self, rank: int) -> int:
        """Return the number of pages that no session holds."""
        return self._pools[rank].available

    def used_pages(self) -> int:
        """Return the number of pages that sessions hold on all ranks, shared ones counted once."""
        return sum(self.pages_per_rank - pool.available for pool in self._pools)

    def cached_pages(self) -> int:
        """Return the number of pages on all ranks that no session holds and later ones may find."""
        return sum(pool.num_cached for pool in self._pools)

    def drop_cached(self) -> None:
        """Free the pages that no session holds."""
        for pool in self._pools:
            pool.drop_cached()

    def shards(self, session: int) -> list[Shard]:
        """Return the session's pages and positions on every rank. They change with the session.

        Raises:
            ValueError: the session is not open.
        """
        return self._held(session).shards

    def length(self, session: int) -> int:
        return sum(shard.tokens for shard in self.shards(session))

    def page_numbers(self, session: int) -> list[int]:
        """Return the numbers of the session's first pages, as far as they are in the index."""
        return self._held(session).numbers

    def held_pages(self, sessions: Iterable[int], rank: int) -> int:
        """Return the number of pages that any of these sessions holds, each counted once."""
        return len(set().union(*(self.shards(session)[rank].pages for session in sessions)))

    def max_pages(self, session: int, more: int, ahead: Iterable[Copy] = ()) -> int:
        """Return the most pages that the session can hold on a rank after `more` tokens, in chunks of any sizes.

        Args:
            ahead: the pages that are added first (`add_page`).
        """
        counts = [len(shard.pages) for shard in self.shards(session)]
        for copy in ahead:
            counts[copy.rank] += 1
        spread = max(1, max(counts) - min(counts))
        return -(-(self._pages(self.length(session) + more) + spread * (self.n - 1)) // self.n)

    def open(self, tokens: Sequence[int] = (), salt: int = 0, multiple: int = 1) -> int:
        """Open a session with the longest prefix of `tokens` in the cache, and return its number.

        Args:
            salt: sessions with another one do not find its pages.
            multiple: of tokens that the prefix must have.
        """
        found: list[Place] = []
        while place := self._index.get(self._key(salt, found[-1].number if found else 0, tokens, len(found))):
            found.append(place)
        unit = math.lcm(multiple, self.page_tokens) // self.page_tokens
        del found[len(found) // unit * unit :]
        return self._open(salt, [place[:2] for place in found], [place.number for place in found])

    def copies_of(self, session: int, tokens: Sequence[int]) -> list[Copy]:
        """Return the copies of the pages that follow those of a session, which has only complete ones, in its text."""
        held, found = self._held(session), list[Copy]()
        before = held.numbers[-1] if held.numbers else 0
        while copy := self.copies.get(self._key(held.salt, before, tokens, len(held.pages) + len(found))):
            found.append(copy)
            before = copy.number
        return found

    def add_page(self, session: int, copy: Copy) -> tuple[int, bool]:
        """Add a copy's page to a session, which has only complete ones; return it, and whether it has its contents."""
        held, pool, place = self._held(session), self._pools[copy.rank], self._index.get(copy.key)
        found = place is not None and place.rank == copy.rank and not held.twice
        if place is not None and found:
            page = place.page
            pool.hold([page])
        else:
            (page,) = pool.allocate(1, held.shards[copy.rank].last_page)
            held.twice = held.twice or place is not None
        held.add_full(copy.rank, page)
        if not held.twice:
            held.numbers.append(copy.number)
            if not found:
                pool.name(page, copy.key, copy.number)
        return page, found

    def fork(self, session: int, tokens: int) -> int:
        """Open a session with the complete pages of another's first tokens, and return its number."""
        source, count = self._held(session), tokens // self.page_tokens
        fork = self._open(source.salt, source.pages[:count], source.numbers[:count])
        self._sessions[fork].twice = len(source.numbers) < count
        return fork

    def _open(self, salt: int, pages: Sequence[tuple[int, int]], numbers: Sequence[int]) -> int:
        number = self._opened
        self._opened += 1
        held = self._sessions[number] = self._empty(number, salt)
        for rank, page in pages:
            self._pools[rank].hold([page])
            held.add_full(rank, page)
        held.numbers += numbers
        return number

    def name_pages(self, session: int, tokens: Sequence[int], most: int | None = None) -> None:
        """Enter the session's complete pages into the index, so that other sessions find them.

        Args:
            tokens: of the session; those that are cached have been computed.
            most: enter pages of this many first tokens only; None for all.
        """
        held, length = self._held(session), self.length(session)
        complete = (length if most is None else min(most, length)) // self.page_tokens
        while (count := len(held.numbers)) < complete and not held.twice:
            key = self._key(held.salt, held.numbers[-1] if count else 0, tokens, count)
            held.twice = key in self._index
            if not held.twice:
                self._named += 1
                # A page that has a copy keeps its number, so that those that follow it are found.
                number = self.copies[key].number if key in self.copies else self._named
                rank, page = held.pages[count]
                self._pools[rank].name(page, key, number)
                held.numbers.append(number)

    def forget(self, session: int) -> None:
        """Remove the session's pages from the index."""
        for rank, page in self._held(session).pages:
            self._pools[rank].forget(page)

    def append(self, counts: Mapping[int, int]) -> tuple[ScheduledChunk, ...]:
        """Place `counts[session]` new tokens of every session: all of them or none.

        Raises:
            ValueError: a session is not open, or gets fewer than 1 token.
            CacheFull: they do not fit.
        """
        parts = {}
        need = [0] * self.n
        for session, count in counts.items():
            held = self._held(session)
            if count < 1:
                raise refuse("new tokens", count, "1 or more", "Give the session some tokens.")
            parts[session] = self._assign(held, self.length(session), count)
            for rank in parts[session][1]:
                need[rank] += 1
        for rank, pages in enumerate(need):
            if pages > (free := self.free_pages(rank)):
                raise CacheFull(
                    f"{sum(counts.values())} new tokens need {pages} pages of {self.page_tokens} tokens on rank "
                    f"{rank}: expected at most the {free} of {self.pages_per_rank} that are free. Close sessions, "
                    "give fewer tokens, or raise inference.cache_tokens."
                )
        return tuple(self._place(session, count, *parts[session]) for session, count in counts.items())

    def undo(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Undo the latest `append`, whose tokens were never computed."""
        for chunk in reversed(chunks):
            self.truncate(chunk.session, chunk.cached)

    def truncate(self, session: int, tokens: int) -> None:
        """Drop all but a session's first `tokens` cached tokens. It must not share a page that is cut in two."""
        held, length = self._held(session), self.length(session)
        cut = tokens // self.page_tokens
        if tokens % self.page_tokens and cut < len(held.numbers):  # its last slots will be written again
            self._pools[held.pages[cut][0]].forget(held.pages[cut][1])
        while length > tokens:
            rank, _ = held.pages[-1]
            stop = max(tokens, (length - 1) // self.page_tokens * self.page_tokens)
            unused = held.shards[rank].remove_last(length - stop)
            self._pools[rank].release(unused)
            length = stop
            if unused:
                held.pages.pop()
        del held.numbers[cut:]

    def evict(self, session: int) -> Held:
        """Release a session's pages and return what it held. It stays open, with nothing cached."""
        held = self._held(session)
        for pool, shard in zip(self._pools, held.shards, strict=True):
            pool.release(shard.pages)
        self._sessions[session] = self._empty(held.opened, held.salt)
        return held

    def restore(self, session: int, held: Held) -> None:
        """Undo an `evict`, after every later placement was undone without having been computed."""
        for pool, shard in zip(self._pools, held.shards, strict=True):
            pool.hold(shard.pages)
        self._sessions[session] = held

    def close(self, session: int) -> None:
        """Release a session's pages and remove it. Complete ones can be found until their room is needed."""
        self.evict(session)
        del self._sessions[session]

    def _held(self, session: int) -> Held:
        if session not in self._sessions:
            raise refuse("session", session, "an open session", "Open another; closed ones cannot go on.")
        return self._sessions[session]

    def _empty(self, opened: int, salt: int) -> Held:
        return Held(opened, salt, [Shard(self.page_tokens) for _ in range(self.n)])

    def _key(self, salt: int, before: int, tokens: Sequence[int], index: int) -> Key:
        """Return the key of page number `index`; one that no page has if the tokens do not fill it."""
        start = index * self.page_tokens
        return Key(salt, before, array("i", tokens[start : start + self.page_tokens]).tobytes())

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def _assign(self, held: Held, cached: int, count: int) -> tuple[list[list[range]], list[int]]:
        """Return every rank's part of new tokens, and the ranks of the pages that they begin, in order: the larger
        parts for ranks that hold fewer pages of the session."""
        parts: list[list[range]] = [[] for _ in range(self.n)]
        head = min(count, -cached % self.page_tokens)  # goes into the last page
        if head:
            parts[held.pages[-1][0]].append(range(head))
        homes = [0] * self._pages(count - head)
        pieces = split_pages(self.n, len(homes), count <= self._max_contiguous * self.n)
        first = held.pages[0][0] if held.pages and self._repeatable else held.opened % self.n
        ranks = sorted(range(self.n), key=lambda r: (len(held.shards[r].pages), (r - first) % self.n))
        for rank, spans in zip(ranks, sorted(pieces, key=lambda spans: -sum(map(len, spans))), strict=True):
            for span in filter(None, spans):
                homes[span.start : span.stop] = [rank] * len(span)
                start, stop = (head + at * self.page_tokens for at in (span.start, span.stop))
                parts[rank].append(range(start, min(stop, count)))
        return parts, homes

    def _place(self, session: int, count: int, parts: list[list[range]], homes: list[int]) -> ScheduledChunk:
        held, cached = self._held(session), self.length(session)
        before = [shard.tokens for shard in held.shards]
        positions = tuple(tuple(shard.positions) for shard in held.shards)
        own = []
        for rank, (pool, shard, spans) in enumerate(zip(self._pools, held.shards, parts, strict=True)):
            shard.extend([range(span.start + cached, span.stop + cached) for span in spans])
            own.append(pool.allocate(homes.count(rank), shard.last_page))
            shard.add_pages(own[-1])
        pages = [iter(each) for each in own]
        held.pages += [(rank, next(pages[rank])) for rank in homes]
        return ScheduledChunk(
            session=session,
            cached=cached,
            new=count,
            new_spans=tuple(map(tuple, parts)),
            cached_slots=tuple(s.slots(0, h) for s, h in zip(held.shards, before, strict=True)),
            new_slots=tuple(s.slots(h, s.tokens) for s, h in zip(held.shards, before, strict=True)),
            cached_positions=positions,
        )


@functools.lru_cache(maxsize=64)  # decode asks for the parts of a page, or of none, over and over
def split_pages(n: int, pages: int, few: bool) -> tuple[tuple[range, ...], ...]:
    """Cut new pages into n parts, whose sizes differ by at most one: contiguous for `few` tokens, otherwise zigzag,
    whose parts have equal causal work."""
    size, larger = divmod(pages, n if few else 2 * n)
    cuts = (i * size + min(i, larger) for i in range((n if few else 2 * n) + 1))
    pieces = [range(start, stop) for start, stop in itertools.pairwise(cuts)]
    return tuple((pieces[i],) if few else (pieces[i], pieces[-1 - i]) for i in range(n))
