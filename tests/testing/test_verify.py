"""`verify` finds every way to break a plan, with a message that names it."""

from dataclasses import replace

import pytest

from megatron_longctx.core.plans import Attend, Block, Heads, Kind, Move, Plan, Slice, build_plan, transpose
from megatron_longctx.core.plans.mask import documents, full
from megatron_longctx.testing.verify import PlanError, verify
from tests.shared.plans import attend, helper_plan, kv, queries, tangled_plan, with_calls, with_moves


def ring() -> Plan:
    """Return the ring of 4 ranks with 4 tokens each: rank r attends to the block of r - t in step t."""
    return build_plan("ring", 4, 16)


def attends(plan: Plan, t: int, rank: int) -> tuple[Attend, ...]:
    return plan.steps[t].attends[rank]


def refuse(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        verify(plan)
    assert isinstance(caught.value, ValueError)


def test_the_unbroken_plans_are_correct():
    for plan in (ring(), build_plan("zigzag", 3, 12), helper_plan(2, 8), helper_plan(3, 12), tangled_plan(12)):
        verify(plan)
        verify(transpose(plan))


def test_dropped_send():
    # The last hop of block 0, from rank 2 to rank 3: nobody passes it on, rank 3 misses it.
    plan = with_moves(ring(), 2, lambda moves: [m for m in moves if m.block.home != 0])
    refuse(plan, r"^ring, step 3: rank 3 attends kv0\[0:4\] before it arrives$")
    # The first hop: rank 1 cannot attend to it. The message names the earliest step.
    plan = with_moves(ring(), 0, lambda moves: [m for m in moves if m.block.home != 0])
    refuse(plan, r"^ring, step 1: kv0\[0:4\] from 1 to 2: the source does not hold it yet$")
    backward = transpose(helper_plan(2, 8))
    plan = with_moves(backward, 0, lambda moves: [m for m in moves if m.block.kind is not Kind.Q_GRAD])
    refuse(plan, r"^helper, step 1: rank 0 attends q_grad1\[2:4\] before it arrives$")
    # Part of it.
    plan = with_moves(
        ring(), 2, lambda moves: [m._replace(block=kv(0, 0, 3)) if m.block.home == 0 else m for m in moves]
    )
    refuse(plan, r"rank 3 attends kv0\[0:4\] before it arrives")


def test_pair_computed_twice():
    plan = ring()
    twice = with_calls(plan, 1, 2, *attends(plan, 1, 2) * 2)
    refuse(twice, r"^ring: query slot 0 of rank 2 attends some of the key slots 0\.\.3 of rank 1 twice$")
    # In another step too.
    refuse(with_calls(plan, 2, 2, *attends(plan, 2, 2), *attends(plan, 0, 2)), "slot 0 of rank 2 .* of rank 2 twice")
    # The same keys twice in one call.
    double = attend((queries(2, 0, 4),), (kv(1, 0, 4), kv(1, 3, 4)), False)
    refuse(with_calls(plan, 1, 2, double), r"slot 0 of rank 2 attends some of the key slots 3\.\.3 of rank 1 twice")
    # It does not compensate a missing one.
    halves = [attend((queries(2, 0, 2),), (kv(1, 0, 4),), False)] * 2
    refuse(with_calls(plan, 1, 2, *halves), r"slot 0 of rank 2 attends some of the key slots 0\.\.3 of rank 1 twice")


def test_heads_are_distinguished():
    plan = build_plan("ulysses", 2, 8)
    whole = attends(plan, 1, 0)[0]
    every = Attend(
        *(tuple(b._replace(heads=Heads()) for b in blocks) for blocks in (whole.queries, whole.keys)), whole.slices
    )
    refuse(with_calls(plan, 1, 0, every), "twice")
    mixed = whole._replace(keys=every.keys)
    refuse(with_calls(plan, 1, 0, mixed), "queries and keys of a call must be of the same heads")
    other = [tuple(b._replace(heads=Heads(2, 2)) for b in blocks) for blocks in (whole.queries, whole.keys)]
    refuse(with_calls(plan, 1, 0, Attend(*other, whole.slices)), "has no such part of the heads")


def test_a_band_runs_on_in_the_next_block():
    joined = attend((queries(1, 0, 4),), (kv(1, 0, 1), kv(1, 1, 4)), True)
    verify(with_calls(ring(), 0, 1, joined))
    swapped = attend((queries(1, 0, 4),), (kv(1, 1, 4), kv(1, 0, 1)), True)
    refuse(with_calls(ring(), 0, 1, swapped), "is not all visible")
    # Queries 2 and 3 of the joint call see the first keys of rank 1, the rest of which other calls compute.
    own = (
        attend((queries(1, 0, 2),), (kv(1, 0, 2),), True),
        attend((queries(1, 2, 4),), (kv(1, 2, 4),), True),
        attend((queries(1, 2, 3),), (kv(1, 1, 2),), False),
    )
    joint = (
        attend((queries(1, 0, 4),), (kv(0, 2, 4), kv(1, 0, 2)), True),
        attend((queries(1, 0, 1),), (kv(0, 3, 4),), False),
        attend((queries(1, 0, 4),), (kv(0, 0, 2),), False),
    )
    plan = with_calls(with_calls(ring(), 0, 1, *own), 1, 1, *joint)
    verify(plan)
    verify(transpose(plan))
    twice = (*joint, attend((queries(1, 3, 4),), (kv(1, 0, 1),), False))
    refuse(with_calls(plan, 1, 1, *twice), r"slot 3 of rank 1 attends some of the key slots 0\.\.0 of rank 1 twice")


def test_missing_pair():
    refuse(with_calls(ring(), 1, 2), r"^ring: computes 120 of 136 visible pairs$")
    refuse(with_calls(ring(), 1, 2, attend((queries(2, 0, 4),), (kv(1, 0, 3),), False)), "computes 132 of 136")
    refuse(with_calls(build_plan("ring", 2, full(4)), 0, 0), "computes 12 of 16")


def test_pairs_that_the_mask_hides():
    plan = ring()
    for is_causal in (False, True):
        future = attend((queries(1, 0, 4),), (kv(2, 0, 4),), is_causal)
        refuse(with_calls(plan, 1, 1, future), r"^ring, step 1, rank 1: .*kv2.* of ranks \(1, 2\) is not all visible$")
    refuse(with_calls(plan, 0, 1, attend((queries(1, 0, 4),), (kv(1, 0, 4),), False)), "is not all visible")
    # Both ends of a call over [1 6] x [2 3] may look right; slot by slot, query 1 comes before key 2.
    plan = build_plan("zigzag", 2, 8)
    refuse(with_calls(plan, 1, 0, attend((queries(0, 1, 3),), (kv(1, 0, 2),), True)), "is not all visible")
    # Across documents, and beyond a window.
    for mask in (documents([6, 2]), documents([8], window=(5, 0))):
        of_mask = replace(build_plan("ring", 2, 8), mask=mask)
        refuse(of_mask, r"is not all visible")
    outside = attends(plan, 0, 0)[0]._replace(slices=(Slice(0, 5, 0, 1),))
    refuse(with_calls(plan, 0, 0, outside), "a slice is not within its queries and keys")


@pytest.mark.parametrize(("source", "destination"), [(1, 1), (0, 4), (4, 0), (0, -1), (-1, 0)])
def test_moves_to_the_source_or_to_no_rank(source, destination):
    block = kv(max(source, 0) % 4, 0, 4)
    plan = with_moves(ring(), 0, lambda moves: [*moves, Move(block, source, destination)])
    refuse(plan, f"from {source} to {destination}: source and destination must be two ranks below 4")


def test_send_of_a_block_that_the_source_does_not_hold():
    plan = with_moves(ring(), 0, lambda moves: [*moves, Move(kv(3, 0, 4), 1, 0)])
    refuse(plan, r"^ring, step 0: kv3\[0:4\] from 1 to 0: the source does not hold it yet$")
    # What arrives in a step can be sent on in the next one only.
    plan = with_moves(ring(), 0, lambda moves: [*moves, Move(kv(0, 0, 4), 1, 2)])
    refuse(plan, r"kv0\[0:4\] from 1 to 2: the source does not hold it yet")
    # A result that was not computed there, or is in that step.
    plan = with_moves(helper_plan(3, 12), 2, lambda moves: [moves[0]._replace(source=1)])
    refuse(plan, r"out2\[0:4\] by 0 from 1 to 2: the source does not hold it yet")
    plan = helper_plan(2, 8)
    (send,) = plan.steps[2].moves
    plan = with_moves(with_moves(plan, 2, lambda _: []), 1, lambda moves: [*moves, send])
    refuse(plan, r"step 1: out1\[2:4\] by 0 from 0 to 1: the source has nothing of it computed that is not sent yet")


def test_block_received_twice():
    plan = with_moves(ring(), 1, lambda moves: [*moves, Move(kv(0, 0, 4), 0, 1)])
    refuse(plan, r"^ring, step 1: kv0\[0:4\] reaches rank 1 twice$")
    plan = with_moves(ring(), 0, lambda moves: [*moves, Move(kv(0, 3, 4), 0, 1)])
    refuse(plan, r"step 0: kv0\[3:4\] reaches rank 1 twice")
    # A rank's own block returns.
    plan = with_moves(ring(), 1, lambda moves: [*moves, Move(kv(0, 0, 4), 1, 0)])
    refuse(plan, r"kv0\[0:4\] reaches rank 0 twice")


def test_result_lost():
    plan = with_moves(helper_plan(2, 8), 2, lambda _: [])
    refuse(plan, r"^helper: out1\[2:4\] by 0 never reaches its home, nor do 0 more results$")
    plan = with_moves(transpose(build_plan("zigzag", 2, 8)), 2, lambda moves: moves[:1])
    refuse(plan, r"^zigzag: dkv0\[0:2\] by 1 never reaches its home, nor do 0 more results$")
    # It leaves and stays with another rank.
    plan = with_moves(helper_plan(3, 12), 2, lambda moves: [moves[0]._replace(destination=1)])
    refuse(plan, r"out2\[0:4\] by 0 never reaches its home")
    # Only half of it returns.
    plan = with_moves(helper_plan(2, 8), 2, lambda moves: [moves[0]._replace(block=Block(Kind.OUT, 1, 2, 3, 0))])
    refuse(plan, r"step 2: out1\[2:3\] by 0 from 0 to 1: the source has nothing of it computed that is not sent yet")


def test_result_delivered_twice():
    plan = with_moves(helper_plan(2, 8), 2, lambda moves: moves * 2)
    refuse(plan, r"^helper, step 2: out1\[2:4\] by 0 from 0 to 1: the source has nothing of it computed that is not")
    # On two ways.
    plan = with_moves(tangled_plan(12), 2, lambda moves: [*moves, moves[0]._replace(destination=2)])
    refuse(plan, r"step 2: out2\[0:3\] by 1 from 1 to 2: the source has nothing of it computed that is not sent yet")
    # By the rank that passes it on.
    plan = with_moves(tangled_plan(12), 4, lambda moves: moves * 2)
    refuse(plan, r"step 4: out2\[0:3\] by 1 from 0 to 2: reaches its home more often than it was sent")


def test_result_cut():
    # Of two results for query slot 2, one is also for slot 3: they cannot leave without it.
    rows = ((2, 4, 0, 2), (2, 3, 2, 4), (3, 4, 2, 4))
    calls = [attend((queries(1, a, b),), (kv(0, c, d),), False) for a, b, c, d in rows]
    plan = with_calls(helper_plan(2, 8), 1, 0, *calls)
    verify(plan)  # one message takes all three along
    halves = [Move(Block(Kind.OUT, 1, i, i + 1, 0), 0, 1) for i in (2, 3)]
    refuse(with_moves(plan, 2, lambda _: halves), r"out1\[2:3\] by 0 from 0 to 1: cuts a result")


@pytest.mark.parametrize(
    "block", [kv(0, 0, 5), kv(0, 2, 2), kv(0, 3, 1), kv(0, -1, 2), kv(4, 0, 1), kv(-1, 0, 1)], ids=str
)
def test_spans_outside_their_home(block):
    plan = with_moves(ring(), 1, lambda moves: [*moves, Move(block, 0, 1)])
    refuse(plan, r"^ring, step 1: .* is not a span of its home rank's tokens$")
    slices = attends(ring(), 1, 2)[0].slices
    refuse(with_calls(ring(), 1, 2, Attend((queries(2, 0, 4),), (block,), slices)), "step 1: .* is not a span")
    of_queries = Attend((block._replace(kind=Kind.Q),), (kv(1, 0, 4),), slices)
    refuse(with_calls(ring(), 1, 2, of_queries), "step 1: .* is not a span")
