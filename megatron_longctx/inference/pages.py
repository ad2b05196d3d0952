"""Bookkeeping for the KV cache pages: the reference-counted pool of a rank, and what one session holds."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Key(NamedTuple):
    """What the keys and values of a page depend on.

    Attributes:
        salt: of the session.
        before: the number of the page before it, which stands for all tokens before; 0 for none.
        tokens: its own, as bytes.
    """

    salt: int
    before: int
    tokens: bytes


class Place(NamedTuple):
    """Where a page is. number: a new one for every page that gets a key."""

    rank: int
    page: int
    number: int


class Copy(NamedTuple):
    """A page in the host memory of a rank.

    Attributes:
        number: see `Place`.
        windowed: the page there of layers with windows, if it is needed.
    """

    key: Key
    rank: int
    page: int
    number: int
    windowed: int | None = None


class PagePool:
    """The reference-counted pages of one rank: each is held by sessions, cached or free.

    A page without holders is cached as long as it has a key, by which later sessions find it. Cached pages become free
    when there is no other room, the least recently used first. Allocation prefers neighbouring pages, so that a session
    occupies few runs of slots.

    Args:
        index: the pages of all ranks that have a key; the pool adds and removes its own.
        rank: of this pool.

    Attributes:
        rested: gets the pages that become cached; None if nobody asks.
    """

    def __init__(self, num_pages: int, index: dict[Key, Place], rank: int = 0) -> None:
        self._free = bytearray(b"\1" * num_pages)
        self._holders = [0] * num_pages
        self._index, self._rank = index, rank
        self._keys: dict[int, Key] = {}
        self.rested: deque[int] | None = None
        # The least recently used first. Not a dict, whose first key is slow to find after many deletions.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_free = num_pages

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def available(self) -> int:
        """The number of pages without holders."""
        return self._num_free + len(self._cached)

    def allocate(self, count: int, after: int) -> list[int]:
        """Take `count` pages without holders, starting behind page `after` (-1: anywhere) if the pages there are free.

        The caller has checked that there are enough.
        """
        assert count <= self.available, "pages must be counted before they are allocated"
        while self._num_free < count:
            self.forget(next(iter(self._cached)))
        taken: list[int] = []
        following = after + 1
        while len(taken) < count and 0 < following < len(self._free) and self._free[following]:
            taken.append(following)
            following += 1
        self.hold(taken)
        while len(taken) < count:
            run = self._best_run(count - len(taken))
            self.hold(run)
            taken += run
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to pages."""
        for page in pages:
            self._num_free -= self._free[page]
            self._free[page] = 0
            self._cached.pop(page, None)
            self._holders[page] += 1

    def release(self, pages: Sequence[int], first: bool = False) -> None:
        """Remove a holder from pages. The last make room first: the others are of use without them.

        Args:
            first: they make room before all others, and do not come to `rested`.
        """
        for page in reversed(pages):
            assert self._holders[page], "a page was released twice"
            self._holders[page] -= 1
            if not self._holders[page] and page in self._keys:
                self._cached[page] = None
                if first:
                    self._cached.move_to_end(page, last=False)
                elif self.rested is not None:
                    self.rested.append(page)
            elif not self._holders[page]:
                self._free[page] = 1
                self._num_free += 1

    def name(self, page: int, key: Key, number: int) -> None:
        """Give a held page, whose tokens are complete and computed, its key."""
        self._keys[page] = key
        self._index[key] = Place(self._rank, page, number)

    def key(self, page: int) -> Key | None:
        return self._keys.get(page)

    def cached(self, page: int) -> tuple[Key, int] | None:
        """Return the key and the number of a cached page; None for other pages."""
        key = self._keys[page] if page in self._cached else None
        return None if key is None else (key, self._index[key].number)

    def forget(self, page: int) -> None:
        """Remove the key of a page, if it has one. A cached page becomes free."""
        if page in self._keys:
            del self._index[self._keys.pop(page)]
        if page in self._cached:
            del self._cached[page]
            self._free[page] = 1
            self._num_free += 1

    def drop_cached(self) -> None:
        for page in list(self._cached):
            self.forget(page)

    def _best_run(self, count: int) -> range:
        """Return the first `count` pages of the smallest free run that has them, or the longest run if none does."""
        runs = [range(*match.span()) for match in re.finditer(b"\1+", self._free)]
        return (min((run for run in runs if len(run) >= count), key=len, default=None) or max(runs, key=len))[:count]


class Group:
    """The pages that some layers have, on all ranks.

    Attributes:
        num_pages: of each rank.
        index: the pages that have a key.
        copies: of pages, elsewhere.
    """

    def __init__(self, n: int, num_pages: int) -> None:
        self.num_pages = num_pages
        self.index: dict[Key, Place] = {}
        self.pools = [PagePool(num_pages, self.index, rank) for rank in range(n)]
        self.copies: Mapping[Key, Copy] = {}

    @property
    def used(self) -> int:
        """The number of pages that sessions hold, shared ones counted once."""
        return sum(self.num_pages - pool.available for pool in self.pools)

    @property
    def cached(self) -> int:
        """The number of pages that no session holds and later ones may find."""
        return sum(pool.num_cached for pool in self.pools)

    def release(self, shards: Sequence[Shard]) -> None:
        """Remove it again."""
        for pool, shard in zip(self.pools, shards, strict=True):
            pool.release(shard.pages)

    def forget(self, shards: Sequence[Shard]) -> None:
        for pool, shard in zip(self.pools, shards, strict=True):
            for page in shard.pages:
                pool.forget(page)

    def page_of(self, copy: Copy, after: int, rank: int) -> tuple[int, bool]:
        """Hold a page for the contents of a copy, and return whether it has them already.

        Args:
            after: see `PagePool.allocate`.
            rank: the copy's if the page is to have its key.
        """
        pool, place = self.pools[copy.rank], self.index.get(copy.key)
        if place is not None and place.rank == copy.rank:
            pool.hold([place.page])
            return place.page, True
        (page,) = pool.allocate(1, after)
        if rank == copy.rank:
            self.name(copy.rank, page, copy.key, copy.number)
        return page, False

    def name(self, rank: int, page: int, key: Key, number: int) -> None:
        """Give a held page its key, which another page may lose."""
        if (place := self.index.get(key)) is not None:
            self.pools[place.rank].forget(place.page)
        self.pools[rank].name(page, key, number)


@dataclass
class Shard:
    """The tokens of one session on one rank, in one group of layers.

    Attributes:
        page_tokens: slots per page.
        pages: page numbers, in the order of the tokens stored there.
        tokens: the number of tokens.
        positions: of the tokens, ascending.
        slots: of the tokens, in the same order; neighbouring ones form one range.
    """

    page_tokens: int
    pages: list[int] = field(default_factory=list)
    tokens: int = 0
    positions: list[range] = field(default_factory=list)
    slots: list[range] = field(default_factory=list)

    @property
    def last_page(self) -> int:
        """The last of `pages`; -1 for none."""
        return self.pages[-1] if self.pages else -1

    def extend(self, positions: Sequence[range], pages: Sequence[int]) -> list[range]:
        """Add tokens at the end, with the pages that they begin, and return their slots."""
        self.pages += pages
        added: list[range] = []
        for span in positions:
            _add(self.positions, span)
            end = self.tokens + len(span)
            while self.tokens < end:
                page, at = divmod(self.tokens, self.page_tokens)
                size = min(end - self.tokens, self.page_tokens - at)
                first = self.pages[page] * self.page_tokens + at
                _add(added, range(first, first + size))
                self.tokens += size
        for run in added:
            _add(self.slots, run)
        return added

    def add_full(self, page: int, index: int) -> None:
        """Add page number `index` of the session, which is complete, behind complete ones."""
        self.extend([range(index * self.page_tokens, (index + 1) * self.page_tokens)], [page])

    def remove_first(self) -> int:
        """Remove the first page, which is complete, and return it."""
        self.tokens -= self.page_tokens
        for ranges in (self.positions, self.slots):
            ranges[0] = ranges[0][self.page_tokens :]
            if not ranges[0]:
                del ranges[0]
        return self.pages.pop(0)

    def remove_last(self, tokens: int) -> list[int]:
        """Remove the last tokens, and return the pages that are no longer needed."""
        self.tokens -= tokens
        for ranges in (self.positions, self.slots):
            _drop_last(ranges, tokens)
        needed = -(-self.tokens // self.page_tokens)
        unused, self.pages = self.pages[needed:], self.pages[:needed]
        return unused


@dataclass
class Held:
    """What a session holds.

    Attributes:
        opened: its number among all sessions.
        salt: of its pages' keys.
        groups: per group of layers, the shard of every rank. Layers with windows have the last pages alone.
        pages: (rank, page) in the order of positions, of the first group.
        numbers: of its first pages, which are in the index or equal to those there.
        tokens: their number.
        found: the number of its first pages that it found when it was opened.
        left: the number of its first pages that layers with windows do not have any more.
    """

    opened: int
    salt: int
    groups: list[list[Shard]]
    pages: list[tuple[int, int]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    tokens: int = 0
    found: int = 0
    left: int = 0

    @property
    def shards(self) -> list[Shard]:
        """The shards of all tokens."""
        return self.groups[0]

    def windowed(self) -> dict[int, int]:
        """Return the pages of layers with windows, keyed by their number in the session."""
        pages = [iter(shard.pages) for shards in self.groups[1:] for shard in shards]
        last = self.pages[self.left :] if pages else []
        return {index: next(pages[rank]) for index, (rank, _) in enumerate(last, self.left)}

    def add_full(self, rank: int, page: int) -> None:
        """Add a page of a rank that holds all of its tokens; those before it are complete."""
        self.shards[rank].add_full(page, len(self.pages))
        self.pages.append((rank, page))
        self.tokens += self.shards[rank].page_tokens


def _add(ranges: list[range], span: range) -> None:
    """Add a range of step 1 at the end of a list; neighbours become one."""
    start = ranges.pop().start if ranges and ranges[-1].stop == span.start else span.start
    ranges.append(range(start, span.stop))


def _drop_last(ranges: list[range], count: int) -> None:
    """Remove the last `count` numbers from a list of ranges."""
    while count:
        last = ranges.pop()
        if len(last) > count:
            ranges.append(last[: len(last) - count])
        count -= min(count, len(last))
