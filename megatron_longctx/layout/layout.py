"""The layout type: token <-> (rank, slot), both ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain


@dataclass(frozen=True)
class Layout:
    """Who holds which of the tokens `0 .. length-1` of one sequence.

    `spans[rank]` lists token ranges of that rank. They are ascending, and the rank's slots (positions in its local
    tensors) number these tokens in the same order. Ranges may be empty: nothing need divide.
    """

    name: str
    length: int
    spans: tuple[tuple[range, ...], ...]

    @property
    def n(self) -> int:
        """Number of ranks."""
        return len(self.spans)

    def num_tokens(self, rank: int) -> int:
        """Local tokens of `rank`."""
        return self._sizes[rank]

    def placed(self, rank: int) -> Iterator[tuple[int, range]]:
        """(first slot, tokens) of every span of `rank` that holds any."""
        starts = accumulate(map(len, self.spans[rank]), initial=0)
        return ((start, span) for start, span in zip(starts, self.spans[rank], strict=False) if span)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(sum(map(len, spans)) for spans in self.spans)

    def tokens(self, rank: int) -> Iterator[int]:
        """Global positions of the local tokens of `rank`, in slot order."""
        return chain.from_iterable(self.spans[rank])

    def token(self, rank: int, slot: int) -> int:
        """Global position of one local token.

        Raises:
            IndexError: `slot` is not a slot of `rank`.
        """
        for start, span in self.placed(rank):
            if start <= slot < start + len(span):
                return span[slot - start]
        raise IndexError(f"rank {rank} of layout {self.name} has {self.num_tokens(rank)} slots, not slot {slot}")

    def locate(self, token: int) -> tuple[int, int]:
        """(rank, slot) that holds `token`.

        Raises:
            IndexError: `token` is outside the sequence.
        """
        for rank in range(self.n):
            for start, span in self.placed(rank):
                if token in span:
                    return rank, start + span.index(token)
        raise IndexError(f"layout {self.name} has tokens 0..{self.length - 1}, not token {token}")
