"""Copies of the cache's pages in host memory: what rests there need not be computed again when it continues."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.errors import refuse
from .cache_manager import CacheManager
from .pages import Copy, Group, Key
from .session import Session

GIB = 2**30
_STORED_BYTES = 2**26
_FETCHED_BYTES = 2**29
"""The most bytes that a rank copies to the host and back in a round: 2 ms and 15 ms at 32 GB/s."""


class HostCache:
    """Copies of pages that sequences have released, so that they outlive their room in the cache.

    Every rank keeps the books of all ranks, and the bytes of its own pages. Copies are in the order of the device's
    stream, so that they need no other synchronization. When the memory is full, the least recently used copy goes.
    Layers with windows have copies of their own; the memory is divided as the cache is.

    Args:
        manager: of the cache.
        layers: this rank's cache, `[slots, …]`, of the layers of each of the manager's groups.
        rank: of this process.
        gib: the memory of a rank, pinned if the cache is on a GPU.

    Raises:
        ValueError: it does not hold a page, or the host does not have it.
    """

    def __init__(self, manager: CacheManager, layers: Sequence[Sequence[Tensor]], rank: int, gib: float) -> None:
        self._manager = manager
        views = [[x.view(-1, manager.page_tokens, *x.shape[1:]) for x in of_group] for of_group in layers]
        sizes = [sum(layer[0].nbytes for layer in of_group) for of_group in views]
        whole = sum(size * group.num_pages for size, group in zip(sizes, manager.groups, strict=True))
        parts = [int(gib * GIB) * group.num_pages // whole for group in manager.groups]  # pages
        if not all(parts):
            page_gib = whole / min(group.num_pages for group in manager.groups) / GIB
            expected = f"0, or room for a page of {page_gib:.3g} GiB"
            raise refuse("serve.host_cache_gib", gib, expected, "Raise it, or set it to 0.")
        try:
            self.stores = [Store(*each, rank) for each in zip(manager.groups, views, parts, strict=True)]
        except (RuntimeError, MemoryError) as error:  # CPUs have no error type for being out of memory
            expected = f"memory that a rank's host has ({error})"
            raise refuse("serve.host_cache_gib", gib, expected, "Lower it.") from error
        self.fetched = max(1, _FETCHED_BYTES // max(1, sizes[0]))

    @property
    def num_pages(self) -> int:
        """The number of copies on all ranks, without those of layers with windows."""
        return len(self.stores[0].copies)

    @property
    def pending(self) -> bool:
        """Whether there is anything to store."""
        return any(rested for store in self.stores for rested in store.rested)

    def store(self) -> None:
        """Copy some of the pages that were released and have no copy."""
        for store in self.stores:
            store.store()

    def claim(self, session: Session, tokens: Sequence[int], multiple: int) -> list[Copy]:
        """Return the copies of the pages that follow a session's cached ones in a text, for `fetch` or `release`.

        Args:
            tokens: of the text.
            multiple: of pages that the session has then.
        """
        found = self._manager.copies_of(session.number, tokens, multiple)
        for copy in reversed(found):  # the last go first
            for store in self._stores_of(copy):
                store.copies.move_to_end(copy.key)
                store.claims[copy.key] += 1
        return found

    def release(self, copies: Sequence[Copy]) -> None:
        """Give claimed copies back."""
        for copy in copies:
            for store in self._stores_of(copy):
                store.claims[copy.key] -= 1
                if not store.claims[copy.key]:
                    del store.claims[copy.key]

    def fetch(self, session: Session, copies: list[Copy], fetchers: int, tokens: Sequence[int]) -> None:
        """Add the next of its claimed pages to a session: a part of what a round may take, for one of some `fetchers`.

        Args:
            copies: what is left of the claimed ones; those that were fetched are removed.
            tokens: of the text.
        """
        some = copies[: max(1, self.fetched * self._manager.n // fetchers)]
        del copies[: len(some)]
        for copy in some:
            added = self._manager.add_page(session.number, copy)
            for store, source, (page, found) in zip(self.stores, (copy.page, copy.windowed), added, strict=False):
                if source is not None and not found:
                    store.fetch(copy.rank, source, page)
        self.release(some)
        session.resume(tokens)

    def clear(self) -> None:
        """Drop all copies that nobody claims."""
        for store in self.stores:
            store.clear()

    def _stores_of(self, copy: Copy) -> list[Store]:
        return self.stores[: 1 if copy.windowed is None else 2]


class Store:
    """The copies of the pages of one group of layers.

    Attributes:
        copies: the least recently used first.
        claims: of copies that may not go.
        rested: per rank, the pages that were released.

    Args:
        layers: this rank's cache, `[pages, …]`.
        pages: of each rank's memory.
    """

    def __init__(self, group: Group, layers: Sequence[Tensor], pages: int, rank: int) -> None:
        self._pools, self._layers, self._rank = group.pools, layers, rank
        self.copies: OrderedDict[Key, Copy] = OrderedDict()
        self.claims: Counter[Key] = Counter()
        self.rested: list[deque[int]] = [deque() for _ in group.pools]
        self._free = [list(range(pages)) for _ in group.pools]
        page_bytes = sum(layer[0].nbytes for layer in layers) or 1
        self.stored = max(1, _STORED_BYTES // page_bytes)
        # PyTorch rounds pinned memory up to a power of 2.
        self._in_block = max(1, min(pages, GIB // page_bytes))
        self.blocks = [
            torch.empty(self._in_block, len(layers), *like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            for like in [layer[0] for layer in layers[:1]]
            for _ in range(-(-pages // self._in_block))
        ]
        group.copies = self.copies
        for pool, rested in zip(group.pools, self.rested, strict=True):
            pool.rested = rested

    def store(self) -> None:
        """Copy some of the pages that were released and have no copy."""
        for rank, (pool, rested) in enumerate(zip(self._pools, self.rested, strict=True)):
            left = self.stored
            while rested and left:
                page = rested.popleft()
                place = pool.cached(page)
                if place is None or place[0] in self.copies:  # held again, gone, or known
                    continue
                to = self._take(rank)
                if to is None:
                    continue
                left -= 1
                self.copies[place[0]] = Copy(place[0], rank, to, place[1])
                if rank == self._rank and self._layers:
                    for layer, copy in zip(self._layers, self._block(to), strict=True):
                        copy.copy_(layer[page], non_blocking=True)

    def fetch(self, rank: int, copy: int, page: int) -> None:
        """Copy a page of a rank's memory back to a page of the cache."""
        if rank == self._rank and self._layers:
            for layer, source in zip(self._layers, self._block(copy), strict=True):
                layer[page].copy_(source, non_blocking=True)

    def clear(self) -> None:
        """Drop all copies that nobody claims."""
        for copy in [copy for copy in self.copies.values() if copy.key not in self.claims]:
            self._drop(copy)

    def _take(self, rank: int) -> int | None:
        """Return a page of the host's memory; None if all are claimed."""
        if not self._free[rank]:
            unclaimed = (copy for copy in self.copies.values() if copy.rank == rank and copy.key not in self.claims)
            if oldest := next(unclaimed, None):
                self._drop(oldest)
        return self._free[rank].pop() if self._free[rank] else None

    def _drop(self, copy: Copy) -> None:
        del self.copies[copy.key]
        self._free[copy.rank].append(copy.page)

    def _block(self, page: int) -> Tensor:
        return self.blocks[page // self._in_block][page % self._in_block]
