"""Passes whose messages go by two kinds of links: each by its own, in order, nothing touched too early."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_longctx.comm import Exchange
from megatron_longctx.comm import hybrid as links
from megatron_longctx.comm.hybrid import HybridChannel, HybridTransport, crossings
from megatron_longctx.schedules import (
    MODES,
    Block,
    Kind,
    Lowering,
    ModeOptions,
    Program,
    Target,
    Workload,
    backward_plan,
    build_plan,
)
from megatron_longctx.schedules.mask import full
from megatron_longctx.schedules.program import Message, Receive

HOSTS = (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)))
Hosts = tuple[tuple[int, ...], ...]


def host(hosts: Hosts, rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in hosts if rank in ranks)


def programs(schedule: str, hosts: Hosts, backward: bool = False, mask: Any = 67) -> list[Program]:
    plan = build_plan(schedule, 4, mask, ModeOptions(inner_size=2))
    target = Target(Workload(8, 8, 8), hosts=tuple(host(hosts, rank) for rank in range(4)))
    lowering = Lowering(backward_plan(plan) if backward else plan, target)
    return [lowering.program(rank) for rank in range(4)]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("schedule", MODES)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_no_buffer_is_touched_by_both_kinds_without_an_order(schedule: str, backward: bool, hosts: Hosts) -> None:
    """Each kind runs in order; a crossing orders a step of one kind after all earlier ones of the other."""
    for rank, program in enumerate(programs(schedule, hosts, backward)):
        peers = host(hosts, rank)
        found = crossings(program, peers)
        touches: dict[int, list[tuple[int, bool]]] = {}
        for t, receives in enumerate(program.receives):
            passed = [message.peer for message in program.sends.messages[t] if message.passed]
            used = [(rows, peer) for rows, peer in zip(program.passed[t], passed, strict=True)]
            used += [(each.into, each.peer) for each in receives if each.into is not None]
            for rows, peer in used:
                touches.setdefault(rows.number, []).append((t, peer in peers))
        for touched in touches.values():
            for i, (later, near) in enumerate(touched):
                for earlier, other in touched[:i]:
                    if earlier < later and other != near:
                        waits = [crossing.near if near else crossing.far for crossing in found[earlier + 1 : later + 1]]
                        assert any(waits), (rank, earlier, later)


def test_only_what_is_passed_on_over_another_link_waits() -> None:
    # On a ring over two hosts rank 1 gets from its peer what it sends to the other host, rank 2 the other way round.
    ring = programs("ring", HOSTS[0], mask=full(64))
    one, two = (crossings(ring[rank], host(HOSTS[0], rank)) for rank in (1, 2))
    assert [crossing.far for crossing in one][1:3] == [True, True] and not any(c.near for c in one[:2])
    assert [crossing.near for crossing in two][1:3] == [True, True] and not any(c.far for c in two[:2])
    # Straight from home to whoever needs it: nothing is passed on.
    for schedule, rank in (("all_gather", 1), ("ulysses", 2)):
        program = programs(schedule, HOSTS[0])[rank]
        assert not any(any(crossing) for crossing in crossings(program, host(HOSTS[0], rank)))


class Way:
    """A channel that notes what it is told to do; what it starts has arrived at a mark named after it."""

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


def test_messages_are_split_by_link_in_order_and_wait_for_the_latest_of_the_other_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of rank 0 with peer 1; an output is two tensors."""
    kv, out = Block(Kind.KV, 2, 0, 4), Block(Kind.OUT, 2, 0, 4, 3)

    def passed(*peers: int) -> tuple[Message, ...]:
        return (Message(Block(Kind.KV, 0, 0, 4), 1, 0, 0, False), *(Message(kv, peer, -1, 0, True) for peer in peers))

    program: Any = SimpleNamespace(
        sends=SimpleNamespace(messages=(passed(2, 1, 3), passed(1), passed(1))),
        receives=((Receive(out, 1, None, ()), Receive(kv, 3, None, ())), (), (Receive(kv, 2, None, ()),)),
    )
    marks = [SimpleNamespace(near=near, far=far) for near, far in ((False, False), (True, True), (True, False))]
    monkeypatch.setattr(links, "crossings", lambda *_: marks)
    log: list[Any] = []
    channel = HybridChannel(Way("near", log), Way("far", log), program, (0, 1))  # type: ignore[arg-type]
    channel.begin()
    x: Any = ["to 2", "to 1", "to 3", "out of 1", "lse of 1", "of 3"]
    channel.wait(channel.start(0, x[:3], x[3:], ["begin"]))
    channel.start(1, x[1:2], [], ["begin"])
    channel.start(2, x[1:2], ["of 2"], ["begin"])  # type: ignore[list-item]
    assert log == [
        ("near", 0, ["to 1"], ["out of 1", "lse of 1"], ("begin",)),
        ("far", 0, ["to 2", "to 3"], ["of 3"], ("begin",)),
        ("near", "wait", "near 0"),
        ("far", "wait", "far 0"),
        ("near", 1, ["to 1"], [], ("begin", "far 0")),
        ("far", 1, [], [], ("begin", "near 0")),
        ("near", 2, ["to 1"], [], ("begin", "far 0")),
        ("far", 2, [], ["of 2"], ("begin",)),
    ]
    channel.begin()  # a new pass waits for nothing of the one before
    channel.start(1, x[1:2], [], ["begin"])
    assert log[-2:] == [("near", 1, ["to 1"], [], ("begin",)), ("far", 1, [], [], ("begin",))]


@pytest.mark.parametrize("peers", [(0,), (0, 1)], ids=["alone", "with a peer"])
def test_a_rank_alone_on_its_host_sends_from_memory_that_it_is_lent(peers: tuple[int, ...]) -> None:
    (program, *_) = programs("ring", (peers, *((rank,) for rank in range(len(peers), 4))))
    shared, lent = torch.empty(1), torch.empty(2)
    near: Any = SimpleNamespace(memory=lambda: shared, generation=0)
    transport = HybridTransport.__new__(HybridTransport)
    transport.messages = SimpleNamespace()  # type: ignore[assignment]
    transport.peers = SimpleNamespace(peers=peers, channel=lambda *_: near)  # type: ignore[assignment]
    asked: list[int] = []

    def lend(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return lent

    found = transport.channel(program, 2**20, lend).memory()
    assert (found is lent, asked) == ((True, [program.sends.num_bytes]) if len(peers) == 1 else (False, []))
