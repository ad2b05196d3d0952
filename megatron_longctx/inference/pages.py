"""The pages of one rank: which are free, how many sessions hold each of the others, and what a session has on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


class BlockPool:
    """Pages of one rank and how many sessions hold each; a page that nobody holds is free.

    Neighbouring pages are preferred, so that a session's tokens lie in few runs.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = bytearray(b"\1" * num_pages)
        self._holders = [0] * num_pages
        self.num_free = num_pages

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


@dataclass
class Shard:
    """One session's tokens on one rank: its pages, and positions in the order of their slots."""

    pages: list[int] = field(default_factory=list)
    tokens: int = 0
    positions: list[range] = field(default_factory=list)
    _runs: list[range] | None = None  # the slots of all pages; None where these have changed

    def runs(self, start: int, stop: int, page_tokens: int) -> tuple[range, ...]:
        """Slots of the rank's cache that hold the session's local tokens `start..stop-1`, neighbours joined."""
        if self._runs is None:
            self._runs = _slot_runs(self.pages, page_tokens, [])
        found, at = [], 0
        for run in self._runs:
            if at < stop and start < at + len(run):
                found.append(run[max(start - at, 0) : stop - at])
            at += len(run)
        return tuple(found)

    def page_slots(self, index: int, tokens: int, page_tokens: int) -> range:
        """The first `tokens` slots of page number `index`; of none, where there may be no such page."""
        start = self.pages[index] * page_tokens if tokens else 0
        return range(start, start + tokens)

    def add_pages(self, pages: Sequence[int], page_tokens: int) -> None:
        self.pages += pages
        if self._runs is not None:
            _slot_runs(pages, page_tokens, self._runs)

    def drop_pages(self, keep: int) -> list[int]:
        """Take all but the first `keep` pages away."""
        dropped, self.pages = self.pages[keep:], self.pages[:keep]
        self._runs = None
        return dropped

    def extend(self, positions: Sequence[range]) -> None:
        for span in positions:
            self.tokens += len(span)
            last = self.positions[-1] if self.positions else range(0)
            joined = _joined(last, span) if last and span else None
            if joined is not None:
                self.positions[-1] = joined
            elif span:
                self.positions.append(span)

    def prefix(self, length: int) -> list[range]:
        """The positions below `length`."""
        return [cut for span in self.positions if (cut := range(span.start, min(span.stop, length), span.step))]

    def shrink(self, tokens: int) -> None:
        """Forget the last `tokens` tokens; pages stay."""
        self.tokens -= tokens
        while tokens:
            last = self.positions.pop()
            if len(last) > tokens:
                self.positions.append(last[: len(last) - tokens])
            tokens -= min(tokens, len(last))


def _slot_runs(pages: Sequence[int], page_tokens: int, runs: list[range]) -> list[range]:
    """Add the slots of some pages to `runs`, neighbours joined."""
    for page in pages:
        start = page * page_tokens
        if runs and runs[-1].stop == start:
            runs[-1] = range(runs[-1].start, start + page_tokens)
        else:
            runs.append(range(start, start + page_tokens))
    return runs


def _joined(last: range, span: range) -> range | None:
    """Both as one evenly spaced range, if they are one: tokens of a decode come singly, every n-th."""
    gap = span[0] - last[-1]
    steps = {r.step for r in (last, span) if len(r) > 1} | {gap}
    return range(last[0], span[-1] + 1, gap) if len(steps) == 1 and gap > 0 else None
