"""Bookkeeping for the KV cache pages of one rank: a reference-counted pool, and one session's tokens on it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field


class BlockPool:
    """The reference-counted pages of one rank; a page without holders is free.

    Allocation prefers neighbouring pages, so that a session occupies few runs of slots.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = bytearray(b"\1" * num_pages)
        self._holders = [0] * num_pages
        self.num_free = num_pages

    def allocate(self, count: int, after: int) -> list[int]:
        """Take `count` free pages, starting behind page `after` (-1: anywhere) if the pages there are free.

        The caller has checked that there are enough.
        """
        assert count <= self.num_free, "pages must be counted before they are allocated"
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

    def share(self, pages: Sequence[int]) -> None:
        """Add a holder to pages that are in use."""
        assert all(self._holders[page] for page in pages), "a free page cannot be shared"
        self.hold(pages)

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to pages, whether they are free or not."""
        for page in pages:
            self.num_free -= self._free[page]
            self._free[page] = 0
            self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a holder from pages; those without any left become free."""
        for page in pages:
            assert self._holders[page], "a page was released twice"
            self._holders[page] -= 1
            self._free[page] = not self._holders[page]
            self.num_free += self._free[page]

    def _best_run(self, count: int) -> range:
        """Return the first `count` pages of the smallest free run that has them, or the longest run if none does."""
        runs = [range(*match.span()) for match in re.finditer(b"\1+", self._free)]
        return (min((run for run in runs if len(run) >= count), key=len, default=None) or max(runs, key=len))[:count]


@dataclass
class Shard:
    """The tokens of one session on one rank.

    Attributes:
        page_tokens: slots per page.
        pages: page numbers, in the order of the tokens stored there.
        tokens: the number of tokens.
        positions: ascending positions of the tokens, in the order of their slots.
    """

    page_tokens: int
    pages: list[int] = field(default_factory=list)
    tokens: int = 0
    positions: list[range] = field(default_factory=list)
    _slots: list[range] = field(default_factory=list)  # of all pages; neighbouring pages form one range

    def slots(self, start: int, stop: int) -> tuple[range, ...]:
        """Return the slots of local tokens `start..stop-1`, neighbouring ones as one range."""
        parts, at = [], 0
        for run in self._slots:
            if start < at + len(run) and at < stop and start < stop:
                parts.append(run[max(start - at, 0) : stop - at])
            at += len(run)
        return tuple(parts)

    def page_slots(self, index: int, tokens: int) -> range:
        """Return the first `tokens` slots of page number `index`, which need not exist if `tokens` is 0."""
        start = self.pages[index] * self.page_tokens if tokens else 0
        return range(start, start + tokens)

    def add_pages(self, pages: Sequence[int]) -> None:
        self.pages += pages
        for page in pages:
            start, stop = page * self.page_tokens, (page + 1) * self.page_tokens
            if self._slots and self._slots[-1].stop == start:
                start = self._slots.pop().start
            self._slots.append(range(start, stop))

    def extend(self, positions: Sequence[range]) -> None:
        """Add tokens at the end."""
        for span in positions:
            self.tokens += len(span)
            joined = _joined(self.positions[-1], span) if self.positions and span else None
            if joined is not None:
                self.positions[-1] = joined
            elif span:
                self.positions.append(span)

    def prefix(self, length: int) -> list[range]:
        """Return the positions below `length`."""
        return [cut for span in self.positions if (cut := range(span.start, min(span.stop, length), span.step))]

    def remove_last(self, tokens: int) -> list[int]:
        """Remove the last tokens, and return the pages that are no longer needed."""
        self.tokens -= tokens
        _drop_last(self.positions, tokens)
        needed = -(-self.tokens // self.page_tokens)
        unused, self.pages = self.pages[needed:], self.pages[:needed]
        _drop_last(self._slots, len(unused) * self.page_tokens)
        return unused


def _drop_last(ranges: list[range], count: int) -> None:
    """Remove the last `count` numbers from a list of ranges."""
    while count:
        last = ranges.pop()
        if len(last) > count:
            ranges.append(last[: len(last) - count])
        count -= min(count, len(last))


def _joined(last: range, span: range) -> range | None:
    """Return both as one evenly spaced range if they form one: a rank gets every n-th token of a decode."""
    gap = span[0] - last[-1]
    steps = {r.step for r in (last, span) if len(r) > 1} | {gap}
    return range(last[0], span[-1] + 1, gap) if len(steps) == 1 and gap > 0 else None
