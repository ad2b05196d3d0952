"""Backward plans in the order that hides their first and last messages."""

from __future__ import annotations

import pytest

from megatron_longctx.schedules import (
    MODES,
    Costs,
    Mask,
    Takes,
    Target,
    Workload,
    backward_plan,
    build_plan,
    transpose,
    verify,
)
from megatron_longctx.schedules.mask import causal, documents, full
from megatron_longctx.schedules.overlap import LEAST_TOKENS
from megatron_longctx.schedules.simulate import simulate
from megatron_longctx.topology import Cluster, Mesh


@pytest.mark.parametrize("schedule", MODES)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_they_are_proved_and_compute_what_transpose_says(schedule: str, n: int) -> None:
    long = n * LEAST_TOKENS + 2 * n + 1
    pack = documents([long // 3, 5, long - long // 3 - 5], window=(long // 4, None))
    for mask in (causal(long), full(long), pack, causal(4 * n + 1)):
        plan = build_plan(schedule, n, mask)
        ordered, plain = backward_plan(plan), transpose(plan)
        verify(ordered)
        assert list(map(ordered.pairs, range(n))) == list(map(plain.pairs, range(n)))


@pytest.mark.parametrize("schedule", ["ring", "zigzag", "striped", "all_gather", "tasp", "double_ring"])
@pytest.mark.parametrize("of", [causal, full], ids=["causal", "full"])
def test_a_part_of_the_own_block_comes_first_and_the_rest_last(schedule: str, of: type[Mask]) -> None:
    plan = build_plan(schedule, 4, of(4 * LEAST_TOKENS))
    ordered = backward_plan(plan)
    for rank in range(4):
        (first,), (last,) = ordered.steps[0].attends[rank], ordered.steps[-1].attends[rank]
        assert first.num_queries == last.num_queries == LEAST_TOKENS // 2
        assert first.queries[0].stop == last.queries[0].start
        assert {block.home for a in (first, last) for block in (*a.queries, *a.keys)} == {rank}
        # Of a causal block the first queries see the first keys alone.
        assert (first.num_keys, last.num_keys) == (LEAST_TOKENS // (2 if of is causal else 1), LEAST_TOKENS)
    assert ordered.steps[-1].moves == transpose(plan).steps[-1].moves


def test_small_blocks_stay_whole() -> None:
    plan = build_plan("zigzag", 4, 4 * LEAST_TOKENS - 4)
    assert backward_plan(plan) == transpose(plan)


def test_the_last_gradients_are_hidden() -> None:
    """Where a message takes as long as half the own block, the plain order waits for the last of them."""
    plan = build_plan("all_gather", 4, 4 * 8192)
    cluster = Cluster("mesh", 1, 4, Mesh(50.0))
    target = Target(Workload(32, 8, 128), Takes(packed=True, rectangles=True, windows=True))
    times = [simulate(each, cluster, target, Costs(600.0, 500.0)) for each in (transpose(plan), backward_plan(plan))]
    assert max(times[1].exposed_s) < max(times[0].exposed_s) / 2
    assert times[1].seconds < times[0].seconds
