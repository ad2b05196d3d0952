"""Which pages of a rank's cache are free, and how many sessions hold each of the others."""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """Pages of one rank and how many sessions hold each; a page that nobody holds is free.

    Neighbouring pages are preferred, so that a session's tokens lie in few runs.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = bytearray(b"\1" * num_pages)
        self._holders = [0] * num_pages
        self.num_free = num_pages

    def holders(self, page: int) -> int:
        return self._holders[page]

    def take(self, count: int, after: int) -> list[int]:
        """`count` pages, behind page `after` where those are free; the caller has seen that there are enough."""
        assert count <= self.num_free, "pages must be counted before any are taken"
        taken: list[int] = []
        following = after + 1
        while len(taken) < count and 0 < following < len(self._free) and self._free[following]:
            taken.append(following)
            following += 1
        self._mark(taken, 0)
        while len(taken) < count:
            run = self._best_run(count - len(taken))
            self._mark(run, 0)
            taken += run
        self.num_free -= count
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more session holds these."""
        for page in pages:
            assert self._holders[page], "a free page cannot be shared"
            self._holders[page] += 1

    def take_back(self, pages: Sequence[int]) -> None:
        """The session that gave these back holds them again; nobody has taken any of them in between and kept it."""
        free = [page for page in pages if not self._holders[page]]
        self._mark(free, 0)
        self.num_free -= len(free)
        for page in pages:
            self._holders[page] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        """One session less holds these."""
        for page in pages:
            assert self._holders[page], "a page was given back twice"
            self._holders[page] -= 1
        unused = [page for page in pages if not self._holders[page]]
        self._mark(unused, 1)
        self.num_free += len(unused)

    def _mark(self, pages: Sequence[int], value: int) -> None:
        for page in pages:
            self._free[page] = value

    def _best_run(self, count: int) -> range:
        """The smallest run of free pages that holds `count`, cut to it; else the longest run there is."""
        best: range | None = None
        start = self._free.find(1)
        while start >= 0:
            stop = self._free.find(0, start)
            run = range(start, len(self._free) if stop < 0 else stop)
            if best is None or _fits_better(len(run), len(best), count):
                best = run
            start = self._free.find(1, run.stop)
        assert best is not None, "pages must be counted before any are taken"
        return best[:count]


def _fits_better(size: int, best: int, count: int) -> bool:
    return size < best if size >= count and best >= count else size > best
