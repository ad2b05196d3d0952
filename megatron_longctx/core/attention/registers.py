"""The registers of a pass, which have the tensors of its rows.

Memory that all runs share (blocks of other ranks, and what this rank sends) does not move between calls, so the
registers of its rows are filled once. The others are filled by the operations of a run.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm import BufferPool, Channel
from ..plans import Heads, Kind
from ..plans.recording import Memory, Place, Recording, Rows
from .kv_format import Fields, Shapes

Values = list[Any]
"""The content of all registers."""
Get = Callable[[Values], Any]
_Shared = tuple[Tensor, Tensor | None]
"""The memory of held blocks, and that of blocks to send."""

_PACKED = frozenset({Place.HELD, Place.SENT, Place.PEER, Place.KEPT})
"""The places where a block has the fields of its messages: keys and values, or their gradients, are one."""
_ALIGNMENT = 256
TEMPLATE, SCALE, EXCHANGE = range(3)
"""Registers of every pass: what a run begins with, the factor of scores, and the messages in flight."""


class View(NamedTuple):
    """What gets rows, and the register with the tensors of which they are views. fixed: these are in shared memory."""

    get: Get
    number: int
    fixed: bool


class Registers:
    """The registers of a recording.

    packed: see `execute.Pass`.
    """

    def __init__(
        self, recording: Recording, shapes: Shapes, pool: BufferPool, channel: Channel | None, packed: bool
    ) -> None:
        self._recording, self._shapes, self._packed = recording, shapes, packed
        self._pool, self._channel = pool, channel
        pool.add_viewer(self)
        self._numbers: dict[Any, int] = {name: i for i, name in enumerate(("template", "scale", "exchange"))}
        self._fill: list[tuple[int, Callable[[_Shared], Any]]] = []  # registers of shared memory
        self.of_peers: dict[Memory, list[tuple[int, Callable[[Fields], Fields]]]] = {}
        """The registers of rows that are read in peers' memory, filled once that is acquired."""
        self._templates: list[Values | None] = [None, None]
        self._generation = (-1, -1)
        self._offsets: list[list[int]] = []
        self._held_bytes = 0
        for kind, parts, tokens in recording.slots:
            self._offsets.append([])
            for spec in shapes.specs(kind, tokens, Heads(0, parts)):
                self._offsets[-1].append(self._held_bytes)
                self._held_bytes += -(-spec.num_bytes // _ALIGNMENT) * _ALIGNMENT

    def begin(self) -> Values:
        """Start a run: return its registers; those in shared memory are filled."""
        parity = 0 if self._channel is None else self._channel.begin()
        while (now := self._current()) != self._generation:  # shared memory has moved, or moves here
            self._templates, self._generation = [None, None], now
            self._memory()
        values = self._templates[parity]
        if values is None:
            values = self._templates[parity] = [None] * len(self._numbers)
            with torch.inference_mode(False):  # later runs use the views too
                memory = self._memory()
                for number, fill in self._fill:
                    values[number] = fill(memory)
        run = values.copy()
        run[TEMPLATE] = values  # not in the template itself: a cycle would keep memory that was given up
        return run

    def forget(self) -> None:
        """Give up the views of shared memory. A run that has begun keeps its own."""
        self._templates = [None, None]

    def number(self, key: Any) -> int:
        """Return the register of a key: a memory, a kind of this rank's own tensors, or anything else."""
        return self._numbers.setdefault(key, len(self._numbers))

    def known(self, kind: type) -> list[tuple[Any, int]]:
        """Return the keys of a type with their registers."""
        return [(key, number) for key, number in self._numbers.items() if isinstance(key, kind)]

    def is_packed(self, memory: Memory) -> bool:
        if memory.kind not in (Kind.KV, Kind.DKV):
            return False
        return self._packed if memory.place is Place.OWN else memory.place in _PACKED

    def raw(self, rows: Rows) -> Get:
        """Return what gets rows with the fields that their memory has."""
        return self.view(rows, split=False).get

    def fields(self, rows: Rows) -> Get:
        """Return what gets rows with keys and values, or their gradients, as separate fields."""
        return self.view(rows, split=self.is_packed(rows.memory)).get

    def tensors(self, rows: Sequence[Rows]) -> Get:
        """Return what gets the tensors of messages."""
        if any(each.memory.is_kept for each in rows):
            gets = [self.raw(each) for each in rows]
            return lambda values: [x for get in gets for x in get(values)]
        number = self.number(("messages", *rows))
        cuts = [(each.memory, self._cut(each) or (lambda fields: fields)) for each in rows]
        self._fill.append((number, lambda of: [x for memory, cut in cuts for x in cut(self._whole(memory, of))]))
        return itemgetter(number)

    def view(self, rows: Rows, split: bool) -> View:
        """Return what gets rows. split: whether packed keys and values become separate fields."""
        memory, cut = rows.memory, self._cut(rows)
        form = self._shapes.kv if memory.kind is Kind.KV else self._shapes.kv_grad
        if memory.place in (Place.HELD, Place.SENT, Place.PEER) and not memory.is_kept:
            decode = split and not form.splits_into_views  # the content changes, so it is decoded anew
            views = split and not decode
            new = (rows, views) not in self._numbers
            number = self.number((rows, views))

            def view(fields: Fields) -> Fields:
                found = fields if cut is None else cut(fields)
                return form.split(found[0]) if views else found

            if new and memory.place is Place.PEER:
                self.of_peers.setdefault(memory, []).append((number, view))
            elif new:
                self._fill.append((number, lambda of: view(self._whole(memory, of))))
            return View((lambda of: form.split(of[number][0])) if decode else itemgetter(number), number, True)
        number = self.number(memory.kind if memory.place is Place.OWN else memory)
        get: Get = itemgetter(number) if cut is None else lambda values: cut(values[number])
        return View((lambda values: form.split(get(values)[0])) if split else get, number, False)

    def _cut(self, rows: Rows) -> Callable[[Fields], Fields] | None:
        """Return what cuts rows out of the fields of their memory; None if they are all of it."""
        memory, (_, start, stop, heads) = rows.memory, rows
        wanted, first = self._shapes.heads(memory.kind, heads), self._shapes.heads(memory.kind, memory.heads).start
        all_rows, length = rows.tokens == memory.tokens, stop - start
        if heads == memory.heads:
            return None if all_rows else lambda fields: tuple([x.narrow(0, start, length) for x in fields])
        head, count = wanted.start - first, len(wanted)

        def cut(fields: Fields) -> Fields:
            # An lse [t, b, h] has no dimension after its heads.
            found = [x.narrow(2 if x.ndim == 3 else x.ndim - 2, head, count) for x in fields]
            return tuple(found if all_rows else [x.narrow(0, start, length) for x in found])

        return cut

    def _current(self) -> tuple[int, int]:
        return self._pool.generation, 0 if self._channel is None else self._channel.generation

    def _memory(self) -> _Shared:
        held = self._pool.get("held", (self._held_bytes,), torch.uint8)
        return held, None if self._channel is None else self._channel.memory()

    def _whole(self, memory: Memory, of: _Shared) -> Fields:
        """Return the fields of shared memory, as they are sent."""
        storage, offsets = of[0], self._offsets[memory.number] if memory.place is Place.HELD else ()
        if memory.place is Place.SENT:
            storage, offsets = of[1], self._recording.sends.regions[memory.number].offsets  # type: ignore[assignment]
        specs = self._shapes.specs(memory.kind, memory.tokens, memory.heads)
        return tuple(
            storage[at : at + spec.num_bytes].view(spec.dtype).view(spec.shape)
            for at, spec in zip(offsets, specs, strict=True)
        )
