"""Bookkeeping for the sharded KV cache: which page of which rank stores which token of which session.

Every rank keeps the state of all ranks, in integers alone. Sizes and places are therefore known everywhere, and ranks
exchange nothing.
"""

from __future__ import annotations

import functools
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..core.errors import refuse
from .pages import Copy, Group, Held, Key, Place, Shard

MAX_CONTIGUOUS = 512
"""The number of new tokens per rank up to which each rank gets one contiguous part.

The last rank then sees more of the new tokens than the first: at most `MAX_CONTIGUOUS` times `n * MAX_CONTIGUOUS / 2`
pairs more than the mean, or 0.03 ms in FlashAttention-2 with 32 heads of 128 on 4 H200s (330 TFLOP/s). Two parts per
rank need more kernel calls and merges for the same keys, and the host takes about 0.15 ms for each
(`schedules.Costs.of_cluster`): for 66 tokens over a long cache, 15 operations per layer instead of 9, with `one_hop` on
4 ranks."""


class CacheFull(ValueError):
    """Raised for tokens that do not fit into the cache; nothing has changed then."""


class Windows(NamedTuple):
    """The cache of layers with windows, which give up the tokens that no later token sees.

    Attributes:
        tokens: before itself that a query sees, in the layers of these that see most.
        pages: of each rank, at most as many as other layers have.
        sequences, pass_tokens: if these have fewer, the most sequences, and new tokens of a rank in a pass, for which
            there is certainly room.
    """

    tokens: int
    pages: int
    sequences: int
    pass_tokens: int

    @classmethod
    def for_sequences(
        cls, tokens: int, sequences: int, pass_tokens: int, page_tokens: int, most: int = 2**31
    ) -> Windows:
        """Return those with room for some sequences and a pass. most: the pages that other layers have."""
        pages = sequences * most_windowed(tokens, page_tokens) + -(-pass_tokens // page_tokens)
        return cls(tokens, min(pages, most), sequences, pass_tokens)


def most_windowed(window: int, page_tokens: int) -> int:
    """Return the most pages of a rank that a sequence has in layers with windows, apart from the tokens of a pass."""
    return window // page_tokens + 5


@dataclass(frozen=True)
class ScheduledChunk:
    """New tokens of one session, with their places in the cache.

    Attributes:
        cached: the number of tokens cached before, at positions `0..cached-1`; the new tokens follow.
        new: the number of new tokens.
        new_spans: per rank, its new tokens, counted from 0.
        cached_slots, new_slots: per rank, the slots of its cached and of its new tokens, in the order of positions.
        cached_positions: per rank, the positions of its cached tokens, in the order of `cached_slots`.
        windowed: the same tokens in layers with windows, with the cached ones that these keep; None if all layers have
            the same pages.
    """

    session: int
    cached: int
    new: int
    new_spans: tuple[tuple[range, ...], ...]
    cached_slots: tuple[tuple[range, ...], ...]
    new_slots: tuple[tuple[range, ...], ...]
    cached_positions: tuple[tuple[range, ...], ...]
    windowed: ScheduledChunk | None = None

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

    Layers with windows have pages of their own, on the same ranks and with the same keys. A session releases them when
    no later token sees them. A prefix can be used where the pages that its next token sees are still there.

    Args:
        n: ranks of the context-parallel group.
        pages_per_rank, page_tokens: the size of each rank's cache.
        max_contiguous: new tokens per rank up to which the parts are contiguous.
        repeatable: the order starts from the rank of the session's first page if it has any. Relative to that rank,
            places then depend only on the history of the tokens, but sessions with a common prefix go on on one rank.
        windows: None if all layers keep all tokens.
    """

    def __init__(
        self,
        n: int,
        pages_per_rank: int,
        page_tokens: int,
        max_contiguous: int = MAX_CONTIGUOUS,
        repeatable: bool = False,
        windows: Windows | None = None,
    ) -> None:
        for name, value in (("n", n), ("pages_per_rank", pages_per_rank), ("page_tokens", page_tokens)):
            if value < 1:
                raise refuse(name, value, "1 or more", f"Raise {name}.")
        self.n = n
        self.page_tokens = page_tokens
        self.pages_per_rank = pages_per_rank
        self._max_contiguous, self._repeatable = max_contiguous, repeatable
        self.windows = windows
        self.groups = [Group(n, pages_per_rank)] + ([] if windows is None else [Group(n, windows.pages)])
        self._index, self._pools = self.groups[0].index, self.groups[0].pools
        self._sessions: dict[int, Held] = {}
        self._opened = self._named = 0

    @property
    def sessions(self) -> tuple[int, ...]:
        return tuple(self._sessions)

    @property
    def slots_per_rank(self) -> int:
        return self.pages_per_rank * self.page_tokens

    @property
    def windowed_slots_per_rank(self) -> int | None:
        return None if self.windows is None else self.windows.pages * self.page_tokens

    @property
    def most_sequences(self) -> float:
        """The most sequences that layers with windows certainly have room for."""
        return self.windows.sequences if self._few_windowed and self.windows else math.inf

    @property
    def pass_tokens(self) -> float:
        """The most new tokens of a rank in a pass that layers with windows certainly have room for."""
        return self.windows.pass_tokens if self._few_windowed and self.windows else math.inf

    @property
    def _few_windowed(self) -> bool:
        return self.groups[-1].num_pages < self.pages_per_rank

    def free_pages(self, rank: int) -> int:
        """Return the number of pages that no session holds."""
        return self._pools[rank].available

    def used_pages(self) -> int:
        """Return the number of pages that sessions hold on all ranks, shared ones counted once."""
        return self.groups[0].used

    def cached_pages(self) -> int:
        """Return the number of pages on all ranks that no session holds and later ones may find."""
        return self.groups[0].cached

    def drop_cached(self) -> None:
        """Free the pages that no session holds."""
        for group in self.groups:
            for pool in group.pools:
                pool.drop_cached()

    def shards(self, session: int) -> list[Shard]:
        """Return the session's pages and positions on every rank. They change with the session.

        Raises:
            ValueError: the session is not open.
        """
        return self._held(session).shards

    def pages(self, session: int, rank: int) -> tuple[list[int], list[int]]:
        """Return the session's pages on a rank in layers without and with windows. They change with the session."""
        groups = self._held(session).groups
        return groups[0][rank].pages, groups[-1][rank].pages

    def length(self, session: int) -> int:
        return sum(shard.tokens for shard in self.shards(session))

    def held_pages(self, sessions: Iterable[int], rank: int) -> int:
        """Return the number of pages that any of these sessions holds, each counted once."""
        return len(set().union(*(self.shards(session)[rank].pages for session in sessions)))

    def fits(self, most: Mapping[int, int]) -> bool:
        """Whether sessions can grow to `most[session]` pages on every rank; shared pages are counted once."""
        return len(most) <= self.most_sequences and all(
            self.held_pages(most, rank) + sum(p - len(self.shards(s)[rank].pages) for s, p in most.items())
            <= self.pages_per_rank
            for rank in range(self.n)
        )

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
        return self._open(salt, [place[:2] for place in found], [place.number for place in found], {}, multiple)

    def copies_of(self, session: int, tokens: Sequence[int], multiple: int = 1) -> list[Copy]:
        """Return the copies of the pages that follow those of a session, which has only complete ones, in its text.

        Args:
            multiple: of pages that the session has then.
        """
        held, found = self._held(session), list[Copy]()
        before, cached = held.numbers[-1] if held.numbers else 0, len(held.pages)
        while copy := self.groups[0].copies.get(self._key(held.salt, before, tokens, cached + len(found))):
            found.append(copy)
            before = copy.number
        if self.windows is None:
            return found[: (cached + len(found)) // multiple * multiple - cached]
        others = [self.groups[1].copies.get(copy.key) for copy in found]
        others = [
            other if other and other.rank == copy.rank else None for copy, other in zip(found, others, strict=True)
        ]
        count = self._usable(cached + len(found), multiple, lambda i: i < cached or others[i - cached] is not None)
        seen = self._first_seen(count * self.page_tokens) - cached
        return [
            copy._replace(windowed=other.page if other and i >= seen else None)
            for i, (copy, other) in enumerate(zip(found[: count - cached], others, strict=False))
        ]

    def add_page(self, session: int, copy: Copy) -> list[tuple[int, bool]]:
        """Add a copy's page to a session, which has only complete ones.

        Returns:
            the page of every group of layers that have a copy, and whether it has its contents.
        """
        held, added = self._held(session), []
        if self.windows is not None and copy.windowed is None:
            self._leave(held, len(held.pages))
            held.left += 1
        for group, shards in zip(self.groups[: 1 + (copy.windowed is not None)], held.groups, strict=False):
            pool, place = group.pools[copy.rank], group.index.get(copy.key)
            found = place is not None and place.rank == copy.rank
            if place is not None and found:
                page = place.page
                pool.hold([page])
            else:
                (page,) = pool.allocate(1, shards[copy.rank].last_page)
                if self._index.get(copy.key, copy).rank == copy.rank:
                    group.name(copy.rank, page, copy.key, copy.number)
            shards[copy.rank].add_full(page, len(held.pages))
            added.append((page, found))
        held.pages.append((copy.rank, added[0][0]))
        held.numbers.append(copy.number)
        return added

    def fork(self, session: int, tokens: int, multiple: int = 1) -> int:
        """Open a session with the complete pages of another's first tokens, and return its number.

        Args:
            multiple: of tokens that it must have.
        """
        source, count = self._held(session), tokens // self.page_tokens
        own = {} if self.windows is None else source.windowed()
        return self._open(source.salt, source.pages[:count], source.numbers[:count], own, multiple)

    def _open(
        self, salt: int, pages: Sequence[tuple[int, int]], numbers: Sequence[int], own: Mapping[int, int], multiple: int
    ) -> int:
        """Open a session with the most of these pages that it can go on from. own: see `_windowed`."""
        number = self._opened
        self._opened += 1
        held = self._sessions[number] = self._empty(number, salt)
        unit = math.lcm(multiple, self.page_tokens) // self.page_tokens
        held.found = self._usable(len(pages), unit, lambda i: self._windowed(pages, i, own) is not None)
        for rank, page in pages[: held.found]:
            self._pools[rank].hold([page])
            held.add_full(rank, page)
        held.numbers += numbers[: held.found]
        self._see(held, own)
        return number

    def _usable(self, count: int, unit: int, has: Callable[[int], bool]) -> int:
        """Return the most of `count` complete pages, a multiple of `unit`, from which a session can go on.

        Args:
            has: whether layers with windows have a page, by its number.
        """
        count = at = count // unit * unit
        while self.windows is not None and at > self._first_seen(count * self.page_tokens):
            at -= 1
            if not has(at):
                count = at = at // unit * unit
        return count

    def _first_seen(self, tokens: int, ahead: int = 0) -> int:
        """Return the number of the first page that layers with windows see after some tokens. One more page is kept, so
        that the last one can be computed again."""
        assert self.windows is not None
        return max(0, tokens - self.windows.tokens - ahead) // self.page_tokens

    def _windowed(self, pages: Sequence[tuple[int, int]], index: int, own: Mapping[int, int]) -> int | None:
        """Return the page number `index` in layers with windows, if it is there.

        Args:
            pages: of a session.
            own: pages that it has.
        """
        rank, page = pages[index]
        key = self._pools[rank].key(page)
        place = None if key is None else self.groups[1].index.get(key)
        return own.get(index, place.page if place is not None and place.rank == rank else None)

    def _see(self, held: Held, own: Mapping[int, int]) -> None:
        """Let a session that has only complete pages hold those that layers with windows see next."""
        if self.windows is None:
            return
        held.groups[1] = self._no_shards()
        held.left = self._first_seen(len(held.pages) * self.page_tokens)
        if held.left and self._windowed(held.pages, held.left - 1, own) is not None:
            held.left -= 1
        for index in range(held.left, len(held.pages)):
            rank, page = held.pages[index][0], self._windowed(held.pages, index, own)
            assert page is not None
            self.groups[1].pools[rank].hold([page])
            held.groups[1][rank].add_full(page, index)

    def _leave(self, held: Held, left: int) -> None:
        """Release the pages before number `left` in layers with windows. Those that the session computed itself make
        room first: it is less likely that another prompt goes on from there than from the end of a text."""
        for index in range(held.left, left):
            rank = held.pages[index][0]
            self.groups[1].pools[rank].release([held.groups[1][rank].remove_first()], first=index >= held.found)
        held.left = max(held.left, left)

    def name_pages(self, session: int, tokens: Sequence[int], most: int | None = None) -> None:
        """Enter the session's complete pages into the index, so that other sessions find them.

        Args:
            tokens: of the session; those that are cached have been computed.
            most: enter pages of this many first tokens only; None for all.
        """
        held, length = self._held(session), self.length(session)
        complete = (length if most is None else min(most, length)) // self.page_tokens
        if len(held.numbers) >= complete:
            return
        own = {} if self.windows is None else held.windowed()
        while (count := len(held.numbers)) < complete:
            key = self._key(held.salt, held.numbers[-1] if count else 0, tokens, count)
            (rank, page), place, copy = held.pages[count], self._index.get(key), self.groups[0].copies.get(key)
            number = place or copy  # which keep it, so that the pages that follow are found
            if number is None:
                self._named += 1
            held.numbers.append(self._named if number is None else number.number)
            # A page takes the place of one that nobody holds, or from which layers with windows cannot go on.
            lost = count in own and place is not None and self._windowed([place[:2]], 0, {}) is None
            if place is None or lost or self._pools[place.rank].cached(place.page):
                self.groups[0].name(rank, page, key, held.numbers[-1])
                if count in own:
                    self.groups[1].name(rank, own[count], key, held.numbers[-1])

    def forget(self, session: int) -> None:
        """Remove the session's pages from the index."""
        for group, shards in zip(self.groups, self._held(session).groups, strict=True):
            for pool, shard in zip(group.pools, shards, strict=True):
                for page in shard.pages:
                    pool.forget(page)

    def check(self, counts: Mapping[int, int]) -> None:
        """Raise CacheFull if `counts[session]` more tokens of every session do not fit, a few at a time."""
        self._fit(counts, at_once=False)

    def append(self, counts: Mapping[int, int]) -> tuple[ScheduledChunk, ...]:
        """Place `counts[session]` new tokens of every session: all of them or none.

        Raises:
            ValueError: a session is not open, or gets fewer than 1 token.
            CacheFull: they do not fit.
        """
        for session in counts:
            if self.windows is not None:
                kept = self._first_seen(self.length(session), self.page_tokens)
                self._leave(self._held(session), kept)
        parts = self._fit(counts, at_once=True)
        return tuple(self._place(session, count, *parts[session]) for session, count in counts.items())

    def _fit(self, counts: Mapping[int, int], at_once: bool) -> dict[int, tuple[list[list[range]], list[int]]]:
        """Return `_assign` of every session, if there is room for all of them."""
        parts = {}
        need = [[0] * self.n for _ in self.groups]
        for session, count in counts.items():
            held = self._held(session)
            if count < 1:
                raise refuse("new tokens", count, "1 or more", "Give the session some tokens.")
            parts[session] = self._assign(held, self.length(session), count)
            for rank, shards in enumerate(zip(*held.groups, strict=True)):
                pages = parts[session][1].count(rank)
                need[0][rank] += pages
                if self.windows is not None:
                    if not at_once:
                        most = most_windowed(self.windows.tokens, self.page_tokens)
                        pages = min(pages, max(0, most - len(shards[1].pages)))
                    need[1][rank] += pages
        for group, of_group in zip(self.groups, need, strict=True):
            for rank, pages in enumerate(of_group):
                if pages > (free := group.pools[rank].available):
                    where, key = "", "inference.cache_tokens"
                    if group is not self.groups[0]:
                        where, key = " in layers with windows", "serve.max_active, for which these have room"
                    raise CacheFull(
                        f"{sum(counts.values())} new tokens need {pages} pages of {self.page_tokens} tokens on rank "
                        f"{rank}{where}: expected at most the {free} of {group.num_pages} that are free. Close "
                        f"sessions, give fewer tokens, or raise {key}."
                    )
        return parts

    def undo(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Undo the latest `append`, whose tokens were never computed."""
        for chunk in reversed(chunks):
            self.truncate(chunk.session, chunk.cached)

    def truncate(self, session: int, tokens: int, multiple: int = 1) -> None:
        """Drop all but a session's first `tokens` cached tokens. It must not share a page that is cut in two.

        It keeps fewer tokens, a multiple of `multiple` and of the page, if layers with windows do not have those that
        the next token sees.
        """
        held, length = self._held(session), self.length(session)
        released = None
        if self.windows is not None and self._first_seen(tokens) < held.left:
            own, unit = held.windowed(), math.lcm(multiple, self.page_tokens) // self.page_tokens
            count = self._usable(
                tokens // self.page_tokens, unit, lambda i: self._windowed(held.pages, i, own) is not None
            )
            tokens, released = count * self.page_tokens, held.groups.pop()
        cut = tokens // self.page_tokens
        while length > tokens:
            rank, _ = held.pages[-1]
            stop = max(tokens, (length - 1) // self.page_tokens * self.page_tokens)
            for group, shards in zip(self.groups, held.groups, strict=False):
                unused = shards[rank].remove_last(length - stop)
                group.pools[rank].release(unused)
            length = stop
            if length % self.page_tokens == 0:
                held.pages.pop()
        if tokens % self.page_tokens and cut < len(held.numbers):  # its last slots will be written again
            rank, _ = held.pages[-1]
            for group, shards in zip(self.groups, held.groups, strict=True):
                group.pools[rank].forget(shards[rank].last_page)
        del held.numbers[cut:]
        held.found = min(held.found, cut)
        if released is not None:
            held.groups.append([])
            self._see(held, own)
            for pool, shard in zip(self.groups[1].pools, released, strict=True):
                pool.release(shard.pages)

    def evict(self, session: int) -> Held:
        """Release a session's pages and return what it held. It stays open, with nothing cached."""
        held = self._held(session)
        for group, shards in zip(self.groups, held.groups, strict=True):
            for pool, shard in zip(group.pools, shards, strict=True):
                pool.release(shard.pages)
        self._sessions[session] = self._empty(held.opened, held.salt)
        return held

    def restore(self, session: int, held: Held) -> None:
        """Undo an `evict`, after every later placement was undone without having been computed."""
        for group, shards in zip(self.groups, held.groups, strict=True):
            for pool, shard in zip(group.pools, shards, strict=True):
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
        return Held(opened, salt, [self._no_shards() for _ in self.groups])

    def _no_shards(self) -> list[Shard]:
        return [Shard(self.page_tokens) for _ in range(self.n)]

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
        spans = tuple(map(tuple, parts))
        chunks: list[ScheduledChunk] = []
        for group, shards in zip(self.groups, held.groups, strict=True):
            before, positions = [s.tokens for s in shards], tuple(tuple(shard.positions) for shard in shards)
            own = []
            for rank, (pool, shard) in enumerate(zip(group.pools, shards, strict=True)):
                shard.extend([range(span.start + cached, span.stop + cached) for span in spans[rank]])
                own.append(pool.allocate(homes.count(rank), shard.last_page))
                shard.add_pages(own[-1])
            if not chunks:
                pages = [iter(each) for each in own]
                held.pages += [(rank, next(pages[rank])) for rank in homes]
            cached_slots = tuple(s.slots(0, b) for s, b in zip(shards, before, strict=True))
            new_slots = tuple(s.slots(b, s.tokens) for s, b in zip(shards, before, strict=True))
            chunks.append(ScheduledChunk(session, cached, count, spans, cached_slots, new_slots, positions))
        return chunks[0] if len(chunks) == 1 else replace(chunks[0], windowed=chunks[1])


@functools.lru_cache(maxsize=64)  # decode asks for the parts of a page, or of none, over and over
def split_pages(n: int, pages: int, few: bool) -> tuple[tuple[range, ...], ...]:
    """Cut new pages into n parts, whose sizes differ by at most one: contiguous for `few` tokens, otherwise zigzag,
    whose parts have equal causal work."""
    size, larger = divmod(pages, n if few else 2 * n)
    cuts = (i * size + min(i, larger) for i in range((n if few else 2 * n) + 1))
    pieces = [range(start, stop) for start, stop in itertools.pairwise(cuts)]
    return tuple((pieces[i],) if few else (pieces[i], pieces[-1 - i]) for i in range(n))
