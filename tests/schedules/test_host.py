"""The host's operations of a plan are counted as the executor issues them."""

from __future__ import annotations

from dataclasses import replace

from megatron_longctx.inference.plan import MODES, build
from megatron_longctx.schedules import Costs, PlanOptions, build_plan
from megatron_longctx.schedules.host import num_merges, num_operations
from megatron_longctx.topology import Device
from tests.inference.histories import batch_with_past

COSTS = Costs(600, 520)


def test_a_merge_brings_four_together_and_later_ones_join() -> None:
    assert [num_merges(partials) for partials in range(9)] == [0, 0, 1, 1, 1, 2, 2, 2, 3]


def test_operations_of_a_ring() -> None:
    """4 ranks, tokens in a row: the last rank calls its kernel 4 times, merges once, and has messages in 3 steps."""
    plan = build_plan("ring", 4, 64, True, PlanOptions())
    assert num_operations(plan) == 4 + 1 + 3
    assert num_operations(plan, lambda attend: 2) == 8 + 3 + 3
    assert num_operations(build_plan("ring", 1, 64, True, PlanOptions())) == 1


def test_operations_of_a_short_prompt_over_a_long_cache() -> None:
    """66 tokens among 131,072 on 4 ranks: the same 8 calls at most; keys in 3 exchanges, queries in 4 or in 2, whose
    results in two parts are merged before they are sent."""
    batch = batch_with_past(4, [(131006,)], [66], page=64, pages=520, few=0)
    assert {mode: num_operations(build(mode, batch)) for mode in MODES} == {"pass_kv": 14, "pass_q": 17, "one_hop": 15}


def test_only_descriptions_suppose_a_pace() -> None:
    device = Device("some", peak_tflops=1000, efficiency=0.5)
    assert Costs.of_device(device).host_operation_s > 0 == COSTS.host_operation_s
    assert replace(COSTS, host_operation_s=1e-4).host_operation_s == 1e-4
