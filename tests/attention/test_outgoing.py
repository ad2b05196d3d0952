"""Results on their way to other ranks: where they lie, and what they hold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.attention.outgoing import Outgoing, Part, Routes
from megatron_longctx.attention.program import Away
from megatron_longctx.attention.shapes import Like, Shapes
from megatron_longctx.kernels.moves import Mover
from megatron_longctx.schedules import Block, Kind

T, B, H, D = 3, 2, 4, 8
CPU = torch.device("cpu")
SHAPES = Shapes(
    {
        Kind.Q: (Like((T, B, H, D), torch.float32, CPU),),
        Kind.KV: (Like((T, 2, B, H, D), torch.float32, CPU),),
        Kind.Q_GRAD: (Like((T, B, H, D), torch.float32, CPU),),
        Kind.OUT: (Like((T, B, H, D), torch.float32, CPU), Like((T, B, H), torch.float32, CPU)),
        Kind.DQ: (Like((T, B, H, D), torch.float32, CPU),),
        Kind.DKV: (Like((T, 2, B, H, D), torch.float32, CPU),),
    }
)


class Rooms:
    """A post that wants the results of the ranks named in one memory, side by side, and all others anywhere."""

    def __init__(self, named: Sequence[int]) -> None:
        self.named = tuple(named)
        self.memory: dict[int, Tensor] = {}
        self.asked = 0

    def room(self, name: Hashable, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        _, result, i = name  # type: ignore[misc]
        if result not in self.named:
            return None
        self.asked += 1
        size = torch.Size(shape[1:]).numel()
        whole = self.memory.setdefault(i, torch.full((len(self.named) * T, size), torch.nan))
        first = self.named.index(result) * T
        return whole[first : first + shape[0]].view(*shape)

    def joined(self, names: Sequence[Any]) -> bool:
        results = [result for _, result, _ in names]
        if not any(result in self.named for result in results):
            return True
        return all(result in self.named for result in results)


def call(kind: Kind, homes: Sequence[int], whole: bool) -> tuple[tuple[Block, ...], list[Part]]:
    """A call for T rows of each of these ranks, the first of which is the caller: (outgoing results, parts)."""
    blocks = tuple(Block(kind, home, 0, T, origin=9) for home in homes[1:])
    parts = [Part((i + 1) * T, (i + 2) * T, Away(block, i, True, whole)) for i, block in enumerate(blocks)]
    return blocks, parts


def computed(kind: Kind, ranks: int) -> tuple[Tensor, ...]:
    """With the strides that kernels give."""
    values = torch.randn(B, ranks * T, H, D).transpose(0, 1)
    if kind is Kind.OUT:
        return values, torch.randn(B, H, ranks * T).permute(2, 0, 1)
    return (values, torch.randn(B, ranks * T, H, D).transpose(0, 1)) if kind is Kind.DKV else (values,)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("kind", [Kind.OUT, Kind.DQ, Kind.DKV])
@pytest.mark.parametrize("named", [(), (0, 1, 2), (0, 1), (1, 2), (0, 2)], ids=str)
def test_what_is_sent_is_what_was_computed(kind: Kind, whole: bool, named: Sequence[int]) -> None:
    """In one part or brought together of parts, and in the rooms where there are any."""
    outgoing, parts = call(kind, (3, 0, 1, 2), whole)
    rooms, fields = Rooms(named), computed(kind, 4)
    routes = Routes(outgoing, SHAPES, rooms)  # type: ignore[arg-type]
    results = Outgoing(outgoing, routes, Mover())
    results.add(parts, fields)
    for start, stop, away in parts:
        sent = results.take(away.result)
        expected = tuple(field[start:stop] for field in fields)
        expected = (torch.stack(expected, dim=1),) if kind is Kind.DKV else expected
        for i, (field, value) in enumerate(zip(sent, expected, strict=True)):
            assert field.is_contiguous() and torch.equal(field, value)
            inside = i in rooms.memory and field.untyped_storage().data_ptr() == rooms.memory[i].data_ptr()
            assert inside == (away.result in named)


def test_neighbours_are_copied_into_one_room() -> None:
    outgoing, parts = call(Kind.OUT, (3, 0, 1, 2), True)
    rooms = Rooms((0, 1, 2))
    Outgoing(outgoing, Routes(outgoing, SHAPES, rooms), Mover()).add(parts, computed(Kind.OUT, 4))  # type: ignore[arg-type]
    assert rooms.asked == 2, "one for all outputs, one for their lse"


def test_what_lies_right_is_sent_from_where_it_is() -> None:
    outgoing, parts = call(Kind.DQ, (3, 0, 1), True)
    results = Outgoing(outgoing, Routes(outgoing, SHAPES, Rooms(())), Mover())  # type: ignore[arg-type]
    (dq,) = (torch.randn(3 * T, B, H, D),)
    results.add(parts, (dq,))
    assert all(results.take(part.away.result)[0].data_ptr() == dq[part.start].data_ptr() for part in parts)
