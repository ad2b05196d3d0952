"""Peer memory is set up by all ranks or refused by all with the same error, and no rank is left waiting."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.config.gpus import max_gpu_ranks
from megatron_longctx.core.attention import ContextParallelAttention
from megatron_longctx.core.comm import PeerTransport, peer, symmetric
from megatron_longctx.core.kernels import AttentionKernel
from megatron_longctx.core.plans.mask import documents
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.training.ranks import world_group
from tests.core.comm.test_collectives import error_of

CPU = torch.device("cpu")
MIB = 2**20


class Memory:
    """A fake of torch's symmetric memory that can fail on a rank. A rendezvous of one rank alone would hang."""

    def __init__(self, limit: int = 2**62, exchanges: bool = True) -> None:
        self.limit, self.exchanges = limit, exchanges
        self.rendezvous_calls = 0

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if size > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.\nand more lines")
        return torch.ones(min(size, 16), dtype=dtype, device=device)

    def rendezvous(self, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        self.rendezvous_calls += 1
        if not self.exchanges:
            raise RuntimeError("handles could not be exchanged")
        return tensor


def use(memory: Memory) -> None:
    symmetric.symmetric_memory = lambda: memory
    peer._stream = lambda device: None  # type: ignore[assignment, return-value]


def _allocating(rank: int) -> list[Any]:
    remedy = "Choose attention.transport=p2p."

    def allocate(*sizes: int) -> list[Any]:
        return symmetric.allocate(world_group(), CPU, sizes, remedy, "setting up peer memory")

    full = Memory(limit=100 if rank == 1 else 2**62)
    use(full)
    result: list[Any] = [error_of(lambda: allocate(50, 1000)), full.rendezvous_calls]
    use(Memory(exchanges=rank != 0))
    result.append(error_of(lambda: allocate(50)))
    use(Memory())
    result.append([handle.tolist() for handle in allocate(8, 4)])
    return result


def _growing(rank: int) -> list[Any]:
    use(Memory(limit=2**30 if rank == 1 else 2**62))
    transport = PeerTransport(world_group(), CPU, key="inference.transport")
    generations = []
    for num_bytes in (MIB, 2 * MIB):
        transport.ensure_capacity(num_bytes, 1)
        generations.append(transport.generation)
    errors = [error_of(lambda size=size: transport.ensure_capacity(size, 1)) for size in (2**32, 2**32, 2**20)]
    return [*generations, *errors, transport.generation]


def _broken_off(rank: int) -> list[Any]:
    use(Memory())
    transport = PeerTransport(world_group(), CPU)
    if rank == 1:
        channel: Any = None
        transport.abort(ValueError("a kernel gave up\nwith details"), channel, lambda _: [])
        transport.abort(ValueError("and again"), channel, lambda _: [])
    return [error_of(lambda: transport.ensure_capacity(8, 1)), error_of(lambda: transport.ensure_capacity(2**24, 1))]


def _growing_ahead(rank: int) -> list[Any]:
    """The number of allocations for passes that need 64 MiB more each time."""
    use(Memory())
    transport = PeerTransport(world_group(), CPU, growth=2.0)
    for number in range(1, 17):
        transport.ensure_capacity(number * 64 * MIB, 1)
    return [transport.generation]


def _growing_as_far_as_possible(rank: int) -> list[Any]:
    """One rank cannot allocate twice as much, but what a pass needs."""
    use(Memory(limit=3 * 64 * MIB if rank == 1 else 2**62))
    transport = PeerTransport(world_group(), CPU, growth=2.0)
    result = []
    for needed in (2, 3, 3):
        transport.ensure_capacity(needed * 64 * MIB, 1)
        result.append((transport._capacity // (64 * MIB), transport.generation))
    return [*result, error_of(lambda: transport.ensure_capacity(4 * 64 * MIB, 1))]


def _more_steps(rank: int) -> list[Any]:
    use(Memory())
    transport = PeerTransport(world_group(), CPU)
    result = []
    for steps in (5, 64, 65, 128):
        transport.ensure_capacity(8, steps)
        result.append((transport.generation, transport._steps, transport._capacity))
    return result


CASES = (_allocating, _growing, _broken_off, _growing_ahead, _growing_as_far_as_possible, _more_steps)
Results = list[dict[str, list[Any]]]


def _all_cases(rank: int) -> dict[str, list[Any]]:
    return {case.__name__: case(rank) for case in CASES}


@pytest.fixture(scope="module")
def ranks() -> Results:
    """The results of two ranks, from one start of processes."""
    return run_distributed(_all_cases, 2)


def test_addresses_are_exchanged_only_if_all_ranks_have_memory(ranks: Results) -> None:
    one, other = (results["_allocating"] for results in ranks)
    assert one == other
    refused, calls, not_exchanged, zeroed = one
    assert "failed on rank 1 of the group's 2: OutOfMemoryError: CUDA out of memory" in refused and calls == 0
    assert "transport=p2p" in refused and "more lines" not in refused
    assert "failed on rank 0 of the group's 2: RuntimeError: handles could not be exchanged" in not_exchanged
    assert zeroed == [[0] * 8, [0] * 4]


def test_all_ranks_refuse_memory_that_one_cannot_allocate_and_take_less(ranks: Results) -> None:
    one, other = (results["_growing"] for results in ranks)
    *_, less, generation = one
    assert one == other and one[:2] == [1, 2]
    for error in one[2:4]:
        assert error.startswith("setting up peer memory (2 x 4.00 GiB on every rank) failed on rank 1 of the group's 2")
        assert "hoose inference.transport=p2p" in error, "the setting that chose it"
    assert less == "no error: None" and generation == 3


def test_memory_grows_ahead_of_demand(ranks: Results) -> None:
    """64, 128, 256, 512 and 1024 MiB."""
    assert [results["_growing_ahead"] for results in ranks] == [[5], [5]]


def test_memory_grows_as_far_as_possible(ranks: Results) -> None:
    """128 MiB, then 192 because 256 cannot be allocated; what a pass needs and cannot be allocated is refused."""
    for results in ranks:
        *grown, refused = results["_growing_as_far_as_possible"]
        assert grown == [(2, 2), (3, 3), (3, 3)]
        assert refused.startswith("setting up peer memory (2 x 0.25 GiB on every rank) failed on rank 1")


def test_memory_is_reallocated_only_for_many_more_steps(ranks: Results) -> None:
    first, grown = (1, 64, MIB), (2, 128, MIB)
    assert [results["_more_steps"] for results in ranks] == [[first, first, grown, grown]] * 2


def test_no_pass_follows_one_that_was_broken_off_on_any_rank(ranks: Results) -> None:
    one, other = (results["_broken_off"] for results in ranks)
    assert one[0] == "no error: None"
    assert "broken off before (ValueError: a kernel gave up): ranks would wait" in other[0]
    assert one[1] == other[1] == other[0]


class Full:
    """Symmetric memory of a rank that has none left."""

    @staticmethod
    def empty(size: int, **_: Any) -> Any:
        raise torch.OutOfMemoryError(f"no {size} bytes here")


def _too_much(rank: int) -> list[str]:
    """More memory than any GPU has; then one rank that has none left."""
    group, device = world_group(), torch.device("cuda", torch.cuda.current_device())
    transport = PeerTransport(group, device)
    transport.ensure_capacity(2**24, 1)
    errors = [error_of(lambda size=size: transport.ensure_capacity(size, 1)) for size in (2**42, 8)]
    errors.append(error_of(lambda: PeerTransport(group, device).generation))  # a new transport works
    real = symmetric.symmetric_memory
    if rank == 1:
        symmetric.symmetric_memory = lambda: Full
    errors.append(error_of(lambda: PeerTransport(group, device)))
    symmetric.symmetric_memory = real
    return errors


@pytest.mark.gpu(2)
def test_all_gpus_refuse_memory_that_one_cannot_allocate() -> None:
    n = 3 if max_gpu_ranks() >= 3 else 2
    ranks = run_distributed(_too_much, n, backend="nccl", timeout=120)
    assert all(errors == ranks[0] for errors in ranks), ranks
    refused, small, new, alone = ranks[0]
    assert refused.startswith("setting up peer memory (2 x 4096.00 GiB on every rank) failed on rank")
    assert small == "no error: None"
    assert new == "no error: 1"
    assert f"failed on rank 1 of the group's {n}: OutOfMemoryError" in alone


def _failing_kernel(rank: int, kind: type[Exception]) -> list[Any]:
    """A kernel fails on all ranks in the middle of a pass, and the caller catches it."""
    device = torch.device("cuda", torch.cuda.current_device())
    attention = ContextParallelAttention(dist.group.WORLD, schedule="ring", transport="peer")
    layout = attention.layout(2048)
    q = torch.randn(layout.num_tokens(rank), 1, 8, 128, device=device, dtype=torch.bfloat16)

    def call(window: int | None = None) -> Any:
        return attention(q, q, q, mask=documents([2048], window=(window, None))).float().norm().isfinite().item()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise kind("a kernel gave up")

    result: list[Any] = [call()]
    forward = AttentionKernel.forward
    AttentionKernel.forward = fails  # type: ignore[method-assign]
    try:
        call(window=100)  # a new kind of call, which has not been prepared with the kernel that works
    except kind as error:
        result.append(str(error))
    AttentionKernel.forward = forward  # type: ignore[method-assign]
    return [*result, error_of(call)]


@pytest.mark.gpu(2)
def test_a_pass_after_a_failed_one_is_refused_and_does_not_hang() -> None:
    for first, failed, refused in run_distributed(_failing_kernel, 2, ArithmeticError, backend="nccl", timeout=120):
        assert first is True and failed == "a kernel gave up"
        assert "broken off before (ArithmeticError: a kernel gave up)" in refused


@pytest.mark.gpu(2)
def test_passes_go_on_after_all_gpus_ran_out_of_memory() -> None:
    for results in run_distributed(_failing_kernel, 2, torch.OutOfMemoryError, backend="nccl", timeout=120):
        assert results == [True, "a kernel gave up", "no error: True"]
