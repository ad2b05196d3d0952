"""Strided copies, one by one in wide words and several by one kernel: the same values, whatever the strides."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_longctx.kernels import moves
from megatron_longctx.kernels.moves import MOST_BASES, Mover, Pair, copy, entry, launches

SIZES = st.integers(1, 24)


@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    starts=st.tuples(*[st.integers(0, 9)] * 3),
    order=st.permutations(range(3)),
    seed=st.integers(0, 9),
)
def test_any_strides_are_copied_and_nothing_beside_them(dtype, sizes, starts, order, seed):
    """Parts of larger tensors, whose dimensions lie in different orders in memory."""
    torch.manual_seed(seed)
    source = torch.randint(0, 250, (30, 30, 48)).to(dtype)
    inside = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    part = source[inside].permute(*order)
    into = torch.full((33, 33, 64), 7, dtype=dtype)
    expected = into.clone()
    target = tuple(slice(3, 3 + size) for size in part.shape)
    expected[target].copy_(part)
    copy(into[target], part)
    assert torch.equal(into, expected)


@pytest.mark.parametrize(("last", "word"), [(128, torch.complex128), (4, torch.int64), (3, torch.bfloat16)])
def test_the_widest_words_that_fit_are_moved(last, word, monkeypatch):
    moved = []
    original = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, source: moved.append(into.dtype) or original(into, source))
    source = torch.randn(5, 2, 256).bfloat16()[:, :, :last]
    copy(torch.empty(5, 2, last, dtype=torch.bfloat16), source)
    assert moved == [word]


def heads_to_ranks(n: int, s: int = 37, b: int = 2, h: int = 8, g: int = 4, d: int = 16) -> list[Pair]:
    """What Ulysses packs and puts side by side: parts of the heads of q, of k and v that lie in one projection, and lse
    whose heads come before their tokens."""
    q, projection = torch.randn(s, b, h, d).bfloat16(), torch.randn(s, b, g * 2 + 3, d).bfloat16()
    k, v = projection[:, :, :g], projection[:, :, g : 2 * g]
    packed, pairs = torch.zeros(n, s, b, h // n, d).bfloat16(), []
    keys = torch.zeros(n, s, 2, b, g // n, d).bfloat16()
    for i in range(n):
        pairs.append((packed[i], q.narrow(2, i * h // n, h // n)))
        pairs += [(keys[i].select(1, j), x.narrow(2, i * g // n, g // n)) for j, x in enumerate((k, v))]
    out, lse = torch.zeros(s, b, h, d).bfloat16(), torch.zeros(b, h, s).permute(2, 0, 1)
    for i in range(n):
        heads = slice(i * h // n, (i + 1) * h // n)
        pairs += [(out[:, :, heads], torch.randn(s, b, h // n, d).bfloat16())]
        pairs += [(lse[:, :, heads], torch.randn(s, b, h // n))]
    return pairs


def test_one_launch_takes_what_it_can_and_names_the_rest() -> None:
    pairs = heads_to_ranks(4)
    odd = torch.zeros(5, 7, dtype=torch.bfloat16), torch.ones(5, 7, dtype=torch.bfloat16)
    nothing = torch.zeros(0, 8), torch.zeros(0, 8)
    found, left = launches([odd, *pairs, nothing])
    assert left == [0], "an odd number of small elements is copied by itself, nothing not at all"
    assert [number for launch in found for number in launch.pairs] == list(range(1, len(pairs) + 1))
    assert all(len(launch.leads) <= MOST_BASES for launch in found)
    many = [(torch.zeros(64), torch.ones(64)) for _ in range(MOST_BASES)]
    found, left = launches(many)
    assert [len(launch.pairs) for launch in found] == [MOST_BASES // 2] * 2 and not left


def test_what_lies_side_by_side_is_one_row() -> None:
    whole = torch.zeros(6, 2, 4, 8), torch.zeros(6, 2, 4, 8)
    found = entry(*whole)
    assert found is not None and found.wide and found.sizes == (1, 1, 6 * 2 * 4 * 8 // 2)
    parts = entry(whole[0][:, :, :2], torch.zeros(6, 2, 2, 8))
    assert parts is not None and parts.sizes == (1, 12, 8) and parts.into[1:] == (16, 1) and parts.source[1:] == (8, 1)
    assert entry(torch.zeros(3, 5, 7, 9)[:, :4, :5, :6], torch.zeros(3, 4, 5, 6)) is None, "four dimensions"
    assert entry(torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(4, 3, dtype=torch.bfloat16)) is None


def test_a_plan_serves_what_lies_alike_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory with the same distances and strides is copied by the same table; anything else gets its own."""
    monkeypatch.setattr(moves, "_launches", lambda pairs, device: ((), ()))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    mover = Mover()
    one, two = heads_to_ranks(2), heads_to_ranks(2)
    first = mover._plan("pack", one)
    assert mover._plan("pack", one) is first and mover._plan("pack", two) is first
    assert mover._plan("other", one) is not first
    transposed = [(into, source.transpose(0, 1).contiguous().transpose(0, 1)) for into, source in one]
    assert mover._plan("pack", transposed) is not first
    shifted = [
        (into, torch.zeros(source.numel() + 1, dtype=source.dtype)[1:].view(source.shape)) for into, source in one
    ]
    assert mover._plan("pack", shifted) is not first, "no longer aligned as it was"
    assert mover._plan("pack", one) is first
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert mover._plan("new", one) is None, "a table cannot be made while a stream is captured"


def test_distances_within_a_memory_are_checked() -> None:
    """q, k and v of one projection lie otherwise than three tensors of the same strides."""
    projection = torch.randn(6, 1, 12, 16)
    into = [torch.zeros(6, 1, 4, 16) for _ in range(3)]
    parts = [projection[:, :, 4 * i : 4 * i + 4] for i in range(3)]
    apart = [torch.randn(6, 1, 12, 16)[:, :, :4] for _ in range(3)]
    (launch,), _ = launches(list(zip(into, parts, strict=True)))
    plan = moves._Plan((), (), ((launch, torch.zeros(1)),), ())

    def pointers(sources: list[Tensor]) -> list[int]:
        return [x.data_ptr() for pair in zip(into, sources, strict=True) for x in pair]

    assert moves._fits(plan, pointers(parts)) and not moves._fits(plan, pointers(apart))


def move_in_the_interpreter() -> None:
    """Random pairs by the kernel equal the same by torch, and nothing beside them changes."""
    from megatron_longctx.kernels.moves_triton import move_triton

    rng = random.Random(0)
    cases = [heads_to_ranks(n, s, b, d=d) for n, s, b, d in ((4, 37, 2, 16), (2, 5, 1, 64), (1, 700, 1, 128))]
    for _ in range(6):
        sizes = [rng.randrange(1, 9) for _ in range(3)]
        whole = torch.randn(12, 12, 40), torch.randn(12, 12, 40)
        starts = [rng.choice((0, 2, 4)) for _ in range(3)]
        parts = [x[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))] for x in whole]
        order = rng.sample(range(3), 3)
        cases.append([(parts[0].permute(*order), parts[1].permute(*order)), (torch.zeros(64), torch.randn(64))])
    for pairs in cases:
        storages = [pair[0].untyped_storage() for pair in pairs]
        before = [
            torch.tensor([], dtype=x[0].dtype).set_(memory).clone() for x, memory in zip(pairs, storages, strict=True)
        ]
        for into, source in pairs:
            into.copy_(source)
        expected = [
            torch.tensor([], dtype=x[0].dtype).set_(memory).clone() for x, memory in zip(pairs, storages, strict=True)
        ]
        for (into, _), old, memory in zip(pairs, before, storages, strict=True):
            torch.tensor([], dtype=into.dtype).set_(memory).copy_(old)
        found, left = launches(pairs)
        assert not left
        for launch in found:
            table = torch.tensor(moves.rows(launch), dtype=torch.int64)
            move_triton(launch, table, [pairs[lead // 2][lead % 2].data_ptr() for lead in launch.leads])
        for (into, _), memory, wanted in zip(pairs, storages, expected, strict=True):
            assert torch.equal(torch.tensor([], dtype=into.dtype).set_(memory), wanted)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_kernel_copies_the_same_under_the_interpreter() -> None:
    # The switch is read while triton is imported, so it needs a fresh process.
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pairs_are_copied_on_a_gpu_as_on_a_cpu() -> None:
    """By plans made at once and used again, also in a graph, with memory that has moved."""
    mover = Mover()
    for n, s in ((4, 4096), (2, 100), (4, 4096)):
        cpu = heads_to_ranks(n, s, 1, 32, 8, 128)
        known: dict[int, Tensor] = {}

        def there(x: Tensor, known: dict[int, Tensor] = known) -> Tensor:
            storage = x.untyped_storage()
            whole = torch.tensor([], dtype=x.dtype).set_(storage)
            base = known.setdefault(storage.data_ptr(), whole.cuda())
            return base.as_strided(x.shape, x.stride(), x.storage_offset())

        gpu = [(there(into), there(source)) for into, source in cpu]
        for into, source in cpu:
            into.copy_(source)
        mover.move((n, s), gpu)
        for (into, _), (wanted, _) in zip(gpu, cpu, strict=True):
            assert torch.equal(into.cpu(), wanted)
        assert len(mover._plans[n, s]) == 1
        for into, _ in gpu:
            into.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mover.move((n, s), gpu)
        graph.replay()
        for (into, _), (wanted, _) in zip(gpu, cpu, strict=True):
            assert torch.equal(into.cpu(), wanted)


if __name__ == "__main__":
    move_in_the_interpreter()
