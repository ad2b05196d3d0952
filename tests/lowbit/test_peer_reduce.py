"""Reductions over peer memory: kernels in Triton's interpreter, in one process phase by phase and in several processes
that map the same files and wait for each other; the choice of a transport; and the same bits as collectives on GPUs."""

import itertools
import logging
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.core.comm import all_gather_rows
from megatron_longctx.lowbit import quantized
from megatron_longctx.lowbit.peer_memory import allocate_peer_memory
from megatron_longctx.lowbit.quantize import RawFormat, dequantize, quantize, requantize_sum, sum_quantized
from megatron_longctx.lowbit.quantized import PeerReduction, all_reduce, formats, peer_reduction, reduce_scatter
from megatron_longctx.lowbit.reduction import Reducer, ReductionPolicy
from megatron_longctx.testing.distributed import run_distributed
from tests.core.kernels.interpreter import hopper_code, run_forked, run_interpreted

BITS = (8, 6, 4, None)
FORMS = list(itertools.product(BITS, (32, 128), (False, True), (torch.bfloat16, torch.float16, torch.float32)))[::5]


def tensors(count: int, numel: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    result = []
    for _ in range(count):
        outliers = torch.where(torch.rand(numel, generator=gen) < 0.02, 100.0, 1.0)
        result.append((torch.randn(numel, generator=gen) * outliers).to(dtype))
    return result


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare all bits, except that the interpreter truncates bf16, which GPUs round."""
    rtol = 2**-7 if actual.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0, equal_nan=True)


def force_steps(steps: int) -> None:
    """Use one step whenever the memory has room, or always two."""
    quantized._EXTRA_ONE_STEP_BYTES = 2**60 if steps == 1 else -1


def in_rank_order(rows: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(rows[0], dtype=torch.float32)
    for row in rows:
        total += row.float()
    return total.to(rows[0].dtype)


def compare_step_by_step() -> int:
    """Compare formats, numbers of ranks and odd sizes with the functions of `lowbit.quantize`."""
    from megatron_longctx.lowbit.peer_kernels import PUSH, SUM, UNPACK, one_step, two_step
    from tests.core.comm.simulated_peers import one_process

    compared = 0
    for number, (bits, group_size, symmetric, dtype) in enumerate(FORMS):
        n, numel = (2, 3, 4)[number % 3], (5, 500, 1100, 4 * 128)[number % 4]
        forms = formats(dtype, bits or 8, group_size, symmetric)
        sent = forms if bits else (RawFormat(dtype.itemsize), RawFormat(dtype.itemsize))
        group = sent[0].group_size
        xs, memories = tensors(n, numel, dtype, number), one_process(n, 2**16)
        if bits:
            xs[1][numel // 2] = torch.inf
        chunk = -(-numel // (n * group)) * group
        outs = [torch.empty_like(x) for x in xs]
        for phase, rank in itertools.product((PUSH, SUM, UNPACK), range(n)):
            two_step(memories[rank], xs[rank], outs[rank], sent, chunk=chunk, stride=chunk, phases=phase)
        expected = in_rank_order(xs)
        if bits:
            rows = [quantize(x, n, chunk, forms[0]) for x in xs]
            sums = [requantize_sum(torch.stack([row[r] for row in rows]), chunk, *forms) for r in range(n)]
            expected = dequantize(torch.stack(sums), chunk, forms[1], torch.empty_like(xs[0]))
        for out in outs:
            assert_close(out, expected)

        singles = [torch.empty_like(x) for x in xs]
        for phase, rank in itertools.product((PUSH, SUM), range(n)):
            one_step(memories[rank], xs[rank], singles[rank], sent[0], phase)
        expected = in_rank_order(xs)
        if bits:
            rows = [quantize(x, 1, numel, forms[0]) for x in xs]
            expected = sum_quantized(torch.cat(rows), numel, forms[0], torch.empty_like(xs[0]))
        for out in singles:
            assert_close(out, expected)
        if not bits:
            width = numel // 4 if numel % 4 == 0 else numel
            sides = [x.new_empty(n * numel) for x in xs]
            for phase, rank in itertools.product((PUSH, SUM), range(n)):
                one_step(memories[rank], xs[rank], sides[rank], sent[0], phase, width)
            side_by_side = torch.stack([x.view(-1, width) for x in xs], 1).flatten()
            for out in sides:
                assert torch.equal(out, side_by_side)
        assert [memory.state.tolist() for memory in memories] == [[3 - bool(bits), 0]] * n
        compared += 1
    return compared


def added_and_normed(rows: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float):  # type: ignore[no-untyped-def]
    """Return the residual with the sum of all ranks' rows, rounded as separate operations round, and its RMSNorm."""
    hidden = (in_rank_order(rows).float() + residual.float()).to(residual.dtype)
    wide = hidden.double()
    return hidden, (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).to(hidden.dtype)


def compare_sums_with_norms() -> int:
    from megatron_longctx.lowbit.sum_norm_triton import PUSH, SUM, sum_norm
    from tests.core.comm.simulated_peers import one_process

    cases = list(itertools.product((1, 2, 3), ((1, 96), (4, 33), (7, 160)), (torch.float32, torch.float16)))
    for number, (n, shape, dtype) in enumerate(cases):
        xs, memories = [x.view(shape) for x in tensors(n, shape[0] * shape[1], dtype, number)], one_process(n, 2**14)
        residual, weight = tensors(1, xs[0].numel(), dtype, 99)[0].view(shape), tensors(1, shape[1], dtype, 98)[0]
        for call in range(2):  # both halves of the memory
            outs = [x.clone() for x in xs]
            for phase, rank in itertools.product((PUSH, SUM), range(n)):
                if n > 1 or phase == SUM:
                    memory = memories[rank] if n > 1 else None
                    normed = sum_norm(memory, outs[rank], residual, weight, 1e-3, phase)
                    if phase == SUM:
                        hidden, expected = added_and_normed(xs, residual, weight, 1e-3)
                        assert torch.equal(outs[rank], hidden), (n, shape, call)
                        torch.testing.assert_close(normed, expected)
            assert n == 1 or [m.state.tolist() for m in memories] == [[call + 1, 0]] * n
    return len(cases)


def compare_gathers() -> int:
    """Rows that groups of 128 elements divide, and rows that they do not."""
    from megatron_longctx.lowbit.peer_kernels import PUSH, SUM, one_step
    from tests.core.comm.simulated_peers import one_process

    cases = list(itertools.product((2, 3), ((1, 128), (5, 384), (5, 200), (3, 64))))
    for number, (n, (rows, width)) in enumerate(cases):
        xs, memories = tensors(n, rows * width, torch.float32, number), one_process(n, 2**16)
        found = [x.new_empty(n * x.numel()) for x in xs]
        for phase, rank in itertools.product((PUSH, SUM), range(n)):
            one_step(memories[rank], xs[rank], found[rank], RawFormat(4), phase, width)
        expected = torch.stack([x.view(rows, width) for x in xs], 1).flatten()
        assert all(torch.equal(each, expected) for each in found), (n, rows, width)
    return len(cases)


def _calls_in_any_order(rank: int, folder: Path, world: int) -> list[str]:
    """Make many calls of all kinds, which ranks enter at different times, and compare them with collectives."""
    from tests.core.comm.simulated_peers import mapped

    group, wrong = dist.group.WORLD, []
    reduction = PeerReduction(mapped(folder, rank, world, 2**13))
    dist.barrier()
    same, own = random.Random(0), random.Random(rank + 1)
    for number in range(10):
        bits, group_size = same.choice(BITS), same.choice((32, 64, 128))
        numel = same.choice((1, 100, 1500, 4000, 9000))  # the largest take several pieces
        dtype, kind = same.choice((torch.float16, torch.float32)), same.choice(("all", "all", "one", "scatter"))
        every = tensors(world, numel * (world if kind == "scatter" else 1), dtype, number)
        x = every[rank].clone()
        time.sleep(own.random() * 0.05)
        if kind == "scatter":
            actual = reduce_scatter(x, group, bits=bits, group_size=group_size, peers=reduction)
            expected = in_rank_order(every).chunk(world)[rank]
            if bits:
                expected = reduce_scatter(x, group, bits=bits, group_size=group_size)
        elif kind == "all":
            expected = all_reduce(x, group, bits=bits, group_size=group_size) if bits else in_rank_order(every)
            force_steps(2)
            out = x if number % 2 else None
            actual = all_reduce(x, group, bits=bits, group_size=group_size, out=out, peers=reduction)
        else:
            numel = min(numel, 1500 // (1 if bits else dtype.itemsize // 2))
            every, x = [e[:numel] for e in every], x[:numel]
            force_steps(1)
            actual = all_reduce(x, group, bits=bits, group_size=group_size, peers=reduction)
            expected = in_rank_order(every)
            if bits:
                form, _ = formats(dtype, bits, group_size)
                packed = torch.cat([quantize(e, 1, numel, form) for e in every])
                expected = sum_quantized(packed, numel, form, torch.empty_like(x))
        if not torch.equal(actual, expected):
            wrong.append(f"call {number}: {kind} of {numel} in {bits} bits, {dtype}")
    return wrong


def compare_between_processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_forked(_calls_in_any_order, 3, Path(folder), 3) == [[]] * 3


def test_kernels_in_the_interpreter():
    run_interpreted(__name__)


@pytest.mark.parametrize(("bits", "short", "scatter"), [(8, True, False), (4, False, True), (0, False, False)])
def test_kernels_compile_for_hopper(bits, short, scatter):
    """Triton's interpreter accepts more than its compiler, and the code must contain what orders memory."""
    pytest.importorskip("triton")
    from megatron_longctx.lowbit import peer_kernels, sum_norm_triton

    constants = {"BITS": bits, "TO_BITS": bits, "SYMMETRIC": False, "SHORT": short, "HALF": 64, "ROWS": 32}
    constants |= {"SUM_ROWS": 4, "WORLD": 3, "LANES": 4, "MAX": 128, "SCATTER": scatter, "GATHER": False, "PHASES": 7}
    pointers = {"x": "*bf16", "out": "*bf16", "data": "*i64", "flags": "*i64", "state": "*i64"}
    pointers |= {"residual": "*bf16", "weight": "*bf16", "normed": "*bf16", "eps": "fp32", "half_bytes": "i64"}
    constants["COLS"] = 4096
    kernels = (peer_kernels._two_step_kernel, peer_kernels._one_step_kernel, sum_norm_triton._sum_norm_kernel)
    for kernel, waits in zip(kernels, (1 if scatter else 2, 1, 1), strict=True):
        code = hopper_code(kernel, constants, pointers)
        assert code.count("atom.global.sys.release.exch.b64") == waits
        assert code.count("atom.global.sys.acquire.add.u64") == waits


def _on_cpus(rank: int) -> list[str]:
    """Over gloo there is no peer memory: `auto` uses collectives, and `peer` is refused."""
    group, cpu, wrong = dist.group.WORLD, torch.device("cpu"), []
    if any(peer_reduction(name, group, cpu) is not None for name in ("auto", "collective")):
        wrong.append("peer memory on CPUs")
    for make in (
        lambda: peer_reduction("peer", group, cpu),
        lambda: Reducer(group, ReductionPolicy("int8", min_kib=0, transport="peer")).all_reduce(torch.ones(64)),
    ):
        try:
            make()
            wrong.append("not refused")
        except ValueError as error:
            if "not all ranks have a CUDA device" not in str(error):
                wrong.append(str(error))
    x = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    if not torch.equal(Reducer(group, ReductionPolicy("int4", min_kib=0)).all_reduce(x), all_reduce(x, group, bits=4)):
        wrong.append("auto over gloo differs from the collectives")
    return wrong


def test_the_transport_of_a_group_on_cpus() -> None:
    assert run_distributed(_on_cpus, 2) == [[], []]


def test_unknown_transports_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reduction.transport=nccl: expected one of auto, peer, collective"):
        ReductionPolicy(transport="nccl")


CALLS = 200
# Few enough to compile in a minute instead of ten; the tests in the interpreter cover all variants.
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
MAX_WORLD = max(2, max_gpu_ranks())


def _draw(numel: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    gen = torch.Generator(device).manual_seed(seed)
    x = torch.randn(numel, generator=gen, device=device)
    return (x * torch.where(torch.rand(numel, generator=gen, device=device) < 0.02, 100.0, 1.0)).to(dtype)


def _expected(x: torch.Tensor, kind: str, bits: int | None, group_size: int) -> torch.Tensor:
    """Reduce with collectives and the kernels that only quantize."""
    group, n, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    if bits is None:
        total = in_rank_order(all_gather_rows(group, x))
        return total.chunk(n)[rank] if kind == "scatter" else total
    if kind == "scatter":
        return reduce_scatter(x, group, bits=bits, group_size=group_size)
    if kind == "all":
        return all_reduce(x, group, bits=bits, group_size=group_size)
    form, _ = formats(x.dtype, bits, group_size)
    rows = all_gather_rows(group, quantize(x, 1, x.numel(), form)[0])
    return sum_quantized(rows, x.numel(), form, torch.empty_like(x))


def _reduced(reduction: PeerReduction, x: torch.Tensor, kind: str, bits: int | None, group_size: int) -> torch.Tensor:
    if kind == "scatter":
        return reduce_scatter(x, dist.group.WORLD, bits=bits, group_size=group_size, peers=reduction)
    force_steps(1 if kind == "one" else 2)
    return all_reduce(x, dist.group.WORLD, bits=bits, group_size=group_size, peers=reduction)


def _same_bits(rank: int, half_bytes: int) -> list[str]:
    device, wrong = torch.device("cuda", torch.cuda.current_device()), []
    n = dist.get_world_size()
    reduction = PeerReduction(allocate_peer_memory(dist.group.WORLD, device, half_bytes, ""))
    same, calls = random.Random(0), []
    for number in range(CALLS):
        kind, bits, group_size, dtype = same.choice(VARIANTS)
        numel = same.choice((1, 77, 4096, 65_536, 300_001, 2**21, 5_000_000))
        if kind == "one":
            numel = min(numel, half_bytes // n // (dtype.itemsize + 1))
        x = _draw(numel * (n if kind == "scatter" else 1), dtype, device, 1000 * number + rank)
        if number % 7 == rank % 7:  # a different rank is late each time
            torch.cuda._sleep(2_000_000)
        name = f"rank {rank}, call {number}: {kind} of {numel} {dtype} in {bits} bits"
        calls.append((name, x, _reduced(reduction, x, kind, bits, group_size), (kind, bits, group_size)))
        if len(calls) == 10:  # compare later, so that many calls follow each other
            wrong += [name for name, x, actual, case in calls if not torch.equal(actual, _expected(x, *case))]
            calls = []
    return wrong


@pytest.mark.gpu(2)
@pytest.mark.parametrize(("world", "half_bytes"), [(2, 2**20), (MAX_WORLD, 64 * 2**20)])
def test_calls_of_all_kinds_have_the_bits_of_collectives(world: int, half_bytes: int) -> None:
    assert run_distributed(_same_bits, world, half_bytes, backend="nccl", timeout=300.0) == [[]] * world


def _with_norms(rank: int) -> list[str]:
    """Sums with norms between other calls, alone and over ranks; sums of many rows take two steps, or another way."""
    device, wrong = torch.device("cuda", torch.cuda.current_device()), []
    reduction = peer_reduction("peer", dist.group.WORLD, device)
    assert reduction is not None
    for number, (rows, width) in enumerate(itertools.product((1, 2, 32, 120), (64, 4096, 5120, 16384))):
        x, residual = (_draw(rows * width, torch.bfloat16, device, 10 * number + seed) for seed in (rank, 7))
        x, residual, weight = x.view(rows, width), residual.view(rows, width), _draw(width, x.dtype, device, 3)
        if number % 3 == rank % 3:
            torch.cuda._sleep(2_000_000)
        for over_ranks in (True, False):
            rows_of_all = all_gather_rows(dist.group.WORLD, x.flatten()).view(-1, rows, width)
            every = list(rows_of_all) if over_ranks else [x]
            hidden, expected = added_and_normed(every, residual, weight, 1e-5)
            out = x.clone()
            normed = (reduction.sum_norm if over_ranks else quantized.add_norm)(out, residual, weight, 1e-5)
            if normed is None:
                wrong += [f"{rows} of {width}: {over_ranks}"] if not over_ranks or len(every) == 2 else []
            elif not torch.equal(out, hidden) or (normed - expected).abs().gt(2**-6 * expected.abs()).any():
                wrong.append(f"{rows} of {width} over ranks {over_ranks}: {(normed - expected).abs().max()}")
            every_sum = all_reduce(x, dist.group.WORLD, bits=None, peers=reduction)
            wrong += [] if not over_ranks or torch.equal(every_sum, in_rank_order(every)) else ["a sum between"]
    return wrong


def _in_a_graph(rank: int) -> list[str]:
    """Replay two calls, which use both halves of the memory, and three with new data, and make eager calls between."""
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
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries events meanwhile
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


def _beside_computation(rank: int) -> list[str]:
    """Matrix products occupy the GPU on another stream, on some ranks longer than on others."""
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
        force_steps(2)
        results = [all_reduce(x, dist.group.WORLD, bits=8, peers=reduction) for _ in range(5)]
        torch.cuda.current_stream(device).wait_stream(side)
        expected = all_reduce(x, dist.group.WORLD, bits=8)
        wrong += [f"call {number}" for result in results if not torch.equal(result, expected)]
    return wrong


@pytest.mark.gpu(2)
@pytest.mark.parametrize("calls", [_in_a_graph, _beside_computation, _with_norms])
def test_calls_in_cuda_graphs_and_beside_computation(calls) -> None:
    assert run_distributed(calls, MAX_WORLD, backend="nccl", timeout=300.0) == [[]] * MAX_WORLD


if __name__ == "__main__":
    logging.basicConfig()
    assert compare_step_by_step() == len(FORMS) == 10
    assert compare_sums_with_norms() == 18
    assert compare_gathers() == 8
    compare_between_processes()
