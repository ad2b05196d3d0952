"""Where what a pass sends lies in the memory that its peers read: all ranks agree, and nothing overlaps."""

from __future__ import annotations

import pytest

from megatron_longctx.attention.post import outbox_of
from megatron_longctx.attention.program import programs
from megatron_longctx.comm import OutboxBuilder
from megatron_longctx.schedules import RESULTS, SCHEDULES, Kind, PlanOptions, Workload, backward_plan, build_plan
from megatron_longctx.schedules.simulate import published_bytes

ROW_BYTES: dict[Kind, tuple[int, ...]] = {
    Kind.Q: (64,),
    Kind.KV: (32,),
    Kind.OUT: (64, 8),
    Kind.Q_GRAD: (64, 64, 64, 8),
    Kind.DQ: (64,),
    Kind.DKV: (32,),
}


def row_bytes(kind: Kind, parts: int) -> tuple[int, ...]:
    return tuple(size // parts for size in ROW_BYTES[kind])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backward", [0, 1])
def test_receivers_expect_what_senders_offer(schedule: str, backward: int) -> None:
    n = 4
    plan = build_plan(schedule, n, 16 * n + 3, options=PlanOptions(inner_size=2))
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


@pytest.mark.parametrize("schedule", ["all_gather", "tasp", "ulysses", "helper"])
def test_regions_do_not_overlap_and_hold_their_messages(schedule: str) -> None:
    program = programs(build_plan(schedule, 4, 131), 1)[1]
    box = outbox_of(program, row_bytes)
    starts = sorted(box.regions.values())
    assert len(set(starts)) == len(starts) and all(start % 256 == 0 for start in starts)
    ends = dict(zip(starts, [*starts[1:], box.num_bytes], strict=True))
    for messages in box.sends:
        for message in messages:
            start = max(s for s in starts if s <= message.offset)
            assert message.offset + message.num_bytes <= ends[start]
    sent = {name[0] for name in box.regions}
    assert ("result" in sent) == any(m.block.kind in RESULTS for step in program.steps for m in step.sends)


def test_regions_without_a_gap_know_their_neighbours() -> None:
    builder = OutboxBuilder()
    assert [builder.region(name, size) for name, size in (("a", 512), ("b", 256), ("c", 10), ("d", 256))] == [
        0, 512, 768, 1024]  # fmt: skip
    assert builder.region("b", 256) == 512
    box = builder.build(())
    assert box.adjacent == {"a": "b", "b": "c"} and box.num_bytes == 1280


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backward", [0, 1])
def test_the_price_of_peer_memory_is_what_is_laid_out(schedule: str, backward: int) -> None:
    n, workload = 4, Workload(8, 8, 32, element_bytes=2)
    plan = build_plan(schedule, n, 4 * 256, options=PlanOptions(inner_size=2))
    sizes = {kind: workload.token_bytes(kind) for kind in Kind}
    boxes = [
        outbox_of(programs(plan, rank)[backward], lambda kind, parts: (sizes[kind] // parts,)) for rank in range(n)
    ]
    passes = backward_plan(plan) if backward else plan
    assert published_bytes(passes, workload) == pytest.approx(max(box.num_bytes for box in boxes), rel=0.01)
