"""Point-to-point messages: over gloo, and over NCCL while kernels run."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.core.comm import P2PTransport
from megatron_longctx.testing.distributed import run_distributed


def _numbers(source: int, destination: int, number: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + 1e6 * source + 1e5 * destination + 1e4 * number


SIZES = (5, 1, 700, 0, 3)


def _several_messages(transport: P2PTransport, label: int = 0) -> list[str]:
    """Every rank sends messages of different sizes to every other, in one batch."""
    others = [peer for peer in range(transport.world) if peer != transport.rank]
    numbered = [(peer, number, size) for number, size in enumerate(SIZES) for peer in others if size]
    sends = [(_numbers(transport.rank, peer, label + number, size), peer) for peer, number, size in numbered]
    # Peers in another order; the messages of one peer in the order of their sends.
    numbered.sort(key=lambda entry: -entry[0])
    receives = [(torch.full((size,), -1.0), peer) for peer, _, size in numbered]
    transport.wait(transport.start(sends, receives, (transport.record_event(),)))
    return [
        f"message {number} from {peer}: {tensor[:3]}"
        for (peer, number, size), (tensor, _) in zip(numbered, receives, strict=True)
        if not torch.equal(tensor, _numbers(peer, transport.rank, label + number, size))
    ]


def _overlapping(transport: P2PTransport) -> list[str]:
    """Three exchanges in flight, waited for in another order, with work in between."""
    right, left = (transport.rank + 1) % transport.world, (transport.rank - 1) % transport.world
    exchanges, received = [], []
    for number, size in enumerate((300, 4, 5000)):
        received.append(torch.full((size,), -1.0))
        exchanges.append(
            transport.start([(_numbers(transport.rank, right, number, size), right)], [(received[-1], left)])
        )
        torch.randn(64, 64) @ torch.randn(64, 64)
    for number in (1, 2, 0):
        transport.wait(exchanges[number])
    return [
        f"exchange {number}: {tensor[:3]}"
        for number, tensor in enumerate(received)
        if not torch.equal(tensor, _numbers(left, transport.rank, number, len(tensor)))
    ]


def _one_way(transport: P2PTransport) -> list[str]:
    """Only rank 0 sends and only the last rank receives; the others have empty batches."""
    last = transport.world - 1
    received = torch.zeros(7)
    sends = [(torch.arange(7.0), last)] if transport.rank == 0 else []
    receives = [(received, 0)] if transport.rank == last else []
    transport.wait(transport.start(sends, receives, (transport.record_event(), None)))
    expected = torch.arange(7.0) if transport.rank == last else torch.zeros(7)
    return [] if torch.equal(received, expected) else [f"one way: {received}"]


def _subgroup(rank: int, world: int) -> list[str]:
    """Peers are numbered in the group, which consists of the last two ranks."""
    if world < 3:
        return []
    members = list(range(world - 2, world))
    group = dist.new_group(members)
    if rank not in members:
        return []
    return _several_messages(P2PTransport(group, torch.device("cpu")), label=3)


def _over_gloo(rank: int, world: int) -> list[str]:
    transport = P2PTransport(dist.group.WORLD, torch.device("cpu"))
    assert (transport.rank, transport.world, transport.record_event()) == (rank, world, None)
    wrong = _several_messages(transport) + _overlapping(transport) + _one_way(transport)
    return wrong + _subgroup(rank, world)


@pytest.mark.parametrize("world", [2, 3])
def test_messages_arrive(world: int) -> None:
    for rank, wrong in enumerate(run_distributed(_over_gloo, world, world)):
        assert wrong == [], f"rank {rank}"


ROUNDS = 20
SIZE = 1 << 20


def _busy(device: torch.device, times: int = 20) -> torch.Tensor:
    """Occupy the current stream for several milliseconds; the result is 1."""
    x = torch.ones(4096, 4096, device=device)
    for _ in range(times):
        x = (x @ x).clamp(1, 1)
    return x[0, 0]


def _while_kernels_run(rank: int) -> list[str]:
    """Two exchanges in flight. Data is computed late and sent after its event; buffers are read late and reused after
    their event."""
    device = torch.device("cuda", torch.cuda.current_device())
    transport = P2PTransport(dist.group.WORLD, device)
    peer = 1 - rank
    outgoing = [torch.empty(SIZE, device=device) for _ in range(2)]
    incoming = [torch.empty(SIZE, device=device) for _ in range(2)]
    means, wrong = [], []
    free: Any = None
    for number in range(ROUNDS):
        for i in range(2):
            outgoing[i].copy_(_busy(device).expand(SIZE) * (1000 * rank + 10 * number + i))
        computed = transport.record_event()
        exchanges = [transport.start([(outgoing[i], peer)], [(incoming[i], peer)], (computed, free)) for i in range(2)]
        local = _busy(device, 5)  # runs beside the messages
        for exchange in reversed(exchanges):
            transport.wait(exchange)
        late = _busy(device)  # the next round must not overwrite what is read after this
        means.append(torch.stack([(incoming[i] * late * local).double().mean() for i in range(2)]))
        free = transport.record_event()
    for number, pair in enumerate(torch.stack(means).tolist()):
        for i in range(2):
            expected = 1000 * peer + 10 * number + i
            if abs(pair[i] - expected) > 1e-3:
                wrong.append(f"rank {rank}, round {number}, message {i}: {pair[i]}, not {expected}")
    return wrong


def _over_nccl(rank: int) -> list[str]:
    with torch.device("cuda", torch.cuda.current_device()) as device:  # where new tensors are
        transport = P2PTransport(dist.group.WORLD, device)
        return _several_messages(transport) + _one_way(transport) + _while_kernels_run(rank)


@pytest.mark.gpu(2)
def test_messages_over_nccl_arrive_while_kernels_run() -> None:
    assert run_distributed(_over_nccl, 2, backend="nccl") == [[], []]
