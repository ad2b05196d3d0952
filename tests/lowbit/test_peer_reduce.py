"""Reductions over peer memory: their kernels under Triton's interpreter, in one process step by step and in several
that map the same files and truly wait for each other; which transport a group gets."""

import itertools
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.lowbit.peer_reduce import peer_reduction
from megatron_longctx.lowbit.quantize import dequantize, quantize, requantize_sum, sum_quantized
from megatron_longctx.lowbit.quantized import all_reduce, formats, reduce_scatter
from megatron_longctx.lowbit.reduction import Reducer, ReductionPolicy
from megatron_longctx.testing.distributed import run_distributed
from tests.kernels.interpreter import hopper_code, run_forked, run_interpreted

BITS = (8, 6, 4, None)
FORMS = list(itertools.product(BITS, (32, 128), (False, True), (torch.bfloat16, torch.float16, torch.float32)))[::2]


def tensors(count: int, numel: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        outliers = torch.where(torch.rand(numel, generator=gen) < 0.02, 100.0, 1.0)
        found.append((torch.randn(numel, generator=gen) * outliers).to(dtype))
    return found


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To the bit; but the interpreter cuts bf16 off where GPUs round it."""
    rtol = 2**-7 if found.dtype == torch.bfloat16 else 0
    torch.testing.assert_close(found, expected, rtol=rtol, atol=0, equal_nan=True)


def in_rank_order(rows: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros_like(rows[0], dtype=torch.float32)
    for row in rows:
        total += row.float()
    return total.to(rows[0].dtype)


def compare_step_by_step() -> int:
    """Every format, number of ranks and ragged sizes, against the functions of `lowbit.quantize`."""
    from megatron_longctx.lowbit.peer_kernels import PUSH, SUM, UNPACK, one_step, two_step
    from megatron_longctx.lowbit.quantize import Wire
    from tests.comm.simulated_peers import one_process

    compared = 0
    for number, (bits, group_size, symmetric, dtype) in enumerate(FORMS):
        n, numel = (2, 3, 4)[number % 3], (5, 500, 1100, 4 * 128)[number % 4]
        forms = formats(dtype, bits or 8, group_size, symmetric)
        wires = tuple(Wire(form if bits else None, dtype.itemsize) for form in forms)
        group = wires[0].group_size
        xs, memories = tensors(n, numel, dtype, number), one_process(n, 2**16)
        if bits:
            xs[1][numel // 2] = torch.inf
        chunk = -(-numel // (n * group)) * group
        outs = [torch.empty_like(x) for x in xs]
        for phase, rank in itertools.product((PUSH, SUM, UNPACK), range(n)):
            two_step(memories[rank], xs[rank], outs[rank], wires, chunk=chunk, stride=chunk, phases=phase)
        expected = in_rank_order(xs)
        if bits:
            rows = [quantize(x, n, chunk, forms[0]) for x in xs]
            sums = [requantize_sum(torch.stack([row[r] for row in rows]), chunk, *forms) for r in range(n)]
            expected = dequantize(torch.stack(sums), chunk, forms[1], torch.empty_like(xs[0]))
        for out in outs:
            assert_close(out, expected)

        singles = [torch.empty_like(x) for x in xs]
        for phase, rank in itertools.product((PUSH, SUM), range(n)):
            one_step(memories[rank], xs[rank], singles[rank], wires[0], phase)
        expected = in_rank_order(xs)
        if bits:
            rows = [quantize(x, 1, numel, forms[0]) for x in xs]
            expected = sum_quantized(torch.cat(rows), numel, forms[0], torch.empty_like(xs[0]))
        for out in singles:
            assert_close(out, expected)
        assert [memory.state.tolist() for memory in memories] == [[2, 0]] * n
        compared += 1
    return compared


def _calls_in_any_order(rank: int, folder: Path, world: int) -> list[str]:
    """Many calls of all kinds, which ranks enter at different times, each beside the collectives' result."""
    from megatron_longctx.lowbit.peer_reduce import PeerReduction
    from tests.comm.simulated_peers import mapped

    group, wrong = dist.group.WORLD, []
    reduction = PeerReduction(mapped(folder, rank, world, 2**13))
    dist.barrier()
    same, own = random.Random(0), random.Random(rank + 1)
    for number in range(14):
        bits, group_size = same.choice(BITS), same.choice((32, 64, 128))
        numel = same.choice((1, 100, 1500, 4000, 9000))  # the largest take several pieces
        dtype, kind = same.choice((torch.float16, torch.float32)), same.choice(("all", "all", "one", "scatter"))
        every = tensors(world, numel * (world if kind == "scatter" else 1), dtype, number)
        x = every[rank].clone()
        time.sleep(own.random() * 0.05)
        if kind == "scatter":
            found = reduction.reduce_scatter(x, bits=bits, group_size=group_size)
            expected = in_rank_order(every).chunk(world)[rank]
            if bits:
                expected = reduce_scatter(x, group, bits=bits, group_size=group_size)
        elif kind == "all":
            expected = all_reduce(x, group, bits=bits, group_size=group_size) if bits else in_rank_order(every)
            found = reduction.all_reduce(x, bits=bits, group_size=group_size, steps=2, out=x if number % 2 else None)
        else:
            numel = min(numel, 1500 // (1 if bits else dtype.itemsize // 2))
            every, x = [e[:numel] for e in every], x[:numel]
            found, expected = reduction.all_reduce(x, bits=bits, group_size=group_size), in_rank_order(every)
            if bits:
                form, _ = formats(dtype, bits, group_size)
                packed = torch.cat([quantize(e, 1, numel, form) for e in every])
                expected = sum_quantized(packed, numel, form, torch.empty_like(x))
        if not torch.equal(found, expected):
            wrong.append(f"call {number}: {kind} of {numel} in {bits} bits, {dtype}")
    return wrong


def compare_between_processes() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_forked(_calls_in_any_order, 3, Path(folder), 3) == [[]] * 3


@pytest.mark.parametrize("what", ["compare_step_by_step", "compare_between_processes"])
def test_kernels_under_the_interpreter(what):
    run_interpreted("-m", "tests.lowbit.test_peer_reduce", what)


@pytest.mark.parametrize(("bits", "short", "scatter"), [(8, True, False), (4, False, True), (0, False, False)])
def test_kernels_compile_for_hopper(bits, short, scatter):
    """Triton's interpreter takes more than its compiler does; what orders memory has to be in the code."""
    pytest.importorskip("triton")
    from megatron_longctx.lowbit import peer_kernels

    constants = {"BITS": bits, "TO_BITS": bits, "SYMMETRIC": False, "SHORT": short, "HALF": 64, "ROWS": 32}
    constants |= {"SUM_ROWS": 4, "WORLD": 3, "LANES": 4, "MOST": 128, "SCATTER": scatter, "PHASES": 7}
    pointers = {"x": "*bf16", "out": "*bf16", "data": "*i64", "flags": "*i64", "state": "*i64"}
    for kernel, waits in ((peer_kernels._two_step_kernel, 1 if scatter else 2), (peer_kernels._one_step_kernel, 1)):
        code = hopper_code(kernel, constants, pointers)
        assert code.count("atom.global.sys.release.exch.b64") == waits
        assert code.count("atom.global.sys.acquire.add.u64") == waits


def _on_cpus(rank: int) -> list[str]:
    """Over gloo there is no peer memory: `auto` takes collectives, and who asks for peers is told why not."""
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
    found = Reducer(group, ReductionPolicy("int4", min_kib=0)).all_reduce(x)
    if not torch.equal(found, all_reduce(x, group, bits=4)):
        wrong.append("auto over gloo differs from the collectives")
    return wrong


def test_which_transport_a_group_gets() -> None:
    assert run_distributed(_on_cpus, 2) == [[], []]


def test_transports_that_are_not_offered() -> None:
    with pytest.raises(ValueError, match=r"reduction.transport=nccl: expected one of auto, peer, collective"):
        ReductionPolicy(transport="nccl")


if __name__ == "__main__":
    logging.basicConfig()
    if sys.argv[1] == "compare_step_by_step":
        assert compare_step_by_step() == len(FORMS) == 24
    else:
        compare_between_processes()
