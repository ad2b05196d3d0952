"""Reductions over peer memory on GPUs: the numbers of the collectives to the bit, whatever runs before and beside."""

import random

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.comm.peer_memory import peer_memory
from megatron_longctx.gpus import gpu_ranks
from megatron_longctx.lowbit.peer_reduce import PeerReduction, peer_reduction
from megatron_longctx.lowbit.quantize import quantize, sum_quantized
from megatron_longctx.lowbit.quantized import all_reduce, formats, reduce_scatter
from megatron_longctx.testing.distributed import run_distributed

pytestmark = pytest.mark.gpu(2)
CALLS = 200
# Few enough that compiling them takes a minute, not ten; the interpreter's tests have them all.
VARIANTS = (
    ("all", 8, 128, torch.bfloat16),
    ("all", 6, 32, torch.bfloat16),
    ("all", 4, 128, torch.float32),
    ("all", None, 128, torch.bfloat16),
    ("one", 8, 32, torch.bfloat16),
    ("one", None, 128, torch.float32),
    ("scatter", 4, 128, torch.bfloat16),
    ("scatter", None, 128, torch.bfloat16),
)
WORLDS = sorted({2, gpu_ranks()})


def _draw(numel: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    gen = torch.Generator(device).manual_seed(seed)
    x = torch.randn(numel, generator=gen, device=device)
    return (x * torch.where(torch.rand(numel, generator=gen, device=device) < 0.02, 100.0, 1.0)).to(dtype)


def _gathered(x: torch.Tensor) -> torch.Tensor:
    every = x.new_empty((dist.get_world_size(), *x.shape))
    dist.all_gather_into_tensor(every, x)
    return every


def _expected(x: torch.Tensor, kind: str, bits: int | None, group_size: int) -> torch.Tensor:
    """What collectives and the kernels that only quantize give."""
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    if bits is None:
        total = torch.zeros_like(x, dtype=torch.float32)
        for row in _gathered(x):
            total += row.float()
        return total.to(x.dtype).chunk(n)[rank] if kind == "scatter" else total.to(x.dtype)
    if kind == "scatter":
        return reduce_scatter(x, group, bits=bits, group_size=group_size)
    if kind == "all":
        return all_reduce(x, group, bits=bits, group_size=group_size)
    form, _ = formats(x.dtype, bits, group_size)
    rows = _gathered(quantize(x, 1, x.numel(), form)[0])
    return sum_quantized(rows, x.numel(), form, torch.empty_like(x))


def _reduced(reduction: PeerReduction, x: torch.Tensor, kind: str, bits: int | None, group_size: int) -> torch.Tensor:
    if kind == "scatter":
        return reduction.reduce_scatter(x, bits=bits, group_size=group_size)
    return reduction.all_reduce(x, bits=bits, group_size=group_size, steps=1 if kind == "one" else 2)


def _same_bits(rank: int, room: int) -> list[str]:
    device, wrong = torch.device("cuda", torch.cuda.current_device()), []
    n = dist.get_world_size()
    reduction = PeerReduction(peer_memory(dist.group.WORLD, device, room, ""))
    same, results = random.Random(0), []
    for number in range(CALLS):
        kind, bits, group_size, dtype = same.choice(VARIANTS)
        numel = same.choice((1, 77, 4096, 65_536, 300_001, 2**21, 5_000_000))
        if kind == "one":
            numel = min(numel, room // n // (dtype.itemsize + 1))
        x = _draw(numel * (n if kind == "scatter" else 1), dtype, device, 1000 * number + rank)
        if number % 7 == rank % 7:  # ranks come late in turns
            torch.cuda._sleep(2_000_000)
        results.append(
            (number, kind, bits, numel, dtype, x, _reduced(reduction, x, kind, bits, group_size), group_size)
        )
        if len(results) == 10:  # many calls in a row, looked at afterwards
            for number_, kind_, bits_, numel_, dtype_, x_, found, size in results:
                if not torch.equal(found, _expected(x_, kind_, bits_, size)):
                    wrong.append(f"rank {rank}, call {number_}: {kind_} of {numel_} {dtype_} in {bits_} bits")
            results = []
    return wrong


@pytest.mark.parametrize(("world", "room"), [(2, 2**20), (WORLDS[-1], 64 * 2**20)])
def test_calls_of_all_kinds_have_the_collectives_bits(world: int, room: int) -> None:
    assert run_distributed(_same_bits, world, room, backend="nccl", timeout=300.0) == [[]] * world


def _in_a_graph(rank: int) -> list[str]:
    """Two calls (and so both halves of the memory), and three, replayed with new data, eager calls between."""
    device, wrong = torch.device("cuda", torch.cuda.current_device()), []
    reduction = peer_reduction("peer", dist.group.WORLD, device)
    for calls in (2, 3):
        inputs = [torch.empty(2**20, dtype=torch.bfloat16, device=device) for _ in range(calls)]
        for x in inputs:
            x.copy_(_draw(x.numel(), x.dtype, device, rank))
        work = [("all", 8), ("one", 4), ("all", None)]
        for (kind, bits), x in zip(work, inputs, strict=False):  # compiles
            _reduced(reduction, x, kind, bits, 128)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
            outs = [_reduced(reduction, x, k, bits, 128) for (k, bits), x in zip(work, inputs, strict=False)]
        for replay in range(50):
            for i, x in enumerate(inputs):
                x.copy_(_draw(x.numel(), x.dtype, device, 10_000 * replay + 10 * i + rank))
            graph.replay()
            between = _reduced(reduction, inputs[0], "all", 6, 128) if replay % 3 == 0 else None
            pairs = [(out, _expected(x, k, b, 128)) for out, x, (k, b) in zip(outs, inputs, work, strict=False)]
            if between is not None:
                pairs.append((between, _expected(inputs[0], "all", 6, 128)))
            wrong += [f"replay {replay}: {i}" for i, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
    return wrong


def test_calls_in_cuda_graphs() -> None:
    world = WORLDS[-1]
    assert run_distributed(_in_a_graph, world, backend="nccl", timeout=300.0) == [[]] * world


def _beside_computation(rank: int) -> list[str]:
    """Matrix products fill the GPU on another stream, on some ranks longer than on others."""
    device, wrong = torch.device("cuda", torch.cuda.current_device()), []
    reduction = peer_reduction("auto", dist.group.WORLD, device)
    assert reduction is not None
    side, work = torch.cuda.Stream(device), torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    for number in range(20):
        x = _draw(2**22, torch.bfloat16, device, 100 * number + rank)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(5 * (1 + (number + rank) % 3)):
                work = (work @ work).clamp(-1, 1)
        found = [reduction.all_reduce(x, bits=8, steps=2) for _ in range(5)]
        torch.cuda.current_stream(device).wait_stream(side)
        expected = all_reduce(x, dist.group.WORLD, bits=8)
        wrong += [f"call {number}" for f in found if not torch.equal(f, expected)]
    return wrong


def test_beside_computation() -> None:
    world = WORLDS[-1]
    assert run_distributed(_beside_computation, world, backend="nccl", timeout=300.0) == [[]] * world
