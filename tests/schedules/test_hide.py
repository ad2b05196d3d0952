"""Backward plans in the order that hides their first and last messages."""

from __future__ import annotations

import pytest

from megatron_longctx.schedules import SCHEDULES, Costs, Workload, build_plan, transpose, verify
from megatron_longctx.schedules.build import seal
from megatron_longctx.schedules.hide import LEAST_TOKENS, backward_plan
from megatron_longctx.schedules.simulate import simulate
from megatron_longctx.topology import Cluster, Mesh


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_they_are_proved_and_compute_what_transpose_says(schedule: str, causal: bool, n: int) -> None:
    for length in (n * LEAST_TOKENS + 2 * n + 1, 4 * n + 1):
        plan = build_plan(schedule, n, length, causal)
        ordered, plain = backward_plan(plan), transpose(plan)
        verify(ordered)
        for rank in range(n):
            assert ordered.pairs(rank) == plain.pairs(rank)
            assert all(a.causal <= (a.num_queries == a.num_keys) for s in ordered.steps for a in s.attends[rank])


@pytest.mark.parametrize("schedule", ["ring", "zigzag", "striped", "all_gather", "tasp", "double_ring"])
def test_a_part_of_the_own_block_comes_first_and_the_rest_last(schedule: str) -> None:
    plan = build_plan(schedule, 4, 4 * LEAST_TOKENS)
    ordered = backward_plan(plan)
    for rank in range(4):
        (first,) = ordered.steps[0].attends[rank]
        assert first.causal and first.num_queries == LEAST_TOKENS // 2
        rectangle, triangle = ordered.steps[-1].attends[rank]
        assert not rectangle.causal and triangle.causal
        assert {block.home for a in (rectangle, triangle) for block in (*a.queries, *a.keys)} == {rank}
    assert ordered.steps[-1].moves == transpose(plan).steps[-1].moves


def test_small_blocks_stay_whole() -> None:
    plan = build_plan("zigzag", 4, 4 * LEAST_TOKENS - 4)
    assert backward_plan(plan) == seal(transpose(plan))


def test_the_last_gradients_are_hidden() -> None:
    """Where a message takes as long as half the own block, the plain order waits for the last of them."""
    plan = build_plan("all_gather", 4, 4 * 8192)
    cluster = Cluster("mesh", 1, 4, Mesh(100.0))
    times = [
        simulate(each, cluster, Workload(32, 8, 128), Costs(600.0, 500.0))
        for each in (seal(transpose(plan)), backward_plan(plan))
    ]
    assert max(times[1].exposed_s) < max(times[0].exposed_s) / 2
    assert times[1].seconds < times[0].seconds
