"""Plans over a cache are proved: every new token attends all of its own sequence up to itself, once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.inference import plan as plans
from megatron_longctx.inference.ledger import CacheLedger
from megatron_longctx.inference.plan import MODES, Batch, CachePlan, build, verify_over_cache
from megatron_longctx.inference.shares import FEW
from megatron_longctx.kernels.planned import PlannedShapes
from megatron_longctx.schedules import Attend, Kind, PlanError, describe, moved_tokens
from megatron_longctx.schedules.host import num_operations
from tests.inference.histories import batch_with_past, random_batch, random_family

CHAT = dict(pasts=[(9, 1, 1, 4), (), (2,)], new=(7, 12, 1))


def seen_by_hand(plan: CachePlan) -> dict[tuple[int, int, int], int]:
    """How often (turn, position of query, position of key) is computed, from the plan's calls one pair at a time."""
    batch, count = plan.batch, {}
    rows, slots = {}, {}
    for index, turn in enumerate(batch.turns):
        for rank in range(batch.n):
            new = [turn.cached + i for span in turn.new_spans(rank) for i in span]
            for i, position in enumerate(new):
                rows[rank, batch.rows[rank][index] + i] = (index, position)
            held = [p for span in turn.positions[rank] for p in span] + new
            places = [slot for run in (*turn.cached_runs[rank], *turn.new_runs[rank]) for slot in run]
            for slot, position in zip(places, held, strict=True):
                slots.setdefault((rank, slot), {})[index] = position
    for step in plan.steps:
        for attend in (attend for attends in step.attends for attend in attends):
            queries = [rows[block.home, i] for block in attend.queries for i in range(block.start, block.stop)]
            keys = [slots[block.home, i] for block in attend.keys for i in range(block.start, block.stop)]
            for i, (turn, q) in enumerate(queries):
                for held in keys[: i + 1] if attend.causal else keys:
                    pair = (turn, q, held[turn])
                    count[pair] = count.get(pair, 0) + 1
    return count


def visible(plan: CachePlan) -> dict[tuple[int, int, int], int]:
    turns = enumerate(plan.batch.turns)
    return {(i, q, k): 1 for i, turn in turns for q in range(turn.cached, turn.cached + turn.new) for k in range(q + 1)}


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_mode_computes_attention_whatever_the_past(mode: str, seed: int) -> None:
    plan = build(mode, random_batch(seed))
    verify_over_cache(plan)
    assert seen_by_hand(plan) == visible(plan)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_mode_computes_attention_over_shared_pages(mode: str, seed: int) -> None:
    plan = build(mode, random_family(seed))
    verify_over_cache(plan)
    assert seen_by_hand(plan) == visible(plan)


@pytest.mark.parametrize("n", [2, 4])
def test_shared_keys_travel_once(n: int) -> None:
    ledger = CacheLedger(n, 200, 4)
    first = ledger.open()
    ledger.append({first: 40 * n})
    forks = [ledger.fork(first, 40 * n).session for _ in range(3)]

    def moved(*sessions: int) -> int:
        turns = ledger.append({session: 1 for session in sessions})
        plan = plans.pass_kv(Batch(n, ledger.slots_per_rank, turns))
        ledger.undo(turns)
        verify_over_cache(plan)
        return sum(moved_tokens(plan, rank).get(Kind.KV, (0, 0))[0] for rank in range(n))

    assert moved(*forks) <= moved(first) + 2 * n  # the new tokens


def test_joined_calls_do_not_depend_on_where_tokens_lie() -> None:
    """The same history in a fresh cache and in the gaps of a used one: the same calls, of the same sizes in order."""
    long = plans.LONG_RUN

    def sizes(joined: bool, gaps: bool, shapes: PlannedShapes | None = None) -> list[tuple[int, int, bool]]:
        ledger = CacheLedger(2, 12, long)
        sessions = [ledger.open() for _ in range(3)]
        for _ in range(3):
            ledger.append({session: 2 * long for session in (sessions if gaps else sessions[:1])})
        turns = ledger.append({sessions[0]: 3})
        plan = plans.pass_q(Batch(2, ledger.slots_per_rank, turns, joined, shapes))
        verify_over_cache(plan)
        return [(a.num_queries, a.num_keys, a.causal) for step in plan.steps for rank in step.attends for a in rank]

    assert sizes(True, True) == sizes(True, False) == sizes(False, False) != sizes(False, True)
    shapes = PlannedShapes(1, 256, 256, 1024)
    cut = sizes(True, True, shapes)
    assert len(cut) > len(sizes(True, True)) and cut == sizes(True, False, shapes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("new", [(1, 0, 0), (1, 1, 1), (2, 3, 1)], ids=str)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_prompts_shorter_than_the_ranks(mode: str, new: tuple[int, ...], n: int) -> None:
    for pasts in ([(), (), ()], CHAT["pasts"]):
        verify_over_cache(build(mode, batch_with_past(n, pasts, new)))


@pytest.mark.parametrize("mode", MODES)
def test_what_a_broken_plan_does_wrong_is_named(mode: str) -> None:
    plan = build(mode, batch_with_past(3, **CHAT))
    verify_over_cache(plan)
    rank, attend = next((r, attends[0]) for r, attends in enumerate(plan.steps[0].attends) if attends)

    def with_calls(*calls: Attend) -> CachePlan:
        first = plan.steps[0]
        attends = tuple(calls if r == rank else attends for r, attends in enumerate(first.attends))
        return replace(plan, steps=(first._replace(attends=attends), *plan.steps[1:]))

    rest = plan.steps[0].attends[rank][1:]
    with pytest.raises(PlanError, match="visible pairs"):
        verify_over_cache(with_calls(*rest))
    with pytest.raises(PlanError, match="twice"):
        verify_over_cache(with_calls(attend, attend, *rest))
    own = plan.owners(attend.keys[0])
    strangers = next(a.keys for a in plan.steps[0].attends[rank] if plan.owners(a.keys[0]) != own)
    with pytest.raises(PlanError, match="is not of one sequence"):
        verify_over_cache(with_calls(attend._replace(keys=strangers, causal=False), *rest))
    free = attend.keys[0]._replace(start=170, stop=171)
    with pytest.raises(PlanError, match="is not of one sequence"):
        verify_over_cache(with_calls(attend._replace(keys=(free,), causal=False), *rest))
    silent = replace(plan, steps=tuple(step._replace(moves=()) for step in plan.steps))
    with pytest.raises(PlanError, match="before it arrives"):
        verify_over_cache(silent)


def test_what_moves_is_not_padded() -> None:
    """Ring pass-KV moves every cached and new key n-1 times at most, pass-Q every query and its partial results."""
    batch = batch_with_past(4, [(40,), (3,)], (8, 2))
    kv = [moved_tokens(plans.pass_kv(batch), rank) for rank in range(4)]
    assert sum(moved.get(Kind.KV, (0, 0))[0] for moved in kv) <= 3 * (batch.cached + batch.new)
    assert all(set(moved) <= {Kind.KV} for moved in kv)
    for mode in ("pass_q", "one_hop"):
        moved = [moved_tokens(build(mode, batch), rank) for rank in range(4)]
        for kind in (Kind.Q, Kind.OUT):
            assert sum(m.get(kind, (0, 0))[1] for m in moved) <= 3 * batch.new


@pytest.mark.parametrize("n", [2, 3, 8])
def test_one_hop_takes_three_steps_and_the_ring_n_plus_one(n: int) -> None:
    batch = batch_with_past(n, [(5 * n,), (4 * n,)], (1, 1))
    assert len(plans.one_hop(batch).steps) == 3
    assert len(plans.pass_q(batch).steps) == n + 1
    assert len(plans.pass_kv(batch).steps) == n


def test_new_tokens_are_balanced_over_the_ranks_whatever_lies_in_the_cache() -> None:
    batch = batch_with_past(4, [(64,), (7, 1, 1)], (64, 32), page=8, few=0)
    pairs = [plans.pass_kv(batch).pairs(rank) for rank in range(4)]
    assert max(pairs) - min(pairs) <= 0.02 * max(pairs)


@pytest.mark.parametrize("mode", MODES)
def test_few_new_tokens_take_few_operations_and_hardly_more_work(mode: str) -> None:
    """A call for every rank's keys and one for the diagonal, whose results come together in two merges."""
    rows, cut = (batch_with_past(4, [(131006,)], [66], page=64, pages=520, few=few) for few in (FEW, 0))
    plan = build(mode, rows)
    verify_over_cache(plan)
    exchanges = {"pass_kv": 3, "pass_q": 4, "one_hop": 2}[mode]
    assert num_operations(plan) == 5 + 2 + exchanges
    assert num_operations(build(mode, cut)) >= num_operations(plan) + 4
    pairs, even = ([build(mode, batch).pairs(rank) for rank in range(4)] for batch in (rows, cut))
    assert sum(pairs) == sum(even) and max(pairs) <= 1.001 * max(even)


def test_long_runs_are_read_in_place_and_short_ones_together() -> None:
    long = plans.LONG_RUN
    batch = batch_with_past(1, [(long, 5, long), (3, 1, 1)], (1, 1), page=long, pages=9)
    sizes = [[key.tokens for key in attend.keys] for attend in plans.pass_q(batch).steps[0].attends[0]]
    assert len(batch.turns[0].cached_runs[0]) > 1
    assert sizes[0][0] >= long and len(sizes[0]) == 1


def test_a_plan_can_be_read() -> None:
    text = describe(plans.pass_q(batch_with_past(2, **CHAT)))
    assert "pass_q forward: 2 ranks, 20 tokens (new tokens)" in text
    assert "send out" in text


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inference\.mode=pass_v: expected one of pass_kv, pass_q, one_hop"):
        build("pass_v", batch_with_past(2, **CHAT))
