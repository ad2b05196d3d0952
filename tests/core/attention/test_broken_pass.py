"""A pass that fails leaves messages unsent, so the next one is refused; after a lack of memory everywhere it runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.attention.execute import Runtime
from megatron_longctx.core.comm import BufferPool, PeerMemoryError, PeerTransport, p2p
from megatron_longctx.core.comm.collectives import not_owned
from megatron_longctx.core.kernels.providers.reference import ReferenceKernel
from megatron_longctx.testing.distributed import run_distributed

CPU = torch.device("cpu")


def _transport() -> Any:
    peers = PeerTransport.__new__(PeerTransport)
    peers._group, peers.generation = not_owned(dist.group.WORLD), 1  # type: ignore[arg-type]
    peers.rank, peers.world, peers.device = dist.get_rank(), dist.get_world_size(), CPU
    peers._capacity, peers._steps = 2**20, 64
    return peers


def _calls(rank: int) -> list[str]:
    attention = ContextParallelAttention(dist.group.WORLD, schedule="ring", kernel="reference")
    attention._devices[CPU] = Runtime(ReferenceKernel(), _transport(), BufferPool(CPU))
    q = torch.zeros(4, 1, 2, 8)
    errors = []
    for _ in range(2):
        try:
            attention(q, q, q, mask=8)  # its transport has no memory: views of it fail
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_the_pass_after_a_failed_one_is_refused() -> None:
    for first, second in run_distributed(_calls, 2):
        assert first.startswith("AttributeError")
        assert second.startswith(PeerMemoryError.__name__) and "broken off before (AttributeError" in second
        assert "Start the job again, training from its checkpoint." in second


left = 10**9
"""The calls of the kernel until it runs out of memory."""


def _limit_calls() -> None:
    def limited(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            global left
            left -= 1
            if left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory.\nand more")
            return run(*args)

        return wrapped

    for name in ("_forward", "_backward"):
        setattr(ReferenceKernel, name, limited(getattr(ReferenceKernel, name)))


def _gradients(attention: ContextParallelAttention, length: int) -> list[torch.Tensor]:
    """Return the output and the gradients of this rank for the same inputs on any number of ranks."""
    generator = torch.Generator().manual_seed(length)
    whole = [torch.randn(length, 1, 2, 8, generator=generator, dtype=torch.float64) for _ in range(4)]
    *qkv, grad = (attention.shard(x, length) for x in whole)
    leaves = [x.requires_grad_() for x in qkv]
    out = attention(*leaves, mask=length)
    return [out, *torch.autograd.grad(out, leaves, grad)]


def _failed(attention: ContextParallelAttention, calls: int) -> str:
    """Let the kernel fail after some calls, and return the error."""
    global left
    left = calls
    try:
        return f"no error: {len(_gradients(attention, 96))}"
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        left = 10**9


def _all_out_of_memory(rank: int, schedule: str) -> tuple[list[str], float]:
    _limit_calls()
    attention = ContextParallelAttention(dist.group.WORLD, schedule=schedule, kernel="reference")
    _gradients(attention, 96)
    (passes,) = attention._bound.values()
    first, calls = min(rank, 1), len(passes.forward.recording.calls)
    # In forward and in backward, at other calls on other ranks; then a shorter sequence.
    errors = [_failed(attention, number) for number in (first, 0, calls + first, calls)]
    expected, most = _gradients(ContextParallelAttention(kernel="reference"), 48), 0.0
    for found, x in zip(_gradients(attention, 48), expected, strict=True):
        most = max(most, float((found - attention.shard(x, 48)).detach().abs().max()))
    return errors, most


@pytest.mark.parametrize("schedule", ["ring", "helper"])
def test_attention_works_after_all_ranks_ran_out_of_memory(schedule: str) -> None:
    for errors, most in run_distributed(_all_out_of_memory, 3, schedule):
        assert errors == ["OutOfMemoryError: CUDA out of memory.\nand more"] * 4 and most < 1e-12, (errors, most)


def _one_out_of_memory(rank: int) -> list[Any]:
    p2p._PATIENCE_S = 0.1
    _limit_calls()
    attention = ContextParallelAttention(dist.group.WORLD, schedule="ring", kernel="reference")
    if rank == 1:
        return [_failed(attention, 0), *(_failed(attention, 10**9) for _ in range(2))]
    x = torch.ones(32, 1, 2, 8, dtype=torch.float64)
    return [bool(attention.forward(x, x, x, mask=96).out.isnan().any())]


def test_a_rank_that_alone_ran_out_of_memory_is_refused() -> None:
    _, (own, *later), (last,) = run_distributed(_one_out_of_memory, 3)
    assert own.startswith("OutOfMemoryError") and last, "what it sends to the last rank is NaN"
    for error in later:
        assert "broken off before (OutOfMemoryError: CUDA out of memory., not on all ranks)" in error
