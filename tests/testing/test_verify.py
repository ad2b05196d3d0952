"""`verify` finds every way to break a plan, with a message that names it."""

from dataclasses import replace

import pytest

from megatron_longctx.core.plans import Attend, Block, Heads, Kind, Move, Plan, Slice, build_plan, transpose
from megatron_longctx.core.plans.mask import documents
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


RING, HELPER = ring(), helper_plan(2, 8)
MESSAGES = {
    "lost on the last hop": (
        with_moves(RING, 2, lambda moves: [m for m in moves if m.block.home != 0]),
        r"^ring, step 3: rank 3 attends kv0\[0:4\] before it arrives$",
    ),
    "lost on the first hop": (
        with_moves(RING, 0, lambda moves: [m for m in moves if m.block.home != 0]),
        r"^ring, step 1: kv0\[0:4\] from 1 to 2: the source does not hold it yet$",
    ),
    "passed on in the step in which it arrives": (
        with_moves(RING, 0, lambda moves: [*moves, Move(kv(0, 0, 4), 1, 2)]),
        r"kv0\[0:4\] from 1 to 2: the source does not hold it yet",
    ),
    "a part again": (
        with_moves(RING, 0, lambda moves: [*moves, Move(kv(0, 3, 4), 0, 1)]),
        r"^ring, step 0: kv0\[3:4\] reaches rank 1 twice$",
    ),
    "home again": (
        with_moves(RING, 1, lambda moves: [*moves, Move(kv(0, 0, 4), 1, 0)]),
        r"kv0\[0:4\] reaches rank 0 twice",
    ),
    "computed twice": (
        with_calls(RING, 1, 2, *attends(RING, 1, 2) * 2),
        r"^ring: query slot 0 of rank 2 attends some of the key slots 0\.\.3 of rank 1 twice$",
    ),
    "not computed": (with_calls(RING, 1, 2), r"^ring: computes 120 of 136 visible pairs$"),
    "a result lost": (
        with_moves(HELPER, 2, lambda _: []),
        r"^helper: out1\[2:4\] by 0 never reaches its home, nor do 0 more results$",
    ),
    "half of a result": (
        with_moves(HELPER, 2, lambda moves: [moves[0]._replace(block=Block(Kind.OUT, 1, 2, 3, 0))]),
        r"step 2: out1\[2:3\] by 0 from 0 to 1: the source has nothing of it computed that is not sent yet",
    ),
    "a result that is passed on twice": (
        with_moves(tangled_plan(12), 4, lambda moves: moves * 2),
        r"step 4: out2\[0:3\] by 1 from 0 to 2: reaches its home more often than it was sent",
    ),
}


@pytest.mark.parametrize("how", MESSAGES)
def test_messages_name_the_place(how):
    """`tests/core/plans/test_broken_modes.py` breaks plans of all modes so, at random places."""
    refuse(*MESSAGES[how])


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
