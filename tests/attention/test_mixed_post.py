"""Passes whose messages go by two kinds of links: each by its own, nothing lost, nothing touched too early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_longctx.attention import ContextParallelAttention
from megatron_longctx.attention.mixed_post import MixedPost, crossings
from megatron_longctx.attention.post import outbox_of
from megatron_longctx.attention.program import HOME, Program, programs
from megatron_longctx.comm import BufferPool, Exchange, MixedTransport, P2PTransport
from megatron_longctx.schedules import SCHEDULES, Kind, PlanOptions, build_plan
from megatron_longctx.testing.distributed import run_distributed
from megatron_longctx.testing.references import dense_attention, random_qkv, shard
from megatron_longctx.testing.tolerances import relative_error
from tests.attention.carrier import Carrier

HOSTS = (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 1, 2), (3,)))
ONE_HOST = ((0, 1, 2, 3),)
OPTIONS = PlanOptions(inner_size=2)
ROW_BYTES: dict[Kind, tuple[int, ...]] = {
    Kind.Q: (64,), Kind.KV: (32,), Kind.OUT: (64, 8), Kind.Q_GRAD: (64, 64, 64, 8), Kind.GRAD: (64,), Kind.DQ: (64,),
    Kind.DKV: (32,),
}  # fmt: skip


def row_bytes(kind: Kind, parts: int) -> tuple[int, ...]:
    return tuple(size // parts for size in ROW_BYTES[kind])


def host(hosts: Sequence[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    return next(ranks for ranks in hosts if rank in ranks)


def compiled(schedule: str, backward: int) -> list[Program]:
    plan = build_plan(schedule, 4, 67, options=OPTIONS)
    return [programs(plan, rank)[backward] for rank in range(4)]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backward", [0, 1])
def test_peers_offer_what_peers_expect_and_nothing_to_others(
    schedule: str, backward: int, hosts: tuple[tuple[int, ...], ...]
) -> None:
    ranks = compiled(schedule, backward)
    boxes = [outbox_of(program, row_bytes, host(hosts, rank)) for rank, program in enumerate(ranks)]
    for rank, program in enumerate(ranks):
        for t, step in enumerate(program.steps):
            for peer in range(4):
                expected = [
                    r.block.tokens * size
                    for r in step.receives
                    if r.peer == peer and peer in host(hosts, rank)
                    for size in row_bytes(r.block.kind, r.block.heads.parts)
                ]
                assert [m.num_bytes for m in boxes[peer].sends[t] if m.peer == rank] == expected


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backward", [0, 1])
def test_no_buffer_is_touched_by_both_kinds_without_an_order(
    schedule: str, backward: int, hosts: tuple[tuple[int, ...], ...]
) -> None:
    """Each kind runs in order; a crossing orders a step of one kind after all earlier ones of the other."""
    for rank, program in enumerate(compiled(schedule, backward)):
        peers = host(hosts, rank)
        found = crossings(program, peers)
        touches: dict[int, list[tuple[int, bool]]] = {}
        for t, step in enumerate(program.steps):
            for place, peer in [(s.place, s.peer) for s in step.sends] + [(r.place, r.peer) for r in step.receives]:
                if place is not None and place.slot != HOME:
                    touches.setdefault(place.slot, []).append((t, peer in peers))
        for touched in touches.values():
            for i, (later, near) in enumerate(touched):
                for earlier, other in touched[:i]:
                    if earlier < later and other != near:
                        waits = [crossing.near if near else crossing.far for crossing in found[earlier + 1 : later + 1]]
                        assert any(waits), (rank, earlier, later)


def test_only_what_is_passed_on_over_another_link_waits() -> None:
    # On a ring over two hosts rank 1 gets from its peer what it sends to the other host, rank 2 the other way round.
    plan = build_plan("ring", 4, 64, causal=False)
    ring = [programs(plan, rank)[0] for rank in range(4)]
    one, two = (crossings(ring[rank], host(HOSTS[0], rank)) for rank in (1, 2))
    assert [crossing.far for crossing in one][1:3] == [True, True] and not any(c.near for c in one[:2])
    assert [crossing.near for crossing in two][1:3] == [True, True] and not any(c.far for c in two[:2])
    # Straight from home to whoever needs it: nothing is passed on.
    for program, rank in ((compiled("all_gather", 0)[1], 1), (compiled("ulysses", 0)[2], 2)):
        assert not any(any(crossing) for crossing in crossings(program, host(HOSTS[0], rank)))


class Ways:
    """A post that notes what it is told to do; what it starts has arrived at a mark named after it."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def begin(self) -> int:
        return 0

    def start(self, step: int, sends: Any, receives: Any, after: Sequence[Any]) -> Exchange:
        self.log.append((self.name, step, [s[1] for s in sends], [r[1] for r in receives], tuple(after)))
        return Exchange(arrived=f"{self.name} {step}" if sends or receives else None)  # type: ignore[arg-type]

    def wait(self, exchange: Exchange) -> None:
        self.log.append((self.name, "wait", exchange.arrived))


def test_messages_are_split_by_link_in_order_and_wait_for_the_latest_of_the_other_kind() -> None:
    log: list[Any] = []
    marks = [type("C", (), {"near": near, "far": far}) for near, far in ((False, False), (True, True), (True, False))]
    post = MixedPost(Ways("near", log), Ways("far", log), (0, 1), marks)  # type: ignore[arg-type]
    x = torch.zeros(1)
    post.begin()
    post.wait(post.start(0, [(x, 2), (x, 1), (x, 3)], [(x, 1), (x, 3)], ["begin"]))
    post.start(1, [(x, 1)], [], ["begin"])
    post.start(2, [(x, 1)], [(x, 2)], ["begin"])
    assert log == [
        ("near", 0, [1], [1], ("begin",)),
        ("far", 0, [2, 3], [3], ("begin",)),
        ("near", "wait", "near 0"),
        ("far", "wait", "far 0"),
        ("near", 1, [1], [], ("begin", "far 0")),
        ("far", 1, [], [], ("begin", "near 0")),
        ("near", 2, [1], [], ("begin", "far 0")),
        ("far", 2, [], [2], ("begin",)),
    ]
    post.begin()  # a new pass waits for nothing of the one before
    post.start(1, [(x, 1)], [], ["begin"])
    assert log[-2:] == [("near", 1, [1], [], ("begin",)), ("far", 1, [], [], ("begin",))]


def _mixed(rank: int) -> list[str]:
    """Largest errors of what is wrong, over two lengths and all modes and divisions into hosts."""
    group, wrong = dist.group.WORLD, []
    assert group is not None
    for hosts in (*HOSTS, ONE_HOST):
        transport = MixedTransport.__new__(MixedTransport)
        transport.messages = P2PTransport(group, torch.device("cpu"))
        near = P2PTransport(group, torch.device("cpu"))
        transport.peers = Carrier(near, host(hosts, rank))  # type: ignore[assignment]
        for schedule in SCHEDULES:
            attention = ContextParallelAttention(group, schedule=schedule, kernel="reference", options=OPTIONS)
            attention._links[torch.device("cpu")] = (transport, BufferPool(torch.device("cpu")))
            # Two sequences, ranks that share a head of the keys, and ranks without tokens.
            for length, batch, kv_heads in (
                (32, 1, 4),
                (35, 1, 4),
                *(((21, 2, 2), (3, 2, 2)) if hosts == ONE_HOST else ()),
            ):
                whole = random_qkv(length, batch, 8, kv_heads, 8, torch.float64, seed=length)
                truth = dense_attention(*whole, True)
                layout = attention.layout(length)
                *leaves, grad_out = (shard(x, layout, rank) for x in whole)
                for _ in range(2):
                    three = [x.detach().requires_grad_() for x in leaves]
                    out = attention(*three, length=length)
                    first = torch.autograd.grad(out, three, grad_out, retain_graph=True)
                    found = (out.detach(), *torch.autograd.grad(out, three, grad_out))
                    if not all(map(torch.equal, first, found[1:])):
                        wrong.append(f"rank {rank}, {hosts}, {schedule}, {length}: another backward is another")
                    for name, value in zip(("out", "dq", "dk", "dv"), found, strict=True):
                        error = relative_error(value, shard(truth[name], layout, rank))
                        if not error < 1e-12:
                            wrong.append(f"rank {rank}, {hosts}, {schedule}, {length}, {name}: {error}")
            programs = [kinds for engine in attention._engines.values() for kinds in engine.kinds.values()]
            posts = [kind.messages.post for kinds in programs for kind in kinds.values()]
            if hosts == ONE_HOST:  # much is read where the senders have it
                met = sum(post._mailbox.met for post in posts)
                assert met or schedule == "all_gather", f"{schedule}: {met}"
            else:  # both kinds were used
                assert any(isinstance(post, MixedPost) for post in posts), (hosts, schedule)
    return wrong


def test_every_mode_is_exact_over_two_kinds_of_links() -> None:
    wrong = [line for lines in run_distributed(_mixed, 4) for line in lines]
    assert not wrong, "\n".join(wrong)
