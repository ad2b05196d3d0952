"""Copies of the cache's pages in host memory: what rests there need not be computed again when it continues."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.errors import refuse
from .cache_manager import CacheManager
from .pages import Copy, Key
from .session import Session

GIB = 2**30
_STORED_BYTES = 2**26
_FETCHED_BYTES = 2**29
"""The most bytes that a rank copies to the host and back in a round: 2 ms and 15 ms at 32 GB/s."""


class HostCache:
    """Copies of pages that sequences have released, so that they outlive their room in the cache.

    Every rank keeps the books of all ranks, and the bytes of its own pages. Copies are in the order of the device's
    stream, so that they need no other synchronization. When the memory is full, the least recently used copy goes.

    Args:
        manager: of the cache.
        layers: this rank's cache, `[slots, …]` per layer.
        rank: of this process.
        gib: the memory of a rank, pinned if the cache is on a GPU.

    Raises:
        ValueError: it does not hold a page, or the host does not have it.
    """

    def __init__(self, manager: CacheManager, layers: Sequence[Tensor], rank: int, gib: float) -> None:
        self._manager, self._rank = manager, rank
        self._layers = [layer.view(-1, manager.page_tokens, *layer.shape[1:]) for layer in layers]
        like = self._layers[0][0]
        page_bytes = len(layers) * like.numel() * like.element_size()
        pages = int(gib * GIB) // page_bytes
        key, remedy = "serve.host_cache_gib", "Raise it, or set it to 0."
        if not pages:
            raise refuse(key, gib, f"0, or room for a page of {page_bytes / GIB:.3g} GiB", remedy)
        # PyTorch rounds pinned memory up to a power of 2.
        in_block = max(1, min(pages, GIB // page_bytes))
        shape = in_block, len(layers), *like.shape
        try:
            self._blocks = [
                torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda) for _ in range(-(-pages // in_block))
            ]
        except (RuntimeError, MemoryError) as error:  # CPUs have no error type for being out of memory
            raise refuse(key, gib, f"memory that a rank's host has ({error})", "Lower it.") from error
        self._in_block = in_block
        self._free = [list(range(pages)) for _ in range(manager.n)]
        self._copies: OrderedDict[Key, Copy] = OrderedDict()  # the least recently used first
        self._claims: Counter[Key] = Counter()
        self._stored, self._fetched = (max(1, most // page_bytes) for most in (_STORED_BYTES, _FETCHED_BYTES))
        self._rested: list[deque[int]] = [deque() for _ in range(manager.n)]
        manager.copies = self._copies
        for pool, rested in zip(manager.pools, self._rested, strict=True):
            pool.rested = rested

    @property
    def num_pages(self) -> int:
        """The number of copies on all ranks."""
        return len(self._copies)

    @property
    def pending(self) -> bool:
        """Whether there is anything to store."""
        return any(self._rested)

    def store(self) -> None:
        """Copy some of the pages that were released and have no copy."""
        for rank, rested in enumerate(self._rested):
            left = self._stored
            while rested and left:
                page = rested.popleft()
                place = self._manager.pools[rank].cached(page)
                if place is None or place[0] in self._copies:  # held again, gone, or known
                    continue
                to = self._take(rank)
                if to is None:
                    continue
                left -= 1
                self._copies[place[0]] = Copy(place[0], rank, to, place[1])
                if rank == self._rank:
                    for layer, copy in zip(self._layers, self._block(to), strict=True):
                        copy.copy_(layer[page], non_blocking=True)

    def claim(self, session: Session, tokens: Sequence[int], multiple: int) -> list[Copy]:
        """Return the copies of the pages that follow a session's cached ones in a text, for `fetch` or `release`.

        Args:
            tokens: of the text.
            multiple: of pages that the session has then.
        """
        found = self._manager.copies_of(session.number, tokens)
        del found[len(found) // multiple * multiple :]
        for copy in reversed(found):  # the last go first
            self._copies.move_to_end(copy.key)
            self._claims[copy.key] += 1
        return found

    def release(self, copies: Sequence[Copy]) -> None:
        """Give claimed copies back."""
        for copy in copies:
            self._claims[copy.key] -= 1
            if not self._claims[copy.key]:
                del self._claims[copy.key]

    def fetch(self, session: Session, copies: list[Copy], fetchers: int, tokens: Sequence[int]) -> None:
        """Add the next of its claimed pages to a session: a part of what a round may take, for one of some `fetchers`.

        Args:
            copies: what is left of the claimed ones; those that were fetched are removed.
            tokens: of the text.
        """
        some = copies[: max(1, self._fetched * self._manager.n // fetchers)]
        del copies[: len(some)]
        for copy in some:
            page, found = self._manager.add_page(session.number, copy)
            if copy.rank == self._rank and not found:
                for layer, source in zip(self._layers, self._block(copy.page), strict=True):
                    layer[page].copy_(source, non_blocking=True)
        self.release(some)
        session.resume(tokens)

    def clear(self) -> None:
        """Drop all copies that nobody claims."""
        for copy in [copy for copy in self._copies.values() if copy.key not in self._claims]:
            self._drop(copy)

    def _take(self, rank: int) -> int | None:
        """Return a page of the host's memory; None if all are claimed."""
        if not self._free[rank]:
            unclaimed = (copy for copy in self._copies.values() if copy.rank == rank and copy.key not in self._claims)
            if oldest := next(unclaimed, None):
                self._drop(oldest)
        return self._free[rank].pop() if self._free[rank] else None

    def _drop(self, copy: Copy) -> None:
        del self._copies[copy.key]
        self._free[copy.rank].append(copy.page)

    def _block(self, page: int) -> Tensor:
        return self._blocks[page // self._in_block][page % self._in_block]
