"""Where all that a pass sends lies in the memory that its peers read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..schedules.publishing import Batch, place

_ALIGNMENT = 256


class Sent(NamedTuple):
    """A message: `num_bytes` from `offset` of the sender's memory on, for rank `peer` of the group. `passed`: it is
    copied there when it is sent, since it has come from another rank; anything else was published before."""

    peer: int
    offset: int
    num_bytes: int
    passed: bool = False


@dataclass(frozen=True)
class Outbox:
    """Where all that a pass sends lies in the sender's memory: offsets of named regions, messages by step. `adjacent`:
    by region, the one that follows it without a gap. `awaits`: by step, earlier ones that must have been read before
    it starts, since their memory is used again."""

    regions: dict[Hashable, int]
    num_bytes: int
    sends: tuple[tuple[Sent, ...], ...]
    adjacent: dict[Hashable, Hashable] = field(default_factory=dict)
    awaits: dict[int, tuple[int, ...]] = field(default_factory=dict)


@dataclass
class OutboxBuilder:
    """Lays regions out one after the other."""

    regions: dict[Hashable, int] = field(default_factory=dict)
    num_bytes: int = 0
    _adjacent: dict[Hashable, Hashable] = field(default_factory=dict)
    _full: Hashable = None
    _awaits: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def region(self, name: Hashable, num_bytes: int) -> int:
        """The offset of a region that stays; it is new or known by its name."""
        if name not in self.regions:
            self.regions[name] = self.num_bytes
            if self._full is not None:
                self._adjacent[self._full] = name
            self.num_bytes += aligned(num_bytes)
            self._full = name if num_bytes % _ALIGNMENT == 0 else None
        return self.regions[name]

    def passing(self, batches: Sequence[tuple[Batch, Sequence[tuple[Hashable, int]]]]) -> None:
        """Lay out, behind all regions so far, those that are read in one step only: the names and bytes of each batch
        side by side, the batches where others are no longer read."""
        placement = place([batch for batch, _ in batches])
        base = self.num_bytes
        for offset, (_, regions) in zip(placement.offsets, batches, strict=True):
            self.num_bytes, self._full = base + offset, None
            for name, num_bytes in regions:
                self.region(name, num_bytes)
        self.num_bytes, self._full = base + placement.num_bytes, None
        for step, awaiting in sorted(placement.awaited.items()):
            self._awaits[awaiting] = (*self._awaits.get(awaiting, ()), step)

    def build(self, sends: tuple[tuple[Sent, ...], ...]) -> Outbox:
        return Outbox(self.regions, self.num_bytes, sends, self._adjacent, self._awaits)


def aligned(num_bytes: int) -> int:
    """What a region of so many bytes takes."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
