"""The layout type: token <-> (rank, slot), both ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain


@dataclass(frozen=True)
class Layout:
    """Who holds which of the tokens `0 .. length-1` of one sequence.

    `spans[rank]` lists the token ranges of that rank in ascending order; its slots (positions in the rank's local
    tensors) number those tokens in the same order. Ranges may be empty: nothing need divide.
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
        rest = slot
        for span in self.spans[rank]:
            if 0 <= rest < len(span):
                return span[rest]
            rest -= len(span)
        raise IndexError(f"rank {rank} of layout {self.name} has {self.num_tokens(rank)} slots, not slot {slot}")

    def locate(self, token: int) -> tuple[int, int]:
        """(rank, slot) that holds `token`.

        Raises:
            IndexError: `token` is outside the sequence.
        """
        for rank, spans in enumerate(self.spans):
            start = 0
            for span in spans:
                if token in span:
                    return rank, start + span.index(token)
                start += len(span)
        raise IndexError(f"layout {self.name} has tokens 0..{self.length - 1}, not token {token}")
