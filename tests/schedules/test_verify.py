"""Every way to break a plan is found by `verify`, with a message that names it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_longctx.schedules import (
    Attend,
    Block,
    Kind,
    Move,
    Plan,
    PlanError,
    Step,
    build_plan,
    seal,
    transpose,
    verify,
)
from megatron_longctx.testing.plans import helper_plan, kv, queries, tangled_plan


def ring() -> Plan:
    """Contiguous, 4 ranks with 4 tokens each: rank r attends the block of r - t in step t."""
    return build_plan("ring", 4, 16)


def with_step(plan: Plan, t: int, edit: Callable[[Step], Step]) -> Plan:
    steps = list(plan.steps)
    steps[t] = edit(steps[t])
    return replace(plan, steps=tuple(steps))


def with_moves(plan: Plan, t: int, edit: Callable[[list[Move]], list[Move]]) -> Plan:
    return with_step(plan, t, lambda step: step._replace(moves=tuple(edit(list(step.moves)))))


def with_attends(plan: Plan, t: int, rank: int, attends: tuple[Attend, ...]) -> Plan:
    def edit(step):
        return step._replace(attends=tuple(attends if r == rank else a for r, a in enumerate(step.attends)))

    return with_step(plan, t, edit)


def attends(plan: Plan, t: int, rank: int) -> tuple[Attend, ...]:
    return plan.steps[t].attends[rank]


def refuse(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        verify(plan)


def test_the_plans_that_are_broken_here_are_whole():
    for plan in (ring(), build_plan("zigzag", 3, 12), helper_plan(2, 8), helper_plan(3, 12), tangled_plan(12)):
        verify(plan)
        verify(seal(transpose(plan)))


def test_dropped_send():
    # The last hop of block 0, from rank 2 to rank 3: nobody passes it on, rank 3 misses it.
    plan = with_moves(ring(), 2, lambda moves: [m for m in moves if m.block.home != 0])
    refuse(plan, r"^ring, step 3: rank 3 attends kv0\[0:4\] before it arrives$")
    # The first hop: rank 1 cannot attend it, and this is said of the earliest step.
    plan = with_moves(ring(), 0, lambda moves: [m for m in moves if m.block.home != 0])
    refuse(plan, r"^ring, step 1: kv0\[0:4\] from 1 to 2: the source does not hold it yet$")


def test_dropped_input_of_backward():
    backward = seal(transpose(helper_plan(2, 8)))
    plan = with_moves(backward, 0, lambda moves: [m for m in moves if m.block.kind is not Kind.Q_GRAD])
    refuse(plan, r"^helper, step 1: rank 0 attends q_grad1\[2:4\] before it arrives$")


def test_plain_queries_are_not_enough_for_backward():
    backward = seal(transpose(helper_plan(2, 8)))

    def forget_gradients(moves):
        return [m._replace(block=m.block._replace(kind=Kind.Q)) if m.block.kind is Kind.Q_GRAD else m for m in moves]

    refuse(with_moves(backward, 0, forget_gradients), r"attends q_grad1\[2:4\] before it arrives")


def test_pair_computed_twice():
    plan = ring()
    refuse(
        with_attends(plan, 1, 2, attends(plan, 1, 2) * 2), "query slot 3 of rank 2 attends key slot 0 of rank 1 twice"
    )
    # In another step too.
    refuse(with_attends(plan, 2, 2, attends(plan, 2, 2) + attends(plan, 0, 2)), "slot 3 of rank 2 .* of rank 2 twice")
    # A single pair: the causal block once more as its last query and first key.
    extra = Attend((queries(1, 3, 4),), (kv(1, 0, 1),), False)
    refuse(
        with_attends(plan, 1, 1, (*attends(plan, 1, 1), extra)), "slot 3 of rank 1 attends key slot 0 of rank 1 twice"
    )
    # The same keys twice in one call.
    double = Attend((queries(2, 0, 4),), (kv(1, 0, 4), kv(1, 3, 4)), False)
    refuse(with_attends(plan, 1, 2, (double,)), "slot 3 of rank 2 attends key slot 3 of rank 1 twice")


def test_a_pair_computed_twice_does_not_make_up_for_a_missing_one():
    plan = ring()
    halves = tuple(Attend((queries(2, *rows),), (kv(1, 0, 4),), False) for rows in ((0, 2), (0, 2)))
    refuse(with_attends(plan, 1, 2, halves), "query slot 1 of rank 2 attends key slot 0 of rank 1 twice")


def test_causal_calls_that_touch_without_overlapping_are_allowed():
    # The diagonal block cut into two causal blocks and the square below them.
    parts = (
        Attend((queries(1, 0, 2),), (kv(1, 0, 2),), True),
        Attend((queries(1, 2, 4),), (kv(1, 2, 4),), True),
        Attend((queries(1, 2, 4),), (kv(1, 0, 2),), False),
    )
    verify(with_attends(ring(), 0, 1, parts))
    crossing = (*parts[:2], Attend((queries(1, 1, 4),), (kv(1, 0, 2),), False))
    refuse(with_attends(ring(), 0, 1, crossing), "slot 1 of rank 1 attends key slot 0 of rank 1 twice")


def test_a_causal_call_over_two_blocks_of_keys():
    # Keys of two blocks are one sequence for the call, so the diagonal runs on in the second.
    joined = (Attend((queries(1, 0, 4),), (kv(1, 0, 1), kv(1, 1, 4)), True),)
    verify(with_attends(ring(), 0, 1, joined))
    swapped = (Attend((queries(1, 0, 4),), (kv(1, 1, 4), kv(1, 0, 1)), True),)
    refuse(with_attends(ring(), 0, 1, swapped), "the keys of a causal call must be in the order of their tokens")
    # A causal call reaching into the first keys of a block that is computed whole elsewhere.
    twice = (*joined, Attend((queries(1, 3, 4),), (kv(1, 1, 2),), True))
    refuse(with_attends(ring(), 0, 1, twice), "slot 3 of rank 1 attends key slot 1 of rank 1 twice")


def test_a_causal_call_whose_diagonal_starts_in_another_block():
    # Queries 2 and 3 of the joint call see the first keys of rank 1, the rest of which other calls compute.
    own = (
        Attend((queries(1, 0, 2),), (kv(1, 0, 2),), True),
        Attend((queries(1, 2, 4),), (kv(1, 2, 4),), True),
        Attend((queries(1, 2, 3),), (kv(1, 1, 2),), False),
    )
    joint = (
        Attend((queries(1, 0, 4),), (kv(0, 2, 4), kv(1, 0, 2)), True),
        Attend((queries(1, 0, 1),), (kv(0, 3, 4),), False),
        Attend((queries(1, 0, 4),), (kv(0, 0, 2),), False),
    )
    plan = with_attends(with_attends(ring(), 0, 1, own), 1, 1, joint)
    verify(plan)
    verify(seal(transpose(plan)))
    twice = (*joint, Attend((queries(1, 3, 4),), (kv(1, 0, 1),), False))
    refuse(with_attends(plan, 1, 1, twice), "slot 3 of rank 1 attends key slot 0 of rank 1 twice")


def test_missing_pair():
    refuse(with_attends(ring(), 1, 2, ()), r"^ring: computes 120 of 136 visible pairs$")
    short = (Attend((queries(2, 0, 4),), (kv(1, 0, 3),), False),)
    refuse(with_attends(ring(), 1, 2, short), r"computes 132 of 136")
    but_one = (Attend((queries(2, 0, 3),), (kv(1, 0, 4),), False), Attend((queries(2, 3, 4),), (kv(1, 0, 3),), False))
    refuse(with_attends(ring(), 1, 2, but_one), r"computes 135 of 136")
    full = build_plan("ring", 2, 4, False)
    refuse(with_attends(full, 0, 0, ()), r"computes 12 of 16")


def test_use_before_arrival():
    plan = ring()
    early = with_attends(with_attends(plan, 1, 1, ()), 0, 1, attends(plan, 0, 1) + attends(plan, 1, 1))
    refuse(early, r"^ring, step 0: rank 1 attends kv0\[0:4\] before it arrives$")


def test_use_of_more_than_arrived():
    plan = with_moves(
        ring(), 2, lambda moves: [m._replace(block=kv(0, 0, 3)) if m.block.home == 0 else m for m in moves]
    )
    refuse(plan, r"rank 3 attends kv0\[0:4\] before it arrives")


def test_keys_after_their_queries():
    plan = ring()
    future = (Attend((queries(1, 0, 4),), (kv(2, 0, 4),), False),)
    refuse(
        with_attends(plan, 1, 1, future), r"step 1, rank 1: .*kv2\[0:4\] full: its last key lies after its first query"
    )
    future = (Attend((queries(1, 0, 4),), (kv(2, 0, 4),), True),)
    refuse(with_attends(plan, 1, 1, future), r"kv2\[0:4\] causal: key 0 lies after its query")
    whole = (Attend((queries(1, 0, 4),), (kv(1, 0, 4),), False),)
    refuse(with_attends(plan, 0, 1, whole), r"kv1\[0:4\] full: its last key lies after its first query")


def test_a_causal_call_that_crosses_the_mask_in_its_middle():
    # zigzag(2, 8): rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5. Both ends of a call over [1 6] x [2 3] may look right
    # on their own; slot by slot, query 1 comes before key 2.
    plan = build_plan("zigzag", 2, 8)
    crossing = (Attend((queries(1, 0, 4),), (kv(0, 0, 4),), True),)
    refuse(with_attends(plan, 1, 1, crossing), r"kv0\[0:4\] causal: key 2 lies after its query")
    crossing = (Attend((queries(0, 1, 3),), (kv(1, 0, 2),), True),)
    refuse(with_attends(plan, 1, 0, crossing), r"kv1\[0:2\] causal: key 0 lies after its query")


def test_causal_calls_of_unequal_sides():
    short = (Attend((queries(1, 0, 4),), (kv(1, 0, 3),), True),)
    refuse(with_attends(ring(), 0, 1, short), r"step 0, rank 1: .*: a causal call needs as many keys as queries")


def test_causal_call_under_a_full_mask():
    plan = build_plan("ring", 2, 8, False)
    refuse(
        with_attends(plan, 0, 0, (Attend((queries(0, 0, 4),), (kv(0, 0, 4),), True),)),
        "a causal call under a full mask",
    )


@pytest.mark.parametrize(("source", "destination"), [(1, 1), (0, 4), (4, 0), (0, -1), (-1, 0)])
def test_moves_to_oneself_or_to_nobody(source, destination):
    block = kv(max(source, 0) % 4, 0, 4)
    plan = with_moves(ring(), 0, lambda moves: [*moves, Move(block, source, destination)])
    refuse(plan, f"from {source} to {destination}: source and destination must be two ranks below 4")


def test_send_of_what_the_source_does_not_hold():
    plan = with_moves(ring(), 0, lambda moves: [*moves, Move(kv(3, 0, 4), 1, 0)])
    refuse(plan, r"^ring, step 0: kv3\[0:4\] from 1 to 0: the source does not hold it yet$")
    # What arrives in a step can be sent on in the next one only.
    plan = with_moves(ring(), 0, lambda moves: [*moves, Move(kv(0, 0, 4), 1, 2)])
    refuse(plan, r"kv0\[0:4\] from 1 to 2: the source does not hold it yet")
    # A result that was not computed there.
    plan = with_moves(helper_plan(3, 12), 2, lambda moves: [moves[0]._replace(source=1)])
    refuse(plan, r"out2\[0:4\] by 0 from 1 to 2: the source does not hold it yet")
    # A result in the step that computes it.
    plan = helper_plan(2, 8)
    (send,) = plan.steps[2].moves
    plan = with_moves(with_moves(plan, 2, lambda _: []), 1, lambda moves: [*moves, send])
    refuse(plan, r"step 1: out1\[2:4\] by 0 from 0 to 1: the source has nothing of it computed that is not sent yet")


def test_block_received_twice():
    plan = with_moves(ring(), 1, lambda moves: [*moves, Move(kv(0, 0, 4), 0, 1)])
    refuse(plan, r"^ring, step 1: kv0\[0:4\] reaches rank 1 twice$")
    plan = with_moves(ring(), 0, lambda moves: [*moves, Move(kv(0, 3, 4), 0, 1)])
    refuse(plan, r"step 0: kv0\[3:4\] reaches rank 1 twice")
    # Its own block, come back.
    plan = with_moves(ring(), 1, lambda moves: [*moves, Move(kv(0, 0, 4), 1, 0)])
    refuse(plan, r"kv0\[0:4\] reaches rank 0 twice")


def test_result_lost():
    plan = with_moves(helper_plan(2, 8), 2, lambda _: [])
    refuse(plan, r"^helper: out1\[2:4\] by 0 never reaches its home, nor do 0 more results$")
    backward = seal(transpose(build_plan("zigzag", 2, 8)))
    plan = with_moves(backward, 2, lambda moves: moves[:1])
    refuse(plan, r"^zigzag: dkv0\[0:2\] by 1 never reaches its home, nor do 0 more results$")
    # It leaves, and stays with another rank.
    plan = with_moves(helper_plan(3, 12), 2, lambda moves: [moves[0]._replace(destination=1)])
    refuse(plan, r"out2\[0:4\] by 0 never reaches its home")
    # Half of it comes home.
    plan = with_moves(helper_plan(2, 8), 2, lambda moves: [moves[0]._replace(block=Block(Kind.OUT, 1, 2, 3, 0))])
    refuse(plan, r"step 2: out1\[2:3\] by 0 from 0 to 1: the source has nothing of it computed that is not sent yet")


def test_result_delivered_twice():
    plan = with_moves(helper_plan(2, 8), 2, lambda moves: moves * 2)
    refuse(plan, r"^helper, step 2: out1\[2:4\] by 0 from 0 to 1: the source has nothing of it computed that is not")
    backward = seal(transpose(build_plan("ring", 2, 8)))
    refuse(with_moves(backward, 2, lambda moves: moves * 2), r"dkv0\[0:4\] by 1 .* has nothing of it computed")
    # By two ways.
    plan = with_moves(tangled_plan(12), 2, lambda moves: [*moves, moves[0]._replace(destination=2)])
    refuse(plan, r"step 2: out2\[0:3\] by 1 from 1 to 2: the source has nothing of it computed that is not sent yet")
    # By the one that passes it on.
    plan = with_moves(tangled_plan(12), 4, lambda moves: moves * 2)
    refuse(plan, r"step 4: out2\[0:3\] by 1 from 0 to 2: reaches its home more often than it was sent")


def test_result_cut():
    # Of two results for query slot 2, one is also for slot 3: they cannot leave without it.
    plan = helper_plan(2, 8)
    rows = ((2, 4, 0, 2), (2, 3, 2, 4), (3, 4, 2, 4))
    calls = tuple(Attend((queries(1, a, b),), (kv(0, c, d),), False) for a, b, c, d in rows)
    plan = with_attends(plan, 1, 0, calls)
    verify(plan)  # one message takes all three along
    halves = [Move(Block(Kind.OUT, 1, i, i + 1, 0), 0, 1) for i in (2, 3)]
    refuse(with_moves(plan, 2, lambda _: halves), r"out1\[2:3\] by 0 from 0 to 1: cuts a result")


def test_understated_buffers():
    plan = ring()
    for buffers, states in (((), 0), (((Kind.KV, 7),), 7), (((Kind.OUT, 8),), 0)):
        refuse(replace(plan, buffers=buffers), f"^ring: needs buffers for 8 kv tokens, states {states}$")
    verify(replace(plan, buffers=((Kind.KV, 9),)))
    backward = seal(transpose(plan))
    refuse(replace(backward, buffers=((Kind.KV, 8),)), "^ring: needs buffers for 8 dkv tokens, states 0$")


def test_a_plan_that_holds_more_than_it_stated():
    # Block 0 goes to rank 3 at once, and waits there beside the blocks that come around the ring.
    def straight(plan):
        plan = with_moves(plan, 2, lambda moves: [m for m in moves if m.block.home != 0])
        return with_moves(plan, 0, lambda moves: [*moves, Move(kv(0, 0, 4), 0, 3)])

    refuse(straight(ring()), "needs buffers for 12 kv tokens, states 8")
    verify(seal(straight(ring())))


@pytest.mark.parametrize(
    "block", [kv(0, 0, 5), kv(0, 2, 2), kv(0, 3, 1), kv(0, -1, 2), kv(4, 0, 1), kv(-1, 0, 1)], ids=str
)
def test_spans_outside_their_home(block):
    plan = with_moves(ring(), 1, lambda moves: [*moves, Move(block, 0, 1)])
    refuse(plan, r"^ring, step 1: .* is not a span of its home rank's tokens$")
    plan = ring()
    call = Attend((queries(2, 0, 4),), (block,), False)
    refuse(with_attends(plan, 1, 2, (call,)), "step 1: .* is not a span")
    call = Attend((block._replace(kind=Kind.Q),), (kv(1, 0, 4),), False)
    refuse(with_attends(plan, 1, 2, (call,)), "step 1: .* is not a span")
