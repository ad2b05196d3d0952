"""Strided copies, one at a time in wide words or several in one kernel, copy the same values for any strides."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_longctx.core.kernels.batched_copy import MAX_BASES, BatchedCopy, Launch, Pair, copy, entry, launches

SIZES = st.integers(1, 24)


@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    starts=st.tuples(*[st.integers(0, 9)] * 3),
    order=st.permutations(range(3)),
    seed=st.integers(0, 9),
)
def test_any_strides_are_copied_and_nothing_beside_them(dtype, sizes, starts, order, seed):
    """Copy parts of larger tensors, with dimensions in different orders in memory."""
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
    """Return the copies of Ulysses: parts of the heads of q, of k and v in one projection, and lse with heads first."""
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


def alone(pairs, moving=0):
    """Return pairs of which each tensor is its own root, these roots, and how many of them move."""
    return [(pair, (2 * i, 2 * i + 1)) for i, pair in enumerate(pairs)], sum(pairs, ()), moving


def test_launches_return_the_pairs_that_they_cannot_copy() -> None:
    pairs = heads_to_ranks(4)
    odd = torch.zeros(5, 7, dtype=torch.bfloat16), torch.ones(5, 7, dtype=torch.bfloat16)
    nothing = torch.zeros(0, 8), torch.zeros(0, 8)
    found, left = launches(*alone([odd, *pairs, nothing]))
    assert left == [0], "an odd number of small elements is copied alone, and nothing is not copied"
    assert [number for launch in found for number in launch.pairs] == list(range(1, len(pairs) + 1))
    assert all(len(launch.anchors) <= MAX_BASES for launch in found)
    many = [(torch.zeros(64), torch.ones(64)) for _ in range(MAX_BASES)]
    found, left = launches(*alone(many))
    assert [len(launch.pairs) for launch in found] == [MAX_BASES // 2] * 2 and not left


def by_the_table(launch: Launch, bases: Sequence[int], memory: dict[int, np.ndarray]) -> None:
    """Make a launch's copies as the kernel does. memory: the bytes of each allocation, keyed by address."""

    def words(address: int, offsets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        start = max(base for base in memory if base <= address)
        places = address - start + offsets * size
        assert not places.size or 0 <= places.min() <= places.max() <= len(memory[start]) - size, "outside its memory"
        return memory[start], places[:, None] + np.arange(size)

    cols = launch.columns
    for of, of_bytes, to, to_bytes, wide, n0, n1, n2, d0, d1, d2, s0, s1, s2, *_ in launch.table:
        assert n0 * n1 * n2 < 2**31, "counted in 32 bits"
        i = np.arange(n0 * n1 * n2)
        if wide:
            assert not (bases[of] + of_bytes) % 16 and not (bases[to] + to_bytes) % 16 and not n2 % cols
            assert not d0 % 2 and not d1 % 2 and not s0 % 2 and not s1 % 2, "rows begin at multiples of 16 bytes"
            row, col = i // cols, i % cols
            last, rest = row % (n2 // cols) * cols + col, row // (n2 // cols)
            d2 = s2 = 1
        else:
            last, rest = i % n2, i // n2
        outer, inner = rest // n1, rest % n1
        size = 8 if wide else 4
        source, at = words(bases[of] + of_bytes, outer * s0 + inner * s1 + last * s2, size)
        into, there = words(bases[to] + to_bytes, outer * d0 + inner * d1 + last * d2, size)
        into[there] = source[at]


@st.composite
def several_pairs(draw: st.DrawFn) -> list[Pair]:
    """Draw pairs in a few allocations: adjacent targets, and sources in any order of dimensions, some expanded."""
    pairs = []
    source_memory = torch.arange(4 * 2**16, dtype=torch.int32).view(torch.uint8)
    for dtype in draw(
        st.lists(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]), max_size=3)
    ):
        count = draw(st.integers(1, 6))
        sizes = [draw(st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 6)) for _ in range(3)]
        sizes.append(draw(st.sampled_from([1, 3, 4, 8, 16, 24, 64])))
        order = draw(st.permutations(range(4)))
        margin = draw(st.sampled_from([0, 1, 8]))
        into = torch.zeros(count, *[sizes[dim] for dim in order[:-1]], sizes[order[-1]] + margin, dtype=dtype)
        start = draw(st.sampled_from([0, 8, 16, 128]))
        step = draw(st.sampled_from([1, 1, 1, 2]))
        for part in into:
            source = source_memory[start:].view(dtype)
            shape = [size + draw(st.sampled_from([0, 0, 2])) for size in sizes]
            part = part[..., : sizes[order[-1]]]
            source = source[: step * math.prod(shape)].view(*shape[:-1], step * shape[-1])
            source = source[tuple(slice(size) for size in sizes[:-1])][..., : step * sizes[-1] : step]
            if draw(st.integers(0, 4)) == 0 and sizes[0]:
                source = source[:1].expand(sizes)
            pairs.append((part, source.permute(*order)))
    return pairs


def assert_copied(pairs: list[Pair], copy_all: Callable[[Launch, list[int]], None]) -> None:
    """Assert that launches and the pairs that they cannot copy change the same bytes as torch, and no others."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for pair in pairs for x in pair if x.numel()}
    memory = [torch.tensor([], dtype=torch.uint8).set_(storage) for storage in storages.values()]
    before = [each.clone() for each in memory]
    found, left = launches(*alone(pairs, moving=len(pairs) // 2))
    assert all(len(launch.anchors) <= MAX_BASES for launch in found)
    copied = [number for launch in found for number in launch.pairs]
    assert sorted([*copied, *left]) == [number for number, (into, _) in enumerate(pairs) if into.numel()]
    for launch in found:
        copy_all(launch, [pairs[anchor // 2][anchor % 2].data_ptr() for anchor in launch.anchors])
    for number in left:
        copy(*pairs[number])
    after = [each.clone() for each in memory]
    for each, old in zip(memory, before, strict=True):
        each.copy_(old)
    for into, source in pairs:
        into.copy_(source)
    assert all(map(torch.equal, memory, after))


@settings(max_examples=200, deadline=None)
@given(several_pairs(), st.randoms())
def test_tables_address_all_tensors(pairs: list[Pair], shuffled: random.Random) -> None:
    shuffled.shuffle(pairs)
    storages = [x.untyped_storage() for pair in pairs for x in pair if x.numel()]
    memory = {x.data_ptr(): torch.tensor([], dtype=torch.uint8).set_(x).numpy() for x in storages}
    assert_copied(pairs, lambda launch, bases: by_the_table(launch, bases, memory))


def test_the_kernel_copies_one_dtype_and_counts_in_32_bits() -> None:
    converted = torch.zeros(8, 8, dtype=torch.bfloat16), torch.ones(8, 8)
    assert launches(*alone([converted])) == ([], [0])
    copy(*converted)
    assert torch.equal(converted[0], torch.ones(8, 8, dtype=torch.bfloat16))
    one = torch.zeros(4)
    assert entry(one[:1].expand(2**31 - 2**12, 1), one[:1].expand(2**31 - 2**12, 1)) is not None
    assert entry(one[:1].expand(2**31, 1), one[:1].expand(2**31, 1)) is None


def test_adjacent_dimensions_are_merged() -> None:
    whole = torch.zeros(6, 2, 4, 8), torch.zeros(6, 2, 4, 8)
    found = entry(*whole)
    assert found is not None and found.wide and found.sizes == (1, 1, 6 * 2 * 4 * 8 // 2)
    parts = entry(whole[0][:, :, :2], torch.zeros(6, 2, 2, 8))
    assert parts is not None and parts.sizes == (1, 12, 8) and parts.into[1:] == (16, 1) and parts.source[1:] == (8, 1)
    assert entry(torch.zeros(3, 5, 7, 9)[:, :4, :5, :6], torch.zeros(3, 4, 5, 6)) is None, "four dimensions"
    assert entry(torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(4, 3, dtype=torch.bfloat16)) is None


def test_a_plan_is_reused_for_moving_roots_of_the_same_strides_and_alignment() -> None:
    """Only their addresses count, in one allocation or in several."""
    copier, memory = BatchedCopy(), torch.zeros(3, 6, 1, 4, 16).unbind()

    def plan(q: Tensor, k: Tensor) -> Any:
        pairs = [((memory[i], x), (2 + i, i // 2)) for i, x in enumerate((*q.split(4, dim=2), k))]
        return copier._plan([q, k, *memory], 2, lambda: pairs)

    one, two, shifted = torch.randn(6, 1, 12, 16), torch.randn(6, 1, 12, 16), torch.randn(6 * 12 * 16 + 1)[1:]
    first = plan(one[:, :, :8], one[:, :, 8:])
    assert first is plan(two[:, :, :8], one[:, :, 8:]) is plan(one[:, :, 4:], two[:, :, :4])
    assert [sorted(launch.anchors) for launch, _ in first.launches] == [[0, 1, 2]], "each moving root is a base"
    assert plan(one[:, :, :8].clone(), one[:, :, 8:]) is not first
    assert plan(shifted.view(one.shape)[:, :, :8], one[:, :, 8:]) is not first, "another alignment"
    for gap in range(20):
        plan(torch.zeros(6, 1, 8 + gap, 16)[:, :, :8], one[:, :, 8:])
    assert len(copier._plans) == 8, "the newest ones"


def copy_in_the_interpreter() -> None:
    """Compare the kernel with torch on random pairs."""
    from megatron_longctx.core.kernels.batched_copy_triton import copy_triton

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
        assert not launches(*alone(pairs))[1]
        assert_copied(pairs, lambda launch, bases: copy_triton(launch, torch.tensor(launch.table), bases))


@pytest.mark.gpu
def test_the_kernel_copies_the_same_on_a_gpu() -> None:
    for n, s in ((4, 4096), (2, 100)):
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
        rooted, *roots = alone(gpu)
        BatchedCopy().copy(*roots, lambda rooted=rooted: rooted)
        for (into, _), (wanted, _) in zip(gpu, cpu, strict=True):
            assert torch.equal(into.cpu(), wanted)


if __name__ == "__main__":
    copy_in_the_interpreter()
