"""Where what a pass sends lies in the memory that its peers read: all ranks agree, and nothing overlaps."""

from __future__ import annotations

import pytest

from megatron_longctx.attention.post import outbox_of
from megatron_longctx.attention.program import HOME, programs
from megatron_longctx.comm import OutboxBuilder
from megatron_longctx.schedules import SCHEDULES, Heads, Kind, PlanOptions, Workload, backward_plan, build_plan, keeping
from megatron_longctx.schedules.publishing import published_bytes

ROW_BYTES: dict[Kind, tuple[int, ...]] = {
    Kind.Q: (64,),
    Kind.KV: (32,),
    Kind.OUT: (64, 8),
    Kind.Q_GRAD: (64, 64, 64, 8),
    Kind.GRAD: (64,),
    Kind.DQ: (64,),
    Kind.DKV: (32,),
}


def row_bytes(kind: Kind, parts: int) -> tuple[int, ...]:
    return tuple(size // parts for size in ROW_BYTES[kind])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("keep", [False, True], ids=["fetched again", "kept"])
def test_receivers_expect_what_senders_offer(schedule: str, backward: int, keep: bool) -> None:
    n = 4
    plan = build_plan(schedule, n, 16 * n + 3, options=PlanOptions(inner_size=2))
    plan = keeping(plan) if keep else plan
    compiled = [programs(plan, rank)[backward] for rank in range(n)]
    boxes = [outbox_of(program, row_bytes) for program in compiled]
    for rank, program in enumerate(compiled):
        for t, step in enumerate(program.steps):
            for peer in range(n):
                offered = [m.num_bytes for m in boxes[peer].sends[t] if m.peer == rank]
                expected = [
                    r.block.tokens * size
                    for r in step.receives
                    if r.peer == peer
                    for size in row_bytes(r.block.kind, r.block.heads.parts)
                ]
                assert offered == expected


@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backward", [0, 1])
def test_memory_is_used_again_only_when_it_has_been_read(schedule: str, backward: int, n: int) -> None:
    """What is passed on waits by itself in its step; results wait with the messages of the step before."""
    plan = build_plan(schedule, n, 16 * n + 3, options=PlanOptions(inner_size=2))
    for rank in range(n):
        program = programs(plan, rank)[backward]
        box = outbox_of(program, row_bytes)
        made = {away.result: t for t, step in enumerate(program.steps) for call in step.calls for away in call.away}
        kept = [name for name in box.regions if name[0] == "home"]  # type: ignore[index]
        messages: list[tuple[int, int, int, int]] = []  # step, the step whose messages must be done, start, stop
        for t, (step, sent) in enumerate(zip(program.steps, box.sends, strict=True)):
            offered = iter(sent)
            for send in step.sends:
                kind = send.block.kind
                for _ in row_bytes(kind, send.block.heads.parts):
                    message = next(offered)
                    assert message.offset + message.num_bytes <= box.num_bytes
                    if send.place is None:
                        before = made[send.result] - 1
                    elif send.place.slot != HOME:
                        before = t
                    else:
                        continue
                    start, stop = message.offset, message.offset + message.num_bytes
                    assert all(
                        start >= box.regions[name] + program.num_tokens * row_bytes(name[1], name[2].parts)[name[3]]  # type: ignore[index]
                        for name in kept
                    )
                    messages.append((t, before, start, stop))
        for i, (later, before, start, stop) in enumerate(messages):
            for earlier, _, other_start, other_stop in messages[:i]:
                if start < other_stop and other_start < stop:
                    (awaiting,) = [u for u, steps in box.awaits.items() if earlier in steps]
                    assert earlier + 2 <= awaiting <= before, (rank, earlier, later)
        awaited = [step for steps in box.awaits.values() for step in steps]
        assert len(set(awaited)) == len(awaited)  # a flag can be taken once


def test_a_ring_passes_everything_on_through_two_regions() -> None:
    n, tokens = 8, 64
    boxes = [outbox_of(program, row_bytes) for program in programs(build_plan("ring", n, n * tokens, causal=False), 3)]
    assert boxes[0].num_bytes == (1 + 2) * tokens * 32
    assert boxes[0].awaits == {3: (1,), 4: (2,), 5: (3,), 6: (4,)}
    # Seven results besides, each of which is written a step before it is sent.
    assert boxes[1].num_bytes == (1 + 2 + 4) * tokens * 32


def test_regions_without_a_gap_know_their_neighbours() -> None:
    builder = OutboxBuilder()
    assert [builder.region(name, size) for name, size in (("a", 512), ("b", 256), ("c", 10), ("d", 256))] == [
        0, 512, 768, 1024]  # fmt: skip
    assert builder.region("b", 256) == 512
    box = builder.build(())
    assert box.adjacent == {"a": "b", "b": "c"} and box.num_bytes == 1280


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("keep", [False, True], ids=["fetched again", "kept"])
def test_the_price_of_peer_memory_is_what_is_laid_out(schedule: str, backward: int, keep: bool) -> None:
    n, workload = 4, Workload(8, 8, 32, element_bytes=2)
    plan = build_plan(schedule, n, 4 * 256, options=PlanOptions(inner_size=2))
    plan = keeping(plan) if keep else plan
    sizes = {kind: workload.token_bytes(kind) for kind in Kind}
    boxes = [
        outbox_of(programs(plan, rank)[backward], lambda kind, parts: (sizes[kind] // parts,)) for rank in range(n)
    ]
    passes = backward_plan(plan) if backward else plan
    assert published_bytes(passes, workload) == pytest.approx(max(box.num_bytes for box in boxes), rel=0.01)


def test_parts_of_the_heads_lie_side_by_side() -> None:
    """So that one copy fills those of several peers; a rank leaves out its own part."""
    program = programs(build_plan("ulysses", 4, 4 * 256), 1)[0]
    box = outbox_of(program, row_bytes)
    for kind in (Kind.Q, Kind.KV):
        names = [("home", kind, Heads(part, 4), 0) for part in (0, 2, 3)]
        assert [box.adjacent.get(name) for name in names[:2]] == names[1:]
        size = 256 * row_bytes(kind, 4)[0]
        assert [box.regions[name] - box.regions[names[0]] for name in names] == [0, size, 2 * size]


@pytest.mark.parametrize("backward", [0, 1])
def test_results_of_a_call_lie_side_by_side_field_by_field(backward: int) -> None:
    """So that one copy fills those of several peers, and one more their lse."""
    program = programs(build_plan("ulysses", 4, 4 * 256), 1)[backward]
    box = outbox_of(program, row_bytes)
    (call,) = [call for step in program.steps for call in step.calls]
    for kind in (Kind.DKV, Kind.DQ) if backward else (Kind.OUT,):
        results = [away.result for away in call.away if away.block.kind is kind]
        assert [program.outgoing[result].home for result in results] == [0, 2, 3]
        for i, size in enumerate(row_bytes(kind, 4)):
            names = [("result", result, i) for result in results]
            assert [box.adjacent.get(name) for name in names[:2]] == names[1:]
            assert [box.regions[name] - box.regions[names[0]] for name in names] == [0, 256 * size, 512 * size]
