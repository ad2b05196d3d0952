"""The buffers of a pass for blocks of other ranks, and rows of them as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import BufferPool
from .post import Fields
from .program import Place, Program
from .shapes import Shapes, heads_dim


class _Shared(NamedTuple):
    """What passes of one kind share while the pool's memory stays where it is. slots: None for those that are kept."""

    slots: list[Fields | None]
    rows: dict[Place, Fields]
    receives: dict[int, list[tuple[Tensor, int]]]


class Slots:
    """A program's slots, for one pass: those that are kept are its own, all others the pool's.

    Args:
        shapes: those of the program's passes with inputs like this pass's; an object for each such kind of pass.
    """

    def __init__(self, program: Program, shapes: Shapes, pool: BufferPool) -> None:
        self._program, self._shapes = program, shapes
        found = pool.derived.get(shapes)
        if found is None:
            slots = [self._shared(name, pool) for name in range(len(program.slots))]
            found = pool.derived[shapes] = _Shared(slots, {}, {})
        self._known: _Shared = found
        # Held here, since a graph of this pass writes to them even when the pool has new ones.
        self._slots = [
            self._kept(number) if fields is None else fields for number, fields in enumerate(self._known.slots)
        ]

    def rows(self, place: Place) -> Fields:
        """The rows and heads of a place in a slot."""
        if self._program.slots[place.slot].kept:
            return tuple(part(field, place, self._shapes) for field in self._slots[place.slot])
        found = self._known.rows.get(place)
        if found is None:
            with torch.inference_mode(False):  # they outlive the call that asks first
                found = tuple(part(field, place, self._shapes) for field in self._slots[place.slot])
            self._known.rows[place] = found
        return found

    def receives(self, step: int) -> list[tuple[Tensor, int]]:
        """What a step's messages are received into, and from whom."""
        found = self._known.receives.get(step)
        if found is None:
            receives = self._program.steps[step].receives
            found = [(field, receive.peer) for receive in receives for field in self.rows(receive.place)]
            if not any(self._program.slots[receive.place.slot].kept for receive in receives):
                self._known.receives[step] = found
        return found

    def _shared(self, number: int, pool: BufferPool) -> Fields | None:
        slot, name = self._program.slots[number], self._program.slot_names[number]
        if slot.kept:
            return None
        return tuple(
            pool.get((slot.kind, slot.parts, name, i), field.shape, field.dtype)
            for i, field in enumerate(self._shapes.rows(slot.kind, slot.tokens, slot.parts))
        )

    def _kept(self, number: int) -> Fields:
        slot = self._program.slots[number]
        return tuple(field.empty() for field in self._shapes.rows(slot.kind, slot.tokens, slot.parts))


def part(field: Tensor, place: Place, shapes: Shapes) -> Tensor:
    """A place's rows and heads of one of the fields that lie there."""
    if place.heads != place.held:
        wanted, first = shapes.heads(place.kind, place.heads), shapes.heads(place.kind, place.held).start
        field = field.narrow(heads_dim(field), wanted.start - first, wanted.stop - wanted.start)
    return rows(field, place.start, place.stop)


def rows(field: Tensor, start: int, stop: int) -> Tensor:
    """`field[start:stop]`; the field itself where that is all of it."""
    return field if stop - start == field.shape[0] else field.narrow(0, start, stop - start)
