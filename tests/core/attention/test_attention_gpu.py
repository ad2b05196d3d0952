"""Sharded attention on GPUs: as exact as one GPU's kernel, and with buffers that are safe to reuse.

One set of processes for each number of GPUs runs all its cases. Messages use NCCL or peer memory.
"""

import functools
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.attention.execute import Runtime
from megatron_longctx.core.attention.function import AttentionFunction, Passes, shapes_of
from megatron_longctx.core.comm import BufferPool, P2PTransport
from megatron_longctx.core.kernels import PROVIDERS, KernelRequest, choose_kernel
from megatron_longctx.core.layout import Layout
from megatron_longctx.core.plans import MODES, Mask, Target
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, random_qkv, shard, visible
from megatron_longctx.testing.tolerances import assert_as_good_as
from tests.shared.plans import helper_plan

pytestmark = pytest.mark.gpu

HEADS = {"GQA": (32, 8), "MHA": (32, 32)}  # for any number of GPUs up to 8 that divides them
HEAD_DIM = 128
LENGTH = 4096
ITERATIONS = 50


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    causal: bool
    heads: str
    window: tuple[int | None, int | None] = (None, None)

    @property
    def mask(self) -> Mask:
        return documents(self.lengths, causal=self.causal, window=self.window)

    def is_refused(self, kernel: str) -> bool:
        """Whether a kernel does not support it."""
        request = KernelRequest(
            "cuda", torch.bfloat16, HEAD_DIM, *HEADS[self.heads], windows=self.mask.has_windows,
            packed=len(self.lengths) > 1,
        )  # fmt: skip
        return PROVIDERS[kernel]().why_not(request) is not None

    def tensors(self, device: torch.device, seed: int = 0) -> tuple[Tensor, ...]:
        return random_qkv(self.mask.length, 1, *HEADS[self.heads], HEAD_DIM, torch.bfloat16, str(device), seed)


CASES = (
    Case((LENGTH,), True, "GQA"),
    Case((LENGTH,), True, "MHA"),
    Case((LENGTH + 3,), True, "GQA"),
    Case((LENGTH,), False, "GQA"),
    Case((1000, 7, 2000, LENGTH - 3007), True, "GQA"),
    Case((1000, 7, 2000, LENGTH - 3007), True, "GQA", window=(300, None)),
)


def request(heads: str, device: str = "cuda") -> KernelRequest:
    return KernelRequest(device, torch.bfloat16, HEAD_DIM, *HEADS[heads])


def forward_backward(call: Any, leaves: list[Tensor], grad_out: Tensor) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = call(*leaves)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def compare(
    found: dict[str, Tensor], whole: list[dict[str, Tensor]], layout: Layout, rank: int, name: str
) -> list[str]:
    own, truth = ({key: shard(x, layout, rank) for key, x in each.items()} for each in whole)
    try:
        assert_as_good_as(found, own, truth, name)
    except AssertionError as error:
        return [f"rank {rank}: {error}"]
    return []


def _every_case(rank: int, n: int, kernels: list[str], transport: str, device_type: str = "cuda") -> list[str]:
    """Return error messages. Every rank computes the references itself, from the same seeds."""
    device = (
        torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    )
    wrong = []
    attentions = {
        (schedule, kernel): ContextParallelAttention(
            dist.group.WORLD, schedule=schedule, kernel=kernel, transport=transport
        )
        for schedule, kernel in product(MODES, kernels)
    }
    for case in CASES:
        tensors = case.tensors(device)
        seen = visible(case.lengths, causal=case.causal, window=case.window)
        truth = dense_attention(*tensors, seen=seen)
        for kernel in kernels:
            if case.is_refused(kernel):
                continue
            alone = functools.partial(ContextParallelAttention(kernel=kernel), mask=case.mask)
            whole = [forward_backward(alone, list(tensors[:3]), tensors[3]), truth]
            for schedule in MODES:
                attention = attentions[schedule, kernel]
                layout = attention.layout(case.mask)
                *leaves, grad_out = (shard(x, layout, rank) for x in tensors)
                found = forward_backward(functools.partial(attention, mask=case.mask), leaves, grad_out)
                wrong += compare(found, whole, layout, rank, f"{schedule}, {kernel}, {case}")
            if n == 2 and case.causal and len(case.lengths) == 1:
                wrong += _helper(rank, kernel, case, whole, device)
    for schedule in MODES:
        wrong += _many_iterations(rank, attentions[schedule, kernels[0]], schedule, device)
    return wrong


def _helper(rank: int, kernel: str, case: Case, whole: list[dict[str, Tensor]], device: torch.device) -> list[str]:
    """Run a plan that also sends queries, their gradients and partial results."""
    plan, group = helper_plan(2, case.mask.length), dist.group.WORLD
    assert group is not None
    runtime = Runtime(
        choose_kernel(kernel, request(case.heads, device.type)), P2PTransport(group, device), BufferPool(device)
    )
    *leaves, grad_out = (shard(x, plan.queries, rank) for x in case.tensors(device))
    shapes = shapes_of(*leaves)
    passes = Passes(plan, Target(shapes.workload, runtime.kernel.takes), rank, shapes, runtime)
    strided = grad_out.transpose(0, 2).contiguous().transpose(0, 2)  # has to be copied before it is sent
    wrong = []
    for _ in range(3):
        found = forward_backward(
            lambda q, k, v: AttentionFunction.apply(q, k, v, None, passes, HEAD_DIM**-0.5), leaves, strided
        )
        wrong += compare(found, whole, plan.queries, rank, f"helper, {kernel}, {case}")
    return wrong


def _many_iterations(rank: int, attention: ContextParallelAttention, schedule: str, device: torch.device) -> list[str]:
    """Run two layers with different data many times, without the host waiting for the device.

    If a block is written to a buffer too early, or read too late, one layer gets the other's data.
    """
    case = CASES[0]
    layout = attention.layout(case.mask)
    layers = [[shard(x, layout, rank) for x in case.tensors(device, seed)] for seed in (1, 2)]
    first: list[dict[str, Tensor]] = []
    worst = torch.zeros(2, 4, device=device)
    held: list[tuple[list[int], int]] = []
    for iteration in range(ITERATIONS):
        leaves = [[x.detach().requires_grad_() for x in layer[:3]] for layer in layers]
        outs = [attention(*three, mask=case.mask) for three in leaves]
        results = []
        for three, out, layer in reversed(list(zip(leaves, outs, layers, strict=True))):
            dq, dk, dv = torch.autograd.grad(out, three, layer[3])
            results.insert(0, {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv})
        del leaves, outs, out, dq, dk, dv
        first = first or results
        for i, (now, before) in enumerate(zip(results, first, strict=True)):
            for j, name in enumerate(before):
                size = before[name].float().norm().clamp_min(1e-6)
                worst[i, j] = torch.maximum(worst[i, j], (now[name] - before[name]).float().norm() / size)
        del results, now, size
        if 5 <= iteration < 10 or iteration >= ITERATIONS - 5:
            pools = [state.pool.num_bytes for state in attention._devices.values()]
            held.append((pools, torch.cuda.memory_allocated(device) if device.type == "cuda" else 0))
    # Autograd's thread frees tensors a little later than it returns, so that single samples differ, and on a busy
    # machine all of the last ones. So take one more sample when the device is idle.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        held.append((held[-1][0], torch.cuda.memory_allocated(device)))
    early, late = held[:5], held[5:]
    grew = early[0][0] != late[-1][0] or min(size for _, size in late) > min(size for _, size in early) + 2**20
    wrong = [f"rank {rank}, {schedule}: memory grew from {early} to {late}"] if grew else []
    # A kernel may add gradients in another order every time: that is rounding, not other data.
    if worst[:, 0].max() > 0 or worst.max() > 5e-3:
        wrong.append(f"rank {rank}, {schedule}: iterations differ by {worst.tolist()}")
    return wrong


@pytest.mark.parametrize("transport", ["p2p", "peer"])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_as_good_as_one_gpu_and_the_same_every_time(n, transport):
    if max_gpu_ranks() < n:
        pytest.skip(f"needs {n} CUDA devices, found {max_gpu_ranks()}")
    reasons = {name: PROVIDERS[name]().why_not(request("GQA")) for name in ("cudnn", "flash")}
    kernels = [name for name, reason in reasons.items() if reason is None]
    if not kernels:
        pytest.skip(f"no kernel: {reasons}")
    wrong = [
        line
        for lines in run_distributed(_every_case, n, n, kernels, transport, backend="nccl", timeout=240)
        for line in lines
    ]
    assert not wrong, "\n".join(wrong)


STEPS = 1000


def _a_thousand_steps(rank: int) -> list[str]:
    """Alternate between lengths; deterministic, so that equal inputs give equal bits."""
    device = torch.device("cuda", torch.cuda.current_device())
    wrong = []
    cases = (CASES[0], Case((8 * LENGTH,), True, "GQA"))
    for schedule in ("all_gather", "zigzag", "ulysses"):
        attention = ContextParallelAttention(dist.group.WORLD, schedule=schedule, deterministic=True)
        tensors = {case: [shard(x, attention.layout(case.mask), rank) for x in case.tensors(device)] for case in cases}
        first: dict[Case, dict[str, Tensor]] = {}
        held, differ = [], torch.zeros((), dtype=torch.bool, device=device)
        steps = STEPS if schedule == "all_gather" else STEPS // 16
        for step in range(steps):
            case = cases[step % 10 == 9]
            *leaves, grad_out = tensors[case]
            call = functools.partial(attention, mask=case.mask)
            found = forward_backward(call, leaves, grad_out)
            for key, before in first.setdefault(case, found).items():
                differ |= (found[key] != before).any()
            del found, before
            if step % 10 == 9:
                torch.cuda.synchronize()
                stats = torch.cuda.memory_stats(device)
                held.append((stats["active_bytes.all.current"], stats["reserved_bytes.all.current"]))
        held = held[len(held) // 4 :]
        if held and min(held[-5:]) > min(held[:5]):
            wrong.append(f"rank {rank}, {schedule}: memory went from {held[:5]} to {held[-5:]}")
        if differ.item():
            wrong.append(f"rank {rank}, {schedule}: steps differ")
    return wrong


@pytest.mark.gpu(2)
def test_a_thousand_deterministic_steps_are_equal_and_hold_no_more_memory() -> None:
    n = min(4, max_gpu_ranks())
    wrong = [line for lines in run_distributed(_a_thousand_steps, n, backend="nccl", timeout=240) for line in lines]
    assert not wrong, "\n".join(wrong)


def _kept(rank: int, transport: str) -> list[str]:
    """Compare calls of three layers in flight that keep received blocks with calls that fetch them again."""
    device = torch.device("cuda", torch.cuda.current_device())
    wrong = []
    for schedule in ("ulysses", "usp", "all_gather", "zigzag"):
        keeping, fetching = (
            ContextParallelAttention(
                dist.group.WORLD,
                schedule=schedule,
                transport=transport,
                keep_received=keep,
                kernel="flash",  # which prepares nothing per shape, of which there are many
            )
            for keep in (True, False)
        )
        for case in (Case((LENGTH + 3,), True, "GQA"), Case((LENGTH,), False, "MHA"), Case((8 * LENGTH,), True, "GQA")):
            layout = keeping.layout(case.mask)
            layers = [[shard(x, layout, rank) for x in case.tensors(device, seed)] for seed in range(3)]
            call = functools.partial(fetching, mask=case.mask)
            expected = [forward_backward(call, layer[:3], layer[3]) for layer in layers]
            for iteration in range(4):  # in both memories that peers read
                calls = []
                for layer in layers:
                    leaves = [x.detach().requires_grad_() for x in layer[:3]]
                    calls.append((leaves, keeping(*leaves, mask=case.mask)))
                for i in (0, 1, 2) if iteration % 2 else (2, 1, 0):
                    leaves, out = calls[i]
                    grads = torch.autograd.grad(out, leaves, layers[i][3])
                    for name, value in zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True):
                        before = expected[i][name].float()
                        error = float((value.float() - before).norm() / before.norm().clamp_min(1e-6))
                        # A kernel may add gradients in another order every time.
                        if not error <= (0 if name == "out" else 5e-3):
                            wrong.append(
                                f"rank {rank}, {schedule}, {case}, layer {i} of {iteration}: {name} {error:.1e}"
                            )
    return wrong


@pytest.mark.parametrize("transport", ["p2p", "peer"])
@pytest.mark.parametrize("n", [2, 4])
def test_kept_blocks_equal_fetched_ones(n, transport):
    if max_gpu_ranks() < n:
        pytest.skip(f"needs {n} CUDA devices, found {max_gpu_ranks()}")
    wrong = [line for lines in run_distributed(_kept, n, transport, backend="nccl", timeout=240) for line in lines]
    assert not wrong, "\n".join(wrong)
