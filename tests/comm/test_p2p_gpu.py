"""Point-to-point messages over NCCL, beside computation."""

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.comm import P2PTransport
from megatron_longctx.testing.distributed import run_distributed

pytestmark = pytest.mark.gpu(2)

ROUNDS = 20
SIZE = 1 << 20


def _busy(device: torch.device, times: int = 20) -> torch.Tensor:
    """Several milliseconds of work on the current stream, which ends in 1."""
    x = torch.ones(4096, 4096, device=device)
    for _ in range(times):
        x = (x @ x).clamp(1, 1)
    return x[0, 0]


def _beside_computation(rank: int) -> list[str]:
    """Data made late, sent after its mark; a buffer read late, overwritten after its mark; two exchanges under way."""
    device = torch.device("cuda", torch.cuda.current_device())
    transport = P2PTransport(dist.group.WORLD, device)
    peer = 1 - rank
    outgoing = [torch.empty(SIZE, device=device) for _ in range(2)]
    landing = [torch.empty(SIZE, device=device) for _ in range(2)]
    sums, wrong = [], []
    free = None
    for number in range(ROUNDS):
        for i in range(2):
            outgoing[i].copy_(_busy(device).expand(SIZE) * (1000 * rank + 10 * number + i))
        made = transport.now()
        exchanges = [transport.start([(outgoing[i], peer)], [(landing[i], peer)], (made, free)) for i in range(2)]
        local = _busy(device, 5)  # runs beside the messages
        for exchange in reversed(exchanges):
            transport.wait(exchange)
        # Read late, and twice: what lands now must not be overwritten by the next round.
        late = _busy(device)
        sums.append(torch.stack([(landing[i] * late * local).double().mean() for i in range(2)]))
        free = transport.now()
    found = torch.stack(sums).tolist()
    for number in range(ROUNDS):
        for i in range(2):
            expected = 1000 * peer + 10 * number + i
            if abs(found[number][i] - expected) > 1e-3:
                wrong.append(f"rank {rank}, round {number}, message {i}: {found[number][i]}, not {expected}")
    return wrong


def _several_messages(rank: int) -> list[str]:
    """Messages of different sizes between two ranks arrive in order; a rank may have nothing to send."""
    device = torch.device("cuda", torch.cuda.current_device())
    transport = P2PTransport(dist.group.WORLD, device)
    sizes = (5, 1, 70_000, 3)
    if rank == 0:
        transport.wait(transport.start([(torch.full((s,), float(s), device=device), 1) for s in sizes], []))
        return []
    landing = [torch.zeros(s, device=device) for s in sizes]
    transport.wait(transport.start([], [(x, 0) for x in landing]))
    return [f"{s}: {x[:3].tolist()}" for s, x in zip(sizes, landing, strict=True) if not (x == s).all()]


def _everything(rank: int) -> list[str]:
    return _several_messages(rank) + _beside_computation(rank)


def test_messages_beside_computation_carry_the_right_data():
    assert run_distributed(_everything, 2, backend="nccl") == [[], []]
