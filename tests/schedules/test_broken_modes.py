"""Every mode, broken in every way at a random place: `verify` finds it, forward and backward."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.schedules import (
    RESULTS,
    SCHEDULES,
    Attend,
    Move,
    Plan,
    PlanError,
    build_plan,
    seal,
    transpose,
    verify,
)


def _plans() -> list[Plan]:
    forward = [build_plan(name, n, 4 * n + 1, causal) for name in SCHEDULES for n in (4, 6) for causal in (True, False)]
    return [plan for whole in forward for plan in (whole, seal(transpose(whole)))]


PLANS = _plans()


def _moves(plan: Plan) -> list[tuple[int, int, Move]]:
    return [(t, i, move) for t, step in enumerate(plan.steps) for i, move in enumerate(step.moves)]


def _calls(plan: Plan) -> list[tuple[int, int, int, Attend]]:
    return [
        (t, rank, i, attend)
        for t, step in enumerate(plan.steps)
        for rank, attends in enumerate(step.attends)
        for i, attend in enumerate(attends)
    ]


def _with_moves(plan: Plan, t: int, moves: tuple[Move, ...]) -> Plan:
    steps = list(plan.steps)
    steps[t] = steps[t]._replace(moves=moves)
    return replace(plan, steps=tuple(steps))


def _with_calls(plan: Plan, t: int, rank: int, calls: tuple[Attend, ...]) -> Plan:
    steps = list(plan.steps)
    attends = list(steps[t].attends)
    attends[rank] = calls
    steps[t] = steps[t]._replace(attends=tuple(attends))
    return replace(plan, steps=tuple(steps))


def _without(items: tuple, i: int) -> tuple:
    return items[:i] + items[i + 1 :]


broken = settings(max_examples=150, deadline=None)
plans = st.sampled_from(PLANS)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.name}-{plan.n}{'-backward' * plan.backward}")
def test_the_plans_that_are_broken_here_are_whole(plan: Plan) -> None:
    verify(plan)


@broken
@given(plans, st.data())
def test_a_dropped_send(plan: Plan, data: st.DataObject) -> None:
    t, i, _ = data.draw(st.sampled_from(_moves(plan)))
    with pytest.raises(PlanError, match=r"before it arrives|does not hold it yet|never reaches its home"):
        verify(_with_moves(plan, t, _without(plan.steps[t].moves, i)))


@broken
@given(plans, st.data())
def test_a_send_to_the_wrong_rank(plan: Plan, data: st.DataObject) -> None:
    t, i, move = data.draw(st.sampled_from(_moves(plan)))
    others = [rank for rank in range(plan.n) if rank not in (move.source, move.destination)]
    wrong = move._replace(destination=data.draw(st.sampled_from(others)))
    moves = plan.steps[t].moves
    with pytest.raises(PlanError):
        verify(_with_moves(plan, t, (*moves[:i], wrong, *moves[i + 1 :])))


@broken
@given(plans, st.data())
def test_a_send_done_twice(plan: Plan, data: st.DataObject) -> None:
    t, _, move = data.draw(st.sampled_from(_moves(plan)))
    with pytest.raises(PlanError, match=r"reaches rank . twice|more often|nothing of it computed"):
        verify(_with_moves(plan, t, (*plan.steps[t].moves, move)))


@broken
@given(plans, st.data())
def test_a_doubled_pair(plan: Plan, data: st.DataObject) -> None:
    t, rank, _, attend = data.draw(st.sampled_from(_calls(plan)))
    with pytest.raises(PlanError, match="twice"):
        verify(_with_calls(plan, t, rank, (*plan.steps[t].attends[rank], attend)))


@broken
@given(plans, st.data())
def test_a_missing_pair(plan: Plan, data: st.DataObject) -> None:
    t, rank, i, _ = data.draw(st.sampled_from(_calls(plan)))
    with pytest.raises(PlanError, match="visible pairs"):
        verify(_with_calls(plan, t, rank, _without(plan.steps[t].attends[rank], i)))


@broken
@given(plans, st.data())
def test_use_before_arrival(plan: Plan, data: st.DataObject) -> None:
    """A call that needs another rank's block is made in step 0, when none has arrived."""
    remote = [
        call
        for call in _calls(plan)
        if any(block.home != call[1] for block in call[3].inputs(plan.backward)) and call[0] > 0
    ]
    t, rank, i, attend = data.draw(st.sampled_from(remote))
    early = _with_calls(plan, t, rank, _without(plan.steps[t].attends[rank], i))
    early = _with_calls(early, 0, rank, (*early.steps[0].attends[rank], attend))
    with pytest.raises(PlanError, match="before it arrives"):
        verify(early)


@broken
@given(plans, st.data())
def test_a_result_sent_before_it_is_computed(plan: Plan, data: st.DataObject) -> None:
    results = [(t, i, move) for t, i, move in _moves(plan) if move.block.kind in RESULTS and t > 0]
    if results:
        t, i, move = data.draw(st.sampled_from(results))
        early = _with_moves(plan, t, _without(plan.steps[t].moves, i))
        early = _with_moves(early, 0, (*early.steps[0].moves, move))
        with pytest.raises(PlanError, match="nothing of it computed"):
            verify(early)


@broken
@given(plans, st.data())
def test_a_buffer_above_what_is_stated(plan: Plan, data: st.DataObject) -> None:
    i = data.draw(st.integers(0, len(plan.buffers) - 1))
    kind, tokens = plan.buffers[i]
    small = (*plan.buffers[:i], (kind, tokens - 1), *plan.buffers[i + 1 :])
    with pytest.raises(PlanError, match=f"needs buffers for {tokens} {kind} tokens, states {tokens - 1}"):
        verify(replace(plan, buffers=small))
