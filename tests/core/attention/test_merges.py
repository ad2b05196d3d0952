"""The sums of partial results: their merges, executed on tensors."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_longctx.core.attention.execute import Pass, Runtime
from megatron_longctx.core.attention.function import shapes_of
from megatron_longctx.core.comm import BufferPool
from megatron_longctx.core.plans import ALL_HEADS, Heads, Kind
from megatron_longctx.core.plans.recording import MAX_PARTIALS, Copy, Memory, Merge, Op, Part, Place, Recording, Sum

S, B, H, D = 6, 2, 4, 8


class Sums:
    """A sum of `S` tokens, and what is added to it: results of kernel calls, of some rows and heads."""

    def __init__(self, kind: Kind, dtype: torch.dtype = torch.float32) -> None:
        like = torch.zeros(S, B, H, D, dtype=dtype)
        self.shapes, self.kind = shapes_of(like, like, like), kind
        self.ops: list[Op] = []
        self.sum = Sum(kind, S, ALL_HEADS, None, self.shapes.workload, self.ops)
        self.parts: list[tuple[int, range, tuple[Tensor, ...]]] = []
        self.calls: dict[Memory, tuple[Tensor, ...]] = {}

    def add(self, start: int, fields: tuple[Tensor, ...], heads: Heads = ALL_HEADS) -> None:
        self.parts.append((start, self.shapes.heads(self.kind, heads), fields))
        memory = Memory(Place.CALL, self.kind, len(fields[0]), heads)
        self.calls[memory] = fields
        self.sum.add(Part(memory.rows(), start))

    def finish(self) -> tuple[Tensor, ...]:
        own = {self.kind: self.sum.finish()}
        recording = Recording(0, S, self.kind is not Kind.OUT, tuple(self.ops), {}, (), None, (), (), (), own)  # type: ignore[arg-type]
        recorder: Any = SimpleNamespace(record=lambda _: recording)
        replay = Pass(recorder, 0, self.shapes, Runtime(None, None, BufferPool(torch.device("cpu"))))  # type: ignore[arg-type]
        values = replay._registers.begin()
        for memory, number in replay._registers.known(Memory):
            values[number] = self.calls.get(memory)
        for step in replay._steps:
            step(values)
        return tuple(replay._results[self.kind](values))

    def expected(self) -> tuple[Tensor, ...]:
        """Compute the total by its definition in fp64."""
        sums = [torch.zeros(S, B, H, D).double() for _ in range(2 if self.kind is Kind.DKV else 1)]
        if self.kind is not Kind.OUT:
            for start, heads, fields in self.parts:
                for total, field in zip(sums, fields, strict=True):
                    total[start : start + len(field), :, heads.start : heads.stop] += field.double()
            return tuple(sums)
        lse = torch.full((S, B, H), -torch.inf).double()
        for start, heads, (_, part) in self.parts:
            rows = lse[start : start + len(part), :, heads.start : heads.stop]
            rows.copy_(torch.logaddexp(rows, part.double()))
        for start, heads, (out, part) in self.parts:
            where = slice(start, start + len(out)), slice(None), slice(heads.start, heads.stop)
            sums[0][where] += out.double() * (part.double() - lse[where]).exp().nan_to_num(0)[..., None]
        return sums[0], lse


def draw(kind: Kind, tokens: int, heads: int = H, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Draw a result in the layout of kernels."""
    value = torch.randn(B, heads, tokens, D).to(dtype).permute(2, 0, 1, 3)
    if kind is Kind.OUT:
        return value, torch.randn(B, heads, tokens).permute(2, 0, 1)
    return (value, torch.randn(tokens, B, heads, D).to(dtype)) if kind is Kind.DKV else (value,)


def check(sums: Sums) -> None:
    before = [[field.clone() for field in fields] for _, _, fields in sums.parts]
    wanted = sums.expected()
    for found, truth in zip(sums.finish(), wanted, strict=True):
        rough = 2e-2 if found.dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found.double(), truth, rtol=rough, atol=rough)
    for (_, _, fields), clones in zip(sums.parts, before, strict=True):
        assert all(map(torch.equal, fields, clones)), "a kernel's result was overwritten"


KINDS = (Kind.OUT, Kind.DQ, Kind.DKV)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_any_rows_of_any_heads_in_any_order(kind: Kind, seed: int) -> None:
    """Parts include short ones after long ones that cover them, earlier rows after later ones, and separate heads."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    sums = Sums(kind, choice.choice((torch.float32, torch.bfloat16)))
    for _ in range(choice.randint(0, 14)):
        start, stop = sorted(choice.sample(range(S + 1), 2))
        parts = choice.choice((1, 1, 2, 4))
        heads = Heads(choice.randrange(parts), parts)
        sums.add(start, draw(kind, stop - start, H // parts, sums.shapes.dtype), heads)
    check(sums)


def test_merges_touch_only_rows_that_parts_cover() -> None:
    sums = Sums(Kind.OUT)
    for start, stop in ((0, 3), (3, 5), (5, 6)):
        for _ in range(6):
            sums.add(start, draw(Kind.OUT, stop - start))
    check(sums)
    assert all(isinstance(op, Merge) for op in sums.ops)
    assert [(op.into.tokens, len(op.parts)) for op in sums.ops] == [(6, 4), (5, 4), (2, 4), (3, 4), (1, 4), (6, 3)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_part_of_all_rows_is_not_copied(kind: Kind) -> None:
    sums, fields = Sums(kind), draw(kind, S)
    sums.add(0, fields)
    assert all(x is y for x, y in zip(sums.finish(), fields, strict=True)) and not sums.ops


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [2, 0, 3, 1]], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_the_heads_take_one_batch_of_copies(kind: Kind, order: list[int]) -> None:
    """Bit-identical, for more parts than one merge takes."""
    sums = Sums(kind, torch.bfloat16)
    for part in order:
        sums.add(0, draw(kind, S, 1, torch.bfloat16), Heads(part, H))
    found = sums.finish()
    assert [type(op) for op in sums.ops] == [Copy] and len(order) >= MAX_PARTIALS
    for _, heads, fields in sums.parts:
        assert all(torch.equal(x[:, :, heads.start : heads.stop], y) for x, y in zip(found, fields, strict=True))


@pytest.mark.parametrize("why", ["overlaps", "of some rows", "a head is missing"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_parts_are_merged(kind: Kind, why: str) -> None:
    sums = Sums(kind)
    for part in range(H - (why == "a head is missing")):
        sums.add(0, draw(kind, S - (why == "of some rows" and part == 1), 1), Heads(part, H))
    if why == "overlaps":
        sums.add(2, draw(kind, 3, 1), Heads(0, H))
    check(sums)
    assert {type(op) for op in sums.ops} == {Merge}


def test_many_small_parts_lose_nothing_in_bf16() -> None:
    """4096 parts of 2^-9 are added to 1; a sum in bf16 would round each of them away."""
    sums, one = Sums(Kind.DQ, torch.bfloat16), torch.ones(S, B, H, D, dtype=torch.bfloat16)
    sums.add(0, (one,))
    for _ in range(4096):
        sums.add(1, (one[1:] * 2.0**-9,))
    (found,) = sums.finish()
    assert found.dtype == torch.bfloat16 and (found[0] == 1).all() and (found[1:] == 9).all()
