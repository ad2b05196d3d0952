"""The choice of a transport, and hybrid passes: messages take their links in order and use no buffer too early."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.core.comm import Exchange, P2PTransport, choose_transport, hybrid
from megatron_longctx.core.comm.hybrid import HybridChannel, HybridTransport, cross_waits
from megatron_longctx.core.plans import (
    MODES,
    Block,
    Kind,
    ModeOptions,
    Recorder,
    Recording,
    Target,
    Workload,
    backward_plan,
    build_plan,
    keep_received,
)
from megatron_longctx.core.plans.mask import full
from megatron_longctx.core.plans.recording import Memory, Receive
from megatron_longctx.core.plans.send_layout import SentMessage
from megatron_longctx.testing.distributed import run_distributed

HOSTS = (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)))
Hosts = tuple[tuple[int, ...], ...]


def _chosen(rank: int, name: str) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        transport = choose_transport(name, group, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    assert isinstance(transport, P2PTransport)
    return transport.name


@pytest.mark.parametrize("name", ["auto", "p2p"])
def test_cpus_send_point_to_point(name: str) -> None:
    assert run_distributed(_chosen, 2, name) == ["p2p", "p2p"]


def test_all_ranks_refuse_peer_memory_on_cpus() -> None:
    errors = run_distributed(_chosen, 2, "peer")
    assert errors[0] == errors[1] and "not all ranks have a CUDA device. Choose auto or p2p" in errors[0]


def test_an_unknown_transport_is_refused() -> None:
    expected = "transport=pigeon: expected one of auto, peer, p2p. Set transport to one of these."
    assert run_distributed(_chosen, 1, "pigeon") == [expected]


def host(hosts: Hosts, rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in hosts if rank in ranks)


def recordings(schedule: str, hosts: Hosts, way: str = "forward", mask: Any = 67) -> list[Recording]:
    plan = build_plan(schedule, 4, mask, ModeOptions(inner_size=2))
    target = Target(Workload(8, 8, 8), hosts=tuple(host(hosts, rank) for rank in range(4)))
    plan = {"forward": plan, "backward": backward_plan(plan), "kept": keep_received(plan)}[way]
    recorder = Recorder(plan, target)
    return [recorder.record(rank) for rank in range(4)]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("schedule", MODES)
@pytest.mark.parametrize("way", ["forward", "backward", "kept"])
def test_uses_of_memory_by_both_kinds_of_messages_are_ordered(schedule: str, way: str, hosts: Hosts) -> None:
    """Each kind runs in order; a cross wait orders a step of one kind after all earlier steps of the other."""
    for rank, recording in enumerate(recordings(schedule, hosts, way)):
        peers = host(hosts, rank)
        waits = cross_waits(recording, peers)
        uses: dict[int | Memory, list[tuple[int, bool]]] = {}
        for t, receives in enumerate(recording.receives):
            passed = [message.peer for message in recording.sends.messages[t] if message.passed]
            used = [(rows, peer) for rows, peer in zip(recording.passed[t], passed, strict=True)]
            used += [(each.into, each.peer) for each in receives if each.into is not None]
            for rows, peer in used:
                memory = rows.memory if rows.memory.is_kept else rows.memory.number
                uses.setdefault(memory, []).append((t, peer in peers))
        for of_memory in uses.values():
            for i, (later, is_peer) in enumerate(of_memory):
                for earlier, other in of_memory[:i]:
                    if earlier < later and other != is_peer:
                        between = waits[earlier + 1 : later + 1]
                        assert any(each.peer if is_peer else each.p2p for each in between), (rank, earlier, later)


def test_only_blocks_that_are_passed_on_over_another_link_wait() -> None:
    # In a ring over two hosts, rank 1 receives from its peer what it sends to the other host; rank 2 does the reverse.
    ring = recordings("ring", HOSTS[0], mask=full(64))
    one, two = (cross_waits(ring[rank], host(HOSTS[0], rank)) for rank in (1, 2))
    assert [each.p2p for each in one][1:3] == [True, True] and not any(each.peer for each in one[:2])
    assert [each.peer for each in two][1:3] == [True, True] and not any(each.p2p for each in two[:2])
    # Blocks go directly from their owner to the ranks that need them, so nothing is passed on.
    for schedule, rank in (("all_gather", 1), ("ulysses", 2)):
        recording = recordings(schedule, HOSTS[0])[rank]
        assert not any(map(any, cross_waits(recording, host(HOSTS[0], rank))))


class LoggingChannel:
    """A channel that logs its calls; the event at which messages arrive is named after their step."""

    generation = 0

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def begin(self) -> int:
        return 0

    def start(self, step: int, passed: Sequence[Any], receives: Sequence[Any], after: Sequence[Any]) -> Exchange:
        self.log.append((self.name, step, list(passed), list(receives), tuple(after)))
        return Exchange(arrived=f"{self.name} {step}" if passed or receives else None)  # type: ignore[arg-type]

    def wait(self, exchange: Exchange) -> None:
        self.log.append((self.name, "wait", exchange.arrived))


def test_messages_are_split_by_link_and_wait_for_the_latest_of_the_other_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 0 with peer 1; an output is two tensors."""
    kv, out = Block(Kind.KV, 2, 0, 4), Block(Kind.OUT, 2, 0, 4, 3)

    def passed(*peers: int) -> tuple[SentMessage, ...]:
        return (
            SentMessage(Block(Kind.KV, 0, 0, 4), 1, 0, 0, False),
            *(SentMessage(kv, peer, -1, 0, True) for peer in peers),
        )

    recording: Any = SimpleNamespace(
        sends=SimpleNamespace(messages=(passed(2, 1, 3), passed(1), passed(1))),
        receives=((Receive(out, 1, None, ()), Receive(kv, 3, None, ())), (), (Receive(kv, 2, None, ()),)),
    )
    waits = [SimpleNamespace(peer=peer, p2p=p2p) for peer, p2p in ((False, False), (True, True), (True, False))]
    monkeypatch.setattr(hybrid, "cross_waits", lambda *_: waits)
    log: list[Any] = []
    channel = HybridChannel(LoggingChannel("peer", log), LoggingChannel("p2p", log), recording, (0, 1))  # type: ignore[arg-type]
    channel.begin()
    x: Any = ["to 2", "to 1", "to 3", "out of 1", "lse of 1", "of 3"]
    channel.wait(channel.start(0, x[:3], x[3:], ["begin"]))
    channel.start(1, x[1:2], [], ["begin"])
    channel.start(2, x[1:2], ["of 2"], ["begin"])  # type: ignore[list-item]
    assert log == [
        ("peer", 0, ["to 1"], ["out of 1", "lse of 1"], ("begin",)),
        ("p2p", 0, ["to 2", "to 3"], ["of 3"], ("begin",)),
        ("peer", "wait", "peer 0"),
        ("p2p", "wait", "p2p 0"),
        ("peer", 1, ["to 1"], [], ("begin", "p2p 0")),
        ("p2p", 1, [], [], ("begin", "peer 0")),
        ("peer", 2, ["to 1"], [], ("begin", "p2p 0")),
        ("p2p", 2, [], ["of 2"], ("begin",)),
    ]
    channel.begin()  # a new pass waits for nothing of the one before
    channel.start(1, x[1:2], [], ["begin"])
    assert log[-2:] == [("peer", 1, ["to 1"], [], ("begin",)), ("p2p", 1, [], [], ("begin",))]


@pytest.mark.parametrize("peers", [(0,), (0, 1)], ids=["alone", "with a peer"])
def test_a_rank_alone_on_its_host_sends_from_allocated_memory(peers: tuple[int, ...]) -> None:
    (recording, *_) = recordings("ring", (peers, *((rank,) for rank in range(len(peers), 4))))
    shared, allocated = torch.empty(1), torch.empty(2)
    channel: Any = SimpleNamespace(memory=lambda: shared, generation=0)
    transport = HybridTransport.__new__(HybridTransport)
    transport.p2p = SimpleNamespace()  # type: ignore[assignment]
    transport.peer = SimpleNamespace(peers=peers, channel=lambda *_: channel)  # type: ignore[assignment]
    sizes: list[int] = []

    def allocate(num_bytes: int) -> torch.Tensor:
        sizes.append(num_bytes)
        return allocated

    memory = transport.channel(recording, 2**20, allocate).memory()
    assert (memory is allocated, sizes) == ((True, [recording.sends.num_bytes]) if len(peers) == 1 else (False, []))
