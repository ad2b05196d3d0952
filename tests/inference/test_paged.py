"""Attention over pages in plain PyTorch, and as fused kernels under the interpreter, against its definition in fp64."""

import itertools
from dataclasses import replace

import pytest
import torch

from megatron_longctx.inference import paged
from megatron_longctx.inference.paged import (
    PackedPartials,
    Pages,
    attend_pages,
    attend_torch,
    max_queries_per_tile,
    merge_ranks,
    merge_ranks_torch,
)
from megatron_longctx.inference.quantize_kv import pack_kv, unpack_kv
from tests.core.kernels.interpreter import hopper_code, run_interpreted

COUNTS = (0, 1, 37, 128, 5)
TILE_COUNTS = {2: (0, 1, 37, 36, 0, 0, 128, 5), 4: (36, 37, 38, 0, 5, 128, 1, 130), 16: (*range(120, 133), 0, 0, 0)}
"""The counts of each query, keyed by the number of queries of a sequence per tile."""
ERRORS = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def case(heads, kv_heads, head_dim, page_tokens, dtype, counts=COUNTS, device="cpu", seed=0, per_tile=1):
    """Return queries, a cache with NaN in slots without tokens, shuffled pages, and the slots that each query sees."""
    gen = torch.Generator().manual_seed(seed)
    of_sequences = [counts[i : i + per_tile] for i in range(0, len(counts), per_tile)]
    needed = [-(-max(seen) // page_tokens) for seen in of_sequences]
    order = torch.randperm(sum(needed) + 3, generator=gen)
    table = torch.full((len(needed), max(needed) + 1), 2**30, dtype=torch.int32)
    slots = []
    for row, (seen, pages) in enumerate(zip(of_sequences, needed, strict=True)):
        mine = order[sum(needed[:row]) :][:pages]
        table[row, :pages] = mine.int()
        whole = (mine[:, None] * page_tokens + torch.arange(page_tokens)).flatten()
        slots += [whole[:count] for count in seen]
    cache = torch.full(((len(order) + 1) * page_tokens, 2, kv_heads, head_dim), torch.nan, dtype=dtype)
    for mine in slots:
        cache[mine] = torch.randn(len(mine), 2, kv_heads, head_dim, generator=gen).to(dtype)
    # A layer returns rows of queries, keys and values together.
    q = torch.randn(len(counts), heads + 2 * kv_heads, head_dim, generator=gen).to(dtype)[:, :heads]
    pages = Pages(table.to(device), torch.tensor(counts, device=device), page_tokens, per_tile)
    return q.to(device), cache.to(device), pages, slots


def windowed(pages, slots):
    """Add windows of no key, one key, keys in whole and partial pages, and all keys."""
    window_starts = [max(0, len(mine) - width) for mine, width in zip(slots, itertools.cycle((1, 30, 0, 3, 200, 64)))]
    kept = [mine[first:] for mine, first in zip(slots, window_starts, strict=True)]
    return replace(pages, window_starts=torch.tensor(window_starts, device=pages.counts.device)), kept


def as_int8(cache, dtype):
    """Return the cache as 8-bit integers, and their values."""
    packed = pack_kv(*cache[:, :, None].unbind(1))
    return packed[:, :, 0], torch.cat(unpack_kv(packed, dtype), 1)


def expected(q, cache, slots, scale):
    """Compute out and lse by their definition in fp64."""
    rows, heads, head_dim = q.shape
    out = torch.zeros(rows, heads, head_dim, dtype=torch.float64)
    lse = torch.full((rows, heads), -torch.inf, dtype=torch.float64)
    repeat = heads // cache.shape[2]
    for row, mine in enumerate(slots):
        if len(mine):
            k, v = cache[mine].double().repeat_interleave(repeat, 2).unbind(1)
            scores = torch.einsum("hd,thd->ht", q[row].double(), k) * scale
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
            lse[row] = scores.logsumexp(-1)
    return out, lse


def compare(found, q, cache, slots, scale):
    out, lse = expected(q.cpu(), cache.cpu(), slots, scale)
    bound = ERRORS[q.dtype]
    torch.testing.assert_close(found.out.cpu().double(), out, rtol=bound, atol=bound)
    torch.testing.assert_close(found.lse.cpu().double(), lse, rtol=bound, atol=bound)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sequences_attend_their_own_pages(heads, kv_heads, dtype):
    for head_dim, page_tokens in ((16, 4), (20, 64)):
        q, cache, pages, slots = case(heads, kv_heads, head_dim, page_tokens, dtype)
        found = attend_pages(q, cache, pages, 0.3)
        compare(found, q, cache, slots, 0.3)
        assert found.flat.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("per_tile", TILE_COUNTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_queries_of_one_sequence_see_their_own_counts(per_tile, dtype):
    for heads, kv_heads in ((4, 4), (6, 1)):
        q, cache, pages, slots = case(heads, kv_heads, 20, 16, dtype, TILE_COUNTS[per_tile], per_tile=per_tile)
        compare(attend_pages(q, cache, pages, 0.3), q, cache, slots, 0.3)


@pytest.mark.parametrize("page_tokens", [4, 64])
def test_queries_do_not_see_keys_in_front_of_their_windows(page_tokens):
    for per_tile, counts in {1: COUNTS, **TILE_COUNTS}.items():
        q, cache, pages, slots = case(4, 2, 20, page_tokens, torch.float64, counts, per_tile=per_tile)
        pages, slots = windowed(pages, slots)
        compare(attend_pages(q, cache, pages, 0.3), q, cache, slots, 0.3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_8_bit_keys_and_values_are_attended_as_their_values(dtype):
    for heads, kv_heads, head_dim, page_tokens in ((4, 4, 16, 4), (6, 1, 20, 64)):
        q, cache, pages, slots = case(heads, kv_heads, head_dim, page_tokens, dtype)
        packed, rounded = as_int8(cache, dtype)
        compare(attend_pages(q, packed, pages, 0.3), q, rounded, slots, 0.3)


@pytest.mark.parametrize(("heads", "kv_heads", "most"), [(32, 8, 16), (8, 8, 16), (6, 1, 8), (64, 1, 1), (128, 1, 1)])
def test_tiles_of_queries_fill_a_program(heads, kv_heads, most):
    assert max_queries_per_tile(heads, kv_heads) == most


def ranks_of(n, head_dim, dtype, seed=0):
    """Return random results of n ranks: each has keys for some rows only, and one row has none on any rank."""
    gen = torch.Generator().manual_seed(seed)
    rows, heads = 3, 4
    found = PackedPartials(torch.empty(n, rows * heads * (head_dim + 1), dtype=dtype), rows, heads, head_dim)
    found.out.copy_(torch.randn(found.out.shape, generator=gen))
    found.lse.copy_(torch.randn(found.lse.shape, generator=gen) * 5)
    for rank in range(n):
        for row in {rank % rows, 2}:
            found.out[rank, row], found.lse[rank, row] = 0, -torch.inf
    return found


def expected_merge(found):
    weights = found.lse.double().exp()
    sums = weights.sum(0)
    total = (weights[..., None] * found.out.double()).sum(0)
    return torch.where(sums[..., None] > 0, total / sums[..., None], 0.0), sums.log()


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_results_of_ranks_are_merged(n, dtype):
    found = ranks_of(n, 8, dtype)
    out = merge_ranks(found, torch.empty(3, 4, 8, dtype=dtype))
    torch.testing.assert_close(out.double(), expected_merge(found)[0], rtol=1e-6, atol=1e-6)
    assert (out[2] == 0).all()


def test_shapes_that_do_not_fit_are_refused():
    q, cache, pages, _ = case(4, 2, 16, 4, torch.float32)
    for bad in (
        (q[:, :3], cache, pages),
        (q[..., :8], cache, pages),
        (q.double(), cache, pages),
        (q, cache.to(torch.uint8), pages),
        (q, cache, Pages(pages.table[:2], pages.counts, 4)),
        (q, cache, Pages(pages.table, pages.counts, 0)),
        (q, cache, Pages(pages.table, pages.counts, 4, 3)),
        (q, cache, Pages(pages.table, pages.counts, 4, 2)),
        (q[:4], cache, Pages(pages.table[:1], pages.counts[:4], 4, 2)),
        (q, cache, replace(pages, window_starts=pages.counts[:3])),
    ):
        with pytest.raises(ValueError, match="expected"):
            attend_pages(*bad, 1.0)


def compare_fused_with_torch() -> None:
    """Run in a separate process, whose environment enables Triton's interpreter."""
    from megatron_longctx.inference import paged_triton as fused

    torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
    paged.attend_torch, paged.merge_ranks_torch = fused.attend_triton, fused.merge_ranks_triton
    odd, whole, few = (6, 1, 20, 32), (4, 4, 16, 4), (2, 2, 8, 48)
    # Not bf16, whose bits the interpreter multiplies as integers.
    half, single = torch.float16, torch.float32
    cases = [
        ((8, 2, 64, 64), half, 1, False, False),
        ((40, 1, 128, 128), single, 1, False, False),
        (whole, single, 1, False, False),
        (whole, single, 16, False, False),
        (odd, single, 4, False, False),
        (odd, half, 4, True, True),
        (few, single, 1, False, True),
        (whole, single, 16, False, True),
    ]
    for index, (shape, dtype, per_tile, int8, window) in enumerate(cases):
        q, rounded, pages, slots = case(*shape, dtype, TILE_COUNTS.get(per_tile, COUNTS), per_tile=per_tile)
        pages, slots = windowed(pages, slots) if window else (pages, slots)
        cache, rounded = as_int8(rounded, dtype) if int8 else (rounded, rounded)
        # More splits than some sequences have tokens; and one split, without a merge.
        for processors in (40, 1) if index % 4 == 0 else (40,):
            fused._processors = lambda _, count=processors: count
            found = attend_pages(q, cache, pages, 0.3)
            compare(found, q, rounded, slots, 0.3)
            torchs = attend_torch(q, cache, pages, 0.3).flat[0]
            torch.testing.assert_close(found.flat, torchs, rtol=ERRORS[dtype], atol=ERRORS[dtype])
    for n, head_dim, dtype in itertools.product((1, 3, 17), (8, 20), (torch.float32, torch.bfloat16)):
        found = ranks_of(n, head_dim, torch.float32)
        out, torchs = (torch.full((3, 4, head_dim), torch.nan, dtype=dtype) for _ in range(2))
        fused.merge_ranks_triton(found, out)
        merge_ranks_torch(found, torchs)
        torch.testing.assert_close(out, torchs)


def test_fused_kernels_equal_the_definition_under_the_interpreter():
    run_interpreted(__name__)


@pytest.mark.parametrize(
    ("dtype", "page", "per_tile", "int8", "window"),
    [
        ("bf16", 64, 1, False, False),
        ("bf16", 4, 1, False, True),
        ("fp32", 64, 1, False, False),
        ("bf16", 64, 16, False, False),
        ("bf16", 64, 1, True, True),
        ("bf16", 64, 16, True, True),
    ],
)
def test_kernels_compile_for_hopper(dtype, page, per_tile, int8, window):
    """Triton's interpreter, which runs them on CPUs, accepts more than its compiler does."""
    pytest.importorskip("triton")
    from megatron_longctx.inference import paged_triton as fused

    constants = {"PAGE": page, "QUERIES": per_tile, "HEADS": 16 if per_tile == 1 else 4, "COLS": 128}
    constants["KEYS"] = 64 if dtype == "bf16" else 32
    constants |= {"BLOCK": 16, "WITH_LSE": dtype == "bf16", "INT8": int8, "WINDOW": window}
    types = {
        "q": f"*{dtype}",
        "cache": "*i8" if int8 else f"*{dtype}",
        "table": "*i32",
        "counts": "*i64",
        "window_starts": "*i64",
        "scale": "fp32",
    }
    types |= dict.fromkeys(("parts", "part_lse", "lse"), "*fp32")
    for kernel, out in ((fused._attend_kernel, "*fp32"), (fused._merge_kernel, f"*{dtype}")):
        hopper_code(kernel, constants, {**types, "out": out}, num_warps=4, num_stages=fused._STAGES)


def test_splits_of_keys_fill_the_processors_in_whole_rounds(monkeypatch):
    fused = pytest.importorskip("megatron_longctx.inference.paged_triton")
    monkeypatch.setattr(fused, "_processors", lambda _: 132)
    device = torch.device("cuda")
    for programs in range(1, 400):
        splits = fused.even_splits(programs, device)
        assert 1 <= splits <= 128
        # Only the last round has idle processors, and few: one more split would begin another round.
        rounds = programs * splits / 264
        assert splits == 128 or any(rounds <= most < rounds + programs / 264 for most in (1, 2, 3)), programs
    # Close to the fastest measured ones (docs/decisions.md).
    measured = {8: 33, 24: 22, 40: 13, 56: 9, 64: 8, 80: 6, 96: 8, 112: 7, 128: 4, 160: 3, 192: 4, 256: 2}
    assert {programs: fused.even_splits(programs, device) for programs in measured} == measured
    assert fused.even_splits(1000, device) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(32, 8, 128, 64), (8, 8, 64, 4), (64, 1, 128, 32), (16, 2, 256, 48)], ids=str)
def test_kernels_equal_the_definition_on_a_gpu(shape, dtype):
    """Include replays of a graph with lengths other than those it was captured with."""
    counts = (0, 1, 6000, 129, 20001)
    q, cache, pages, slots = case(*shape, dtype, counts, "cuda")
    compare(attend_pages(q, cache, pages, 0.1), q, cache, slots, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = attend_pages(q, cache, pages, 0.1)
        merged = merge_ranks(PackedPartials(found.flat[None], *q.shape), torch.empty_like(q))
    shorter = torch.tensor((0, 1, 777, 64, 13), device="cuda")
    pages.counts.copy_(shorter)
    graph.replay()
    kept = [mine[:count] for mine, count in zip(slots, shorter.tolist(), strict=True)]
    compare(found, q, cache, kept, 0.1)
    torch.testing.assert_close(merged, found.out.to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(32, 8, 128, 64), (8, 8, 64, 4), (64, 1, 128, 32), (16, 2, 256, 48)], ids=str)
def test_queries_of_one_sequence_on_a_gpu(shape, dtype):
    counts = (*range(20001, 20014), 0, 0, 0, *range(1, 17), 777, *[0] * 15)
    q, cache, pages, slots = case(*shape, dtype, counts, "cuda", per_tile=max_queries_per_tile(*shape[:2]))
    for seen, kept in ((pages, slots), windowed(pages, slots)):
        compare(attend_pages(q, cache, seen, 0.1), q, cache, kept, 0.1)


@pytest.mark.gpu
def test_slots_past_two_billion_elements_are_read():
    """Attend to the last page of a 6 GiB cache."""
    slots, page = 3 * 2**19, 64  # 1.5M slots of 2 x 8 x 128 elements
    if torch.cuda.mem_get_info()[0] < 9 * 2**30:
        pytest.skip("needs 9 GiB of GPU memory")
    cache = torch.zeros(slots, 2, 8, 128, dtype=torch.bfloat16, device="cuda")
    cache[-page:].normal_()
    q = torch.randn(1, 32, 128, device="cuda").bfloat16()
    pages = Pages(
        torch.tensor([[slots // page - 1]], dtype=torch.int32, device="cuda"), torch.tensor([page]).cuda(), page
    )
    found = attend_pages(q, cache, pages, 0.1)
    compare(found, q, cache[-page:], [torch.arange(page)], 0.1)


if __name__ == "__main__":
    compare_fused_with_torch()
