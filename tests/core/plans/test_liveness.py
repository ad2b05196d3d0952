"""Blocks leave their buffers after their last use, which is found without comparing all blocks of a batch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.core.plans import (
    MODES,
    RESULTS,
    Block,
    Kind,
    Mask,
    Plan,
    backward_plan,
    build_plan,
    keep_received,
)
from megatron_longctx.core.plans.buffers import assign_buffers, live_ranges
from megatron_longctx.core.plans.cache_modes import CACHE_MODES
from tests.core.plans.masks import Cache, cache_of, caches, masks
from tests.shared.plans import tangled_plan


def last_use(plan: Plan, rank: int, block: Block, arrived: int) -> int:
    """Return the last step in which the rank attends to a piece of a block or sends one on, by definition."""
    used = [
        t
        for t, step in enumerate(plan.steps)
        for piece in (
            *(piece for attend in step.attends[rank] for blocks in plan.inputs(attend, rank) for piece in blocks),
            *(move.block for move in step.moves if move.source == rank),
        )
        if block.contains(piece)
    ]
    return max(used, default=arrived + (block.kind in RESULTS))


def check(plan: Plan) -> None:
    for rank in range(plan.n):
        ranges = live_ranges(plan, rank)
        received = [m.block for step in plan.steps for m in step.moves if m.destination == rank]
        away = [b for each in ranges for b in each.blocks if b.home != rank or b.kind in RESULTS]
        assert sorted(away) == sorted(received)
        for each in ranges:
            blocks = [block for block in each.blocks if block.home != rank or block.kind in RESULTS]
            kept = [plan.kept_of(rank, block.kind, block.home) for block in blocks] if not plan.backward else [()]
            assert each.kept == any(any(b.contains(k) for k in of) for b, of in zip(blocks, kept, strict=False))
            used = max(last_use(plan, rank, block, each.first) for block in blocks)
            assert each.last == (len(plan.steps) - 1 if each.kept else used)
        buffers, busy_until = assign_buffers(ranges)
        for i, each in enumerate(ranges):
            before = [other.last for j, other in enumerate(ranges[:i]) if buffers[j] == buffers[i]]
            assert busy_until[i] == max(before, default=-1) < each.first
            alike = {(o.kind, o.heads.parts, o.kept) for o, b in zip(ranges, buffers, strict=True) if b == buffers[i]}
            assert len(alike) == 1


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(MODES)), st.integers(2, 6), masks(24), st.booleans())
def test_blocks_live_until_their_last_use(schedule: str, n: int, mask: Mask, keep: bool) -> None:
    plan = build_plan(schedule, n, mask)
    plan = keep_received(plan) if keep else plan
    check(plan)
    check(backward_plan(plan))


@pytest.mark.parametrize("mode", CACHE_MODES)
@settings(max_examples=30, deadline=None)
@given(caches())
def test_blocks_of_a_cache_live_until_their_last_use(mode: str, cache: Cache) -> None:
    check(CACHE_MODES[mode](*cache))


def test_a_result_lives_until_it_is_passed_on() -> None:
    plan = tangled_plan(12)
    (relayed,) = live_ranges(plan, 0)
    assert (relayed.kind, relayed.first, relayed.last) == (Kind.OUT, 2, 4)
    (delivered,) = [each for each in live_ranges(plan, 2) if each.kind is Kind.OUT]
    assert (delivered.first, delivered.last) == (4, 5)


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_batches_of_many_sequences_are_planned_in_linear_time(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a mode plans every batch with all modes."""
    contains, compared = Block.contains, []
    monkeypatch.setattr(Block, "contains", lambda block, other: bool(compared.append(1)) or contains(block, other))

    def comparisons(sequences: int) -> int:
        plan = CACHE_MODES[mode](*cache_of({"lengths": [20] * sequences}, [3] * sequences, [5] * 4 * sequences, 4))
        compared.clear()
        for rank in range(4):
            live_ranges(plan, rank)
        return len(compared)

    assert 0 < comparisons(40) <= 4.5 * comparisons(10)
