"""Point-to-point messages over gloo."""

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.comm import Exchange, P2PTransport
from megatron_longctx.testing.distributed import run_distributed


def _numbers(source: int, destination: int, number: int, size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float32) + 1e6 * source + 1e5 * destination + 1e4 * number


SIZES = (5, 1, 700, 0, 3)


def _several_messages(transport: P2PTransport, label: int = 0) -> list[str]:
    """Every rank sends five messages of different sizes to every other, in one batch."""
    others = [peer for peer in range(transport.world) if peer != transport.rank]
    numbered = [(peer, number, size) for number, size in enumerate(SIZES) for peer in others if size]
    sends = [(_numbers(transport.rank, peer, label + number, size), peer) for peer, number, size in numbered]
    # Received in another order of peers; of one peer in the order it sends.
    numbered.sort(key=lambda entry: -entry[0])
    receives = [(torch.full((size,), -1.0), peer) for peer, _, size in numbered]
    transport.wait(transport.start(sends, receives))
    return [
        f"message {number} from {peer}: {tensor[:3]}"
        for (peer, number, size), (tensor, _) in zip(numbered, receives, strict=True)
        if not torch.equal(tensor, _numbers(peer, transport.rank, label + number, size))
    ]


def _overlapping(transport: P2PTransport) -> list[str]:
    """Three exchanges under way at once, waited for in another order, with work in between."""
    right, left = (transport.rank + 1) % transport.world, (transport.rank - 1) % transport.world
    exchanges, landed = [], []
    for number, size in enumerate((300, 4, 5000)):
        landed.append(torch.full((size,), -1.0))
        exchanges.append(
            transport.start([(_numbers(transport.rank, right, number, size), right)], [(landed[-1], left)])
        )
        torch.randn(64, 64) @ torch.randn(64, 64)
    for number in (1, 2, 0):
        transport.wait(exchanges[number])
    return [
        f"exchange {number}: {tensor[:3]}"
        for number, tensor in enumerate(landed)
        if not torch.equal(tensor, _numbers(left, transport.rank, number, len(tensor)))
    ]


def _one_way(transport: P2PTransport) -> list[str]:
    """Only rank 0 sends, only the last rank receives; the others have an empty batch."""
    last = transport.world - 1
    landed = torch.zeros(7)
    sends = [(torch.arange(7.0), last)] if transport.rank == 0 else []
    receives = [(landed, 0)] if transport.rank == last else []
    transport.wait(transport.start(sends, receives, (transport.now(), None)))
    expected = torch.arange(7.0) if transport.rank == last else torch.zeros(7)
    return [] if torch.equal(landed, expected) else [f"one way: {landed}"]


def _refused(kind: type[Exception], call) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "not refused"


def _misuse(transport: P2PTransport) -> dict[str, str]:
    rank, peer = transport.rank, (transport.rank + 1) % transport.world
    good = torch.zeros(4)
    empty = transport.start([], [])
    transport.wait(empty)
    another = P2PTransport(transport.group, torch.device("cpu"))
    foreign = another.start([], [])
    found = {
        "wait twice": _refused(RuntimeError, lambda: transport.wait(empty)),
        "foreign exchange": _refused(RuntimeError, lambda: transport.wait(foreign)),
        "made by hand": _refused(RuntimeError, lambda: transport.wait(Exchange())),
        "not contiguous": _refused(ValueError, lambda: transport.start([(torch.zeros(4, 6)[:, :3], peer)], [])),
        "not contiguous to receive": _refused(ValueError, lambda: transport.start([], [(torch.zeros(4, 6).t(), peer)])),
        "peer is itself": _refused(ValueError, lambda: transport.start([(good, rank)], [])),
        "peer too large": _refused(ValueError, lambda: transport.start([], [(good, transport.world)])),
        "peer negative": _refused(ValueError, lambda: transport.start([(good, -1)], [])),
        "device": _refused(ValueError, lambda: transport.start([(torch.zeros(4, device="meta"), peer)], [])),
    }
    another.wait(foreign)
    return found


def _subgroup(rank: int, world: int) -> list[str]:
    """Peers are ranks of the group, not of the world: the group counts from the end."""
    if world < 3:
        return []
    members = list(range(world - 2, world))
    group = dist.new_group(members)
    if rank not in members:
        return []
    return _several_messages(P2PTransport(group, torch.device("cpu")), label=3)


def _everything(rank: int, world: int):
    transport = P2PTransport(dist.group.WORLD, torch.device("cpu"))
    assert (transport.rank, transport.world, transport.now()) == (rank, world, None)
    wrong = _several_messages(transport) + _overlapping(transport) + _one_way(transport)
    refused = _misuse(transport)
    wrong += _several_messages(transport, label=1)  # as good as new after the misuse
    wrong += _subgroup(rank, world)
    return wrong, refused


REFUSALS = {
    "wait twice": "waited for twice, or by a transport that did not start it",
    "foreign exchange": "waited for twice, or by a transport that did not start it",
    "made by hand": "waited for twice, or by a transport that did not start it",
    "not contiguous": "message of shape (4, 3) is not contiguous: send a copy",
    "not contiguous to receive": "message of shape (6, 4) is not contiguous",
    "peer is itself": "peer={rank}: expected another rank of the group's {world} (this is {rank})",
    "peer too large": "peer={world}: expected another rank of the group's {world}",
    "peer negative": "peer=-1: expected another rank of the group's {world}",
    "device": "message on meta: expected cpu, the transport's own device",
}


@pytest.mark.parametrize("world", [2, 3])
def test_messages_arrive_and_misuse_is_refused(world):
    for rank, (wrong, refused) in enumerate(run_distributed(_everything, world, world)):
        assert wrong == [], f"rank {rank}"
        assert refused.keys() == REFUSALS.keys()
        for name, message in REFUSALS.items():
            assert message.format(rank=rank, world=world) in refused[name], f"rank {rank}: {name}"
