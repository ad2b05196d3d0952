"""The pages of layers with windows, which sessions give up when no later token sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from .pages import Group, Held

UNBOUNDED = 2**31


class Windows(NamedTuple):
    """The cache of layers with windows.

    Attributes:
        tokens: before itself that a query sees, in the layers of these that see most.
        pages: of each rank, at most as many as other layers have.
        pass_tokens: the most new tokens of a rank in a pass.
        sequences: for which there is certainly room; any number with as many pages as other layers have.
    """

    tokens: int
    pages: int
    pass_tokens: int
    sequences: int = UNBOUNDED

    @classmethod
    def for_sequences(cls, tokens: int, sequences: int, pass_tokens: int, page_tokens: int, most: int) -> Windows:
        """Return those with room for some sequences and a pass. most: the pages that other layers have."""
        pages = sequences * most_pages(tokens, page_tokens) + -(-pass_tokens // page_tokens)
        return cls(tokens, pages, pass_tokens, sequences) if pages < most else cls(tokens, most, pass_tokens)


def most_pages(window: int, page_tokens: int) -> int:
    """Return the most pages of a rank that a session has in layers with windows, apart from the tokens of a pass."""
    return window // page_tokens + 5


class WindowPages:
    """What sessions have in layers with windows: the pages that their next tokens see.

    They are on the same ranks as those of other layers, and have the same keys.

    Args:
        windows: None if all layers keep all tokens; nothing is then ever given up.
        whole: the pages of layers without windows.
    """

    def __init__(self, windows: Windows | None, page_tokens: int, whole: Group) -> None:
        self.windows, self._page_tokens, self._whole = windows, page_tokens, whole
        self.groups = [] if windows is None else [Group(len(whole.pools), windows.pages)]

    def first_seen(self, tokens: int, ahead: int = 0) -> int:
        """Return the number of the first page that a token sees which comes up to `ahead` before the next one, after
        `tokens` of them."""
        return 0 if self.windows is None else max(0, tokens - ahead - self.windows.tokens) // self._page_tokens

    def usable(self, count: int, unit: int, has: Callable[[int], bool]) -> int:
        """Return the most of `count` complete pages, a multiple of `unit`, from which a session can go on.

        Args:
            has: whether layers with windows have a page, by its number.
        """
        count = at = count // unit * unit
        while self.groups and at > self.first_seen(count * self._page_tokens):
            at -= 1
            if not has(at):
                count = at = at // unit * unit
        return count

    def find(self, pages: Sequence[tuple[int, int]], index: int, own: Mapping[int, int]) -> int | None:
        """Return page number `index` of a session in layers with windows, if it is there.

        Args:
            pages: of the session in other layers.
            own: those that the session has, keyed by their number.
        """
        rank, page = pages[index]
        key = self._whole.pools[rank].key(page)
        place = None if key is None else self.groups[0].index.get(key)
        return own.get(index, place.page if place is not None and place.rank == rank else None)

    def see(self, held: Held, own: Mapping[int, int]) -> None:
        """Let a session that has only complete pages hold those that its next token sees. own: see `find`."""
        held.left = self.first_seen(len(held.pages) * self._page_tokens)
        for group, shards in zip(self.groups, held.groups[1:], strict=True):
            for index in range(held.left, len(held.pages)):
                rank, page = held.pages[index][0], self.find(held.pages, index, own)
                assert page is not None
                group.pools[rank].hold([page])
                shards[rank].add_full(page, index)

    def leave(self, held: Held, left: int) -> None:
        """Release the pages before number `left`. They make room first unless the session found them, or can be found
        up to there: it is less likely that another prompt goes on from inside a text."""
        end = self.first_seen(len(held.numbers) * self._page_tokens)
        for index in range(held.left, left):
            rank = held.pages[index][0]
            page = held.groups[1][rank].remove_first()
            self.groups[0].pools[rank].release([page], first=held.found <= index < end)
        held.left = max(held.left, left)
