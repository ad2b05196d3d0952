"""`verify` finds every way to break a plan of any mode and mask, at a random place, forward and backward."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_longctx.core.plans import (
    MODES,
    RESULTS,
    Heads,
    Move,
    Plan,
    Slice,
    backward_plan,
    build_plan,
    keep_received,
)
from megatron_longctx.core.plans.slices import FAR
from megatron_longctx.testing.verify import PlanError, verify
from tests.core.plans.masks import masks, pairs_of, parts_of, tokens_of
from tests.shared.plans import with_calls, with_moves


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    plan = build_plan(draw(st.sampled_from(list(MODES))), draw(st.sampled_from([2, 3, 4, 6])), draw(masks(24)))
    plan = keep_received(plan) if draw(st.booleans()) else plan
    return backward_plan(plan) if draw(st.booleans()) else plan


def moves_of(plan: Plan) -> list[tuple[int, int, Move]]:
    return [(t, i, move) for t, step in enumerate(plan.steps) for i, move in enumerate(step.moves)]


def without(items: Sequence, item: object) -> list:
    place = items.index(item)
    return [*items[:place], *items[place + 1 :]]


broken = settings(max_examples=80, deadline=None)


SENDS: dict[str, tuple[Callable[[Move, int], list[Move]], str | None]] = {
    "dropped": (lambda move, _: [], "before it arrives|does not hold it yet|never reaches its home|never receives"),
    "to another rank": (lambda move, other: [move._replace(destination=other)], None),
    "twice": (lambda move, _: [move, move], "reaches rank . twice|more often|nothing of it computed"),
}
"""What a send is replaced by, given another rank, and the message."""


@pytest.mark.parametrize("how", SENDS)
@broken
@given(plans(), st.data())
def test_a_broken_send(how: str, plan: Plan, data: st.DataObject) -> None:
    change, message = SENDS[how]
    assume(moves_of(plan) and (plan.n > 2 or how != "to another rank"))
    t, i, move = data.draw(st.sampled_from(moves_of(plan)))
    others = [rank for rank in range(plan.n) if rank not in (move.source, move.destination)]
    instead = change(move, data.draw(st.sampled_from(others or [-1])))
    with pytest.raises(PlanError, match=message):
        verify(with_moves(plan, t, lambda moves: [*moves[:i], *instead, *moves[i + 1 :]]))


@broken
@given(plans(), st.data())
def test_use_before_arrival(plan: Plan, data: st.DataObject) -> None:
    """A call that needs another rank's block runs in step 0, before any block arrives."""
    remote = [
        (t, rank, a)
        for t, rank, a in plan.calls()
        if t > 0 and any(block.home != rank for blocks in plan.inputs(a, rank) for block in blocks)
    ]
    assume(remote)
    t, rank, attend = data.draw(st.sampled_from(remote))
    early = with_calls(plan, t, rank, *without(plan.steps[t].attends[rank], attend))
    early = with_calls(early, 0, rank, *early.steps[0].attends[rank], attend)
    with pytest.raises(PlanError, match="before it arrives"):
        verify(early)


@broken
@given(plans(), st.data())
def test_a_result_sent_before_it_is_computed(plan: Plan, data: st.DataObject) -> None:
    results = [(t, move) for t, _, move in moves_of(plan) if move.block.kind in RESULTS and t > 0]
    assume(results)
    t, move = data.draw(st.sampled_from(results))
    early = with_moves(plan, t, lambda moves: without(moves, move))
    early = with_moves(early, 0, lambda moves: [*moves, move])
    with pytest.raises(PlanError, match="nothing of it computed"):
        verify(early)


def shifted(draw: Callable, each: Slice) -> list[Slice]:
    return [each.moved(*draw(st.sampled_from([(0, 1), (1, 0), (1, 1), (0, -1), (-1, -1)])))]


def grown(draw: Callable, each: Slice) -> list[Slice]:
    """Beyond the end of a document or of a rank's part of it."""
    by = draw(st.sampled_from([("q_start", -1), ("q_stop", 1), ("k_start", -1), ("k_stop", 1)]))
    wider = each._replace(**{by[0]: getattr(each, by[0]) + by[1]})
    return [wider._replace(lo=-FAR, hi=FAR) if draw(st.booleans()) else wider]


def off_by_one(draw: Callable, each: Slice) -> list[Slice]:
    """A bound of the band is off by one."""
    name = draw(st.sampled_from(["lo", "hi"]))
    if abs(getattr(each, name)) == FAR:
        tight = each.k_start - each.q_stop + 1 if name == "lo" else each.k_stop - 1 - each.q_start
        return [each._replace(**{name: tight + (1 if name == "lo" else -1)})]
    return [each._replace(**{name: getattr(each, name) + draw(st.sampled_from([-1, 1]))})]


def a_pair(draw: Callable, each: Slice) -> Slice:
    rows, columns = np.nonzero(pairs_of([each], each.q_stop, each.k_stop))
    at = draw(st.integers(0, len(rows) - 1))
    return Slice(rows[at], rows[at] + 1, columns[at], columns[at] + 1)


def twice(draw: Callable, each: Slice) -> list[Slice]:
    return [each, a_pair(draw, each)]


def missing(draw: Callable, each: Slice) -> list[Slice]:
    """One pair is missing; the rest of the slice is cut around it."""
    pair = a_pair(draw, each)
    q, k = (
        (each.q_start, pair.q_start, pair.q_stop, each.q_stop),
        (each.k_start, pair.k_start, pair.k_stop, each.k_stop),
    )
    cells = [(q[i], q[i + 1], k[j], k[j + 1]) for i in range(3) for j in range(3) if (i, j) != (1, 1)]
    return [found for cell in cells if (found := each.cut(*cell)) is not None]


def another_twice(draw: Callable, each: Slice) -> list[Slice]:
    """One pair is missing and another computed twice, so the number of pairs is unchanged."""
    left = missing(draw, each)
    assume(left)
    return [*left, a_pair(draw, left[0])]


def counts(plan: Plan) -> np.ndarray:
    """Return how often each pair is computed, indexed by part of the heads."""
    parts = parts_of(plan)
    found = np.zeros((parts, plan.queries.length, plan.keys.length), dtype=int)
    for _, _, attend in plan.calls():
        at = np.ix_(tokens_of(plan, attend.queries, False), tokens_of(plan, attend.keys, True))
        for part in range(parts):
            if attend.heads.covers(Heads(part, parts)):
                found[part][at] += pairs_of(attend.slices, attend.num_queries, attend.num_keys)
    return found


@pytest.mark.parametrize("change", [shifted, grown, off_by_one, twice, missing, another_twice])
@settings(max_examples=80, deadline=None)
@given(plans(), st.data())
def test_changed_slices(change: Callable, plan: Plan, data: st.DataObject) -> None:
    """An error is found if and only if the visible pairs are no longer each computed exactly once."""
    assume(any(plan.calls()))
    t, rank, attend = data.draw(st.sampled_from(list(plan.calls())))
    number = data.draw(st.integers(0, len(attend.slices) - 1))
    now = change(data.draw, attend.slices[number])
    slices = (*attend.slices[:number], *now, *attend.slices[number + 1 :])
    changed = attend._replace(slices=slices)
    wrong = with_calls(plan, t, rank, *(changed if a is attend else a for a in plan.steps[t].attends[rank]))
    seen = pairs_of(plan.mask.slices, plan.queries.length, plan.keys.length)
    outside = sum(each.pairs for each in slices) > pairs_of(slices, attend.num_queries, attend.num_keys).sum()
    if not outside and (counts(wrong) == seen).all():
        verify(wrong)
        return
    with pytest.raises(PlanError, match=r"twice|visible|not within"):
        verify(wrong)
