"""Bookkeeping for the sharded KV cache: which page of which rank stores which token of which session.

Every rank keeps the state of all ranks, in integers alone. Sizes and places are therefore known everywhere, and ranks
exchange nothing.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..core.errors import refuse
from .batch import MAX_CONTIGUOUS, ScheduledChunk, assign
from .pages import Copy, Group, Held, Key, Place, Shard
from .window_pages import UNBOUNDED, WindowPages, Windows, most_pages


class CacheFull(ValueError):
    """Raised for tokens that do not fit into the cache; nothing has changed then."""


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

    Layers with windows have pages of their own (`window_pages`). A prefix can be used where those that its next token
    sees are still there.

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
        whole = Group(n, pages_per_rank)
        self._windowed = WindowPages(windows, page_tokens, whole)
        self.windows, self.groups = windows, [whole, *self._windowed.groups]
        self._index, self._pools = whole.index, whole.pools
        self._sessions: dict[int, Held] = {}
        self._opened = self._named = 0

    @property
    def sessions(self) -> tuple[int, ...]:
        return tuple(self._sessions)

    @property
    def slots(self) -> tuple[int, int]:
        """The slots per rank of layers without and with windows."""
        return self.pages_per_rank * self.page_tokens, self.groups[-1].num_pages * self.page_tokens

    @property
    def pass_tokens(self) -> int:
        """The most new tokens of a rank in a pass."""
        return UNBOUNDED if self.windows is None else self.windows.pass_tokens

    def used_pages(self) -> int:
        """Return the number of pages that sessions hold on all ranks, shared ones counted once."""
        return self.groups[0].used

    def drop_cached(self) -> None:
        """Free the pages that no session holds."""
        for pool in (pool for group in self.groups for pool in group.pools):
            pool.drop_cached()

    def shards(self, session: int) -> list[Shard]:
        """Return the session's pages and positions on every rank. They change with the session.

        Raises:
            ValueError: the session is not open.
        """
        return self._held(session).shards

    def length(self, session: int) -> int:
        return self._held(session).tokens

    def page_numbers(self, session: int) -> list[int]:
        """Return the numbers of the session's first pages, as far as they are in the index."""
        return self._held(session).numbers

    def held_pages(self, sessions: Iterable[int], rank: int) -> int:
        """Return the number of pages that any of these sessions holds, each counted once."""
        return len(set().union(*(self.shards(session)[rank].pages for session in sessions)))

    def fits(self, most: Mapping[int, int]) -> bool:
        """Whether sessions can grow to `most[session]` pages on every rank; shared pages are counted once."""
        return (self.windows is None or len(most) <= self.windows.sequences) and all(
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
        pages = -(-(self.length(session) + more) // self.page_tokens)
        return -(-(pages + spread * (self.n - 1)) // self.n)

    def open(self, tokens: Sequence[int] = (), salt: int = 0, multiple: int = 1) -> int:
        """Open a session with the longest prefix of `tokens` in the cache, and return its number.

        Args:
            salt: sessions with another one do not find its pages.
            multiple: of tokens that the prefix must have.
        """
        found: list[Place] = []
        while place := self._index.get(self._key(salt, found[-1].number if found else 0, tokens, len(found))):
            found.append(place)
        pages, numbers = [place[:2] for place in found], [place.number for place in found]
        return self._open(self._hold(self._opened, salt, pages, numbers, {}, multiple))

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
        others = [group.copies.get(copy.key) for group in self.groups[1:] for copy in found]
        count = self._windowed.usable(cached + len(found), multiple, lambda i: i < cached or bool(others[i - cached]))
        seen = self._windowed.first_seen(count * self.page_tokens) - cached
        del found[count - cached :]
        return [
            copy._replace(windowed=other.page) if other and i >= seen else copy
            for i, (copy, other) in enumerate(zip(found, others or [None] * len(found), strict=False))
        ]

    def add_page(self, session: int, copy: Copy) -> list[tuple[int, bool]]:
        """Add a copy's page to a session, which has only complete ones.

        Returns:
            the page of every group of layers that have a copy, and whether it has its contents.
        """
        held, added = self._held(session), []
        if self.windows is not None and copy.windowed is None:
            self._windowed.leave(held, len(held.pages))
            held.left += 1
        for group, shards in zip(self.groups[: 1 + (copy.windowed is not None)], held.groups, strict=False):
            page, found = group.page_of(copy, shards[copy.rank].last_page, self._index.get(copy.key, copy).rank)
            shards[copy.rank].add_full(page, len(held.pages))
            added.append((page, found))
        held.pages.append((copy.rank, added[0][0]))
        held.numbers.append(copy.number)
        held.tokens += self.page_tokens
        return added

    def fork(self, session: int, tokens: int, multiple: int = 1) -> int:
        """Open a session with the complete pages of another's first tokens, and return its number.

        Args:
            multiple: of tokens that it must have.
        """
        return self._open(self._first(self._opened, self._held(session), tokens, multiple))

    def _open(self, held: Held) -> int:
        self._sessions[held.opened] = held
        self._opened += 1
        return held.opened

    def _first(self, opened: int, held: Held, tokens: int, multiple: int) -> Held:
        """Hold the complete pages of a session's first tokens again, as those of session `opened`: see `_hold`."""
        cut = tokens // self.page_tokens
        return self._hold(opened, held.salt, held.pages[:cut], held.numbers[:cut], held.windowed(), multiple)

    def _hold(
        self,
        opened: int,
        salt: int,
        pages: Sequence[tuple[int, int]],
        numbers: Sequence[int],
        own: Mapping[int, int],
        multiple: int,
    ) -> Held:
        """Hold the most of some complete pages that a session can go on from, so that its tokens are a multiple of
        `multiple`. own: see `WindowPages.find`."""
        held = self._empty(opened, salt)
        unit = math.lcm(multiple, self.page_tokens) // self.page_tokens
        held.found = self._windowed.usable(
            len(pages), unit, lambda index: self._windowed.find(pages, index, own) is not None
        )
        for rank, page in pages[: held.found]:
            self._pools[rank].hold([page])
            held.add_full(rank, page)
        held.numbers += numbers[: held.found]
        self._windowed.see(held, own)
        return held

    def name_pages(self, session: int, tokens: Sequence[int], most: int | None = None) -> None:
        """Enter the session's complete pages into the index, so that other sessions find them.

        Args:
            tokens: of the session; those that are cached have been computed.
            most: enter pages of this many first tokens only; None for all.
        """
        held, length = self._held(session), self.length(session)
        complete = (length if most is None else min(most, length)) // self.page_tokens
        own = held.windowed() if len(held.numbers) < complete else {}
        while (count := len(held.numbers)) < complete:
            key = self._key(held.salt, held.numbers[-1] if count else 0, tokens, count)
            (rank, page), place, copy = held.pages[count], self._index.get(key), self.groups[0].copies.get(key)
            number = place or copy  # which keep it, so that the pages that follow are found
            if number is None:
                self._named += 1
            held.numbers.append(self._named if number is None else number.number)
            # A page takes the place of one that nobody holds, or from which layers with windows cannot go on.
            lost = count in own and place is not None and self._windowed.find([place[:2]], 0, {}) is None
            if place is None or lost or self._pools[place.rank].cached(place.page):
                self.groups[0].name(rank, page, key, held.numbers[-1])
                if count in own:
                    self.groups[1].name(rank, own[count], key, held.numbers[-1])

    def forget(self, session: int) -> None:
        """Remove the session's pages from the index."""
        for group, shards in zip(self.groups, self._held(session).groups, strict=True):
            group.forget(shards)

    def append(self, counts: Mapping[int, int], later: bool = False) -> tuple[ScheduledChunk, ...]:
        """Place `counts[session]` new tokens of every session: all of them or none.

        Args:
            later: only find out whether they fit, in passes of any sizes.

        Raises:
            ValueError: a session is not open, or gets fewer than 1 token.
            CacheFull: they do not fit.
        """
        parts = self._fit(counts, later)
        return () if later else tuple(self._place(each, count, *parts[each]) for each, count in counts.items())

    def _fit(self, counts: Mapping[int, int], later: bool) -> dict[int, tuple[list[list[range]], list[int]]]:
        """Return `assign` of every session, if there is room for all of them."""
        # Also those of a pass that was placed before this one: it is computed before it.
        for held in self._sessions.values() if self.windows is not None else ():
            self._windowed.leave(held, self._windowed.first_seen(held.tokens, self.page_tokens))
        parts, need = {}, [[0] * self.n for _ in self.groups]
        for session, count in counts.items():
            held = self._held(session)
            if count < 1:
                raise refuse("new tokens", count, "1 or more", "Give the session some tokens.")
            first = held.pages[0][0] if held.pages and self._repeatable else held.opened % self.n
            parts[session] = assign(held, count, self._max_contiguous, first)
            for rank in set(parts[session][1]):
                pages, shards = parts[session][1].count(rank), [of_group[rank] for of_group in held.groups]
                need[0][rank] += pages
                if self.windows is not None:
                    most = most_pages(self.windows.tokens, self.page_tokens)
                    need[1][rank] += min(pages, max(0, most - len(shards[1].pages))) if later else pages
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
        held, length, cut = self._held(session), self.length(session), tokens // self.page_tokens
        if self._windowed.first_seen(tokens) < held.left:
            self._sessions[session] = self._first(held.opened, held, tokens, multiple)
            self._release(held)
            return
        while length > tokens:
            rank, _ = held.pages[-1]
            stop = max(tokens, (length - 1) // self.page_tokens * self.page_tokens)
            for group, shards in zip(self.groups, held.groups, strict=True):
                unused = shards[rank].remove_last(length - stop)
                group.pools[rank].release(unused)
            held.tokens = length = stop
            if unused:
                held.pages.pop()
        if tokens % self.page_tokens and cut < len(held.numbers):  # its last slots will be written again
            rank, _ = held.pages[-1]
            for group, shards in zip(self.groups, held.groups, strict=True):
                group.pools[rank].forget(shards[rank].last_page)
        del held.numbers[cut:]
        held.found = min(held.found, cut)

    def _release(self, held: Held) -> None:
        for group, shards in zip(self.groups, held.groups, strict=True):
            group.release(shards)

    def close(self, session: int) -> None:
        """Release a session's pages and remove it. Complete ones can be found until their room is needed."""
        self._release(self._held(session))
        del self._sessions[session]

    def _held(self, session: int) -> Held:
        if session not in self._sessions:
            raise refuse("session", session, "an open session", "Open another; closed ones cannot go on.")
        return self._sessions[session]

    def _empty(self, opened: int, salt: int) -> Held:
        return Held(opened, salt, [[Shard(self.page_tokens) for _ in range(self.n)] for _ in self.groups])

    def _key(self, salt: int, before: int, tokens: Sequence[int], index: int) -> Key:
        """Return the key of page number `index`; one that no page has if the tokens do not fill it."""
        start = index * self.page_tokens
        return Key(salt, before, array("i", tokens[start : start + self.page_tokens]).tobytes())

    def _place(self, session: int, count: int, parts: list[list[range]], homes: list[int]) -> ScheduledChunk:
        held = self._held(session)
        cached, spans = held.tokens, tuple(map(tuple, parts))
        new = [[range(span.start + cached, span.stop + cached) for span in each] for each in spans]
        held.tokens += count
        chunks: list[ScheduledChunk] = []
        for group, shards in zip(self.groups, held.groups, strict=True):
            slots = tuple([tuple(shard.slots) for shard in shards])
            positions = tuple([tuple(shard.positions) for shard in shards])
            own: list[list[int]] = [[]] * self.n
            if homes:
                own = [group.pools[r].allocate(homes.count(r), shard.last_page) for r, shard in enumerate(shards)]
            if homes and not chunks:
                pages = [iter(each) for each in own]
                held.pages += [(rank, next(pages[rank])) for rank in homes]
            each_new = zip(shards, new, own, strict=True)
            new_slots = tuple([tuple(shard.extend(its, begun)) if its else () for shard, its, begun in each_new])
            chunks.append(ScheduledChunk(session, cached, count, spans, slots, new_slots, positions))
        return chunks[0] if len(chunks) == 1 else replace(chunks[0], windowed=chunks[1])
