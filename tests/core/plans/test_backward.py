"""Backward plans: what forward keeps for them, their errors and costs, and the messages that they hide.

`test_plans` shows that they are correct, as it does for all plans.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_longctx.config.cluster import Cluster, Mesh, load_cluster
from megatron_longctx.core.plans import (
    MODES,
    Block,
    Heads,
    KernelSupport,
    Kind,
    Mask,
    ModeOptions,
    Plan,
    Target,
    Workload,
    backward_plan,
    build_plan,
    keep_received,
    keeps_received,
    record,
    sum_in_nodes,
    transpose,
)
from megatron_longctx.core.plans.backward import KEPT_TOKENS, LEAST_TOKENS
from megatron_longctx.core.plans.mask import causal, documents, full
from megatron_longctx.core.plans.modes.ulysses import Ulysses
from megatron_longctx.planner.choose_mode import Problem, rank_modes
from megatron_longctx.planner.cost import Costs
from megatron_longctx.planner.describe import moved_tokens, rank_pairs
from megatron_longctx.planner.footprint import Footprint, footprint
from megatron_longctx.planner.simulate import simulate
from megatron_longctx.testing.verify import PlanError, verify
from tests.shared.plans import with_moves

PACKED = KernelSupport(packed=True, rectangles=True, windows=True)
WORK = Workload(8, 8, 64)


@pytest.mark.parametrize("derive", [transpose, backward_plan, keep_received, lambda plan: sum_in_nodes(plan, 2)])
def test_backward_plans_are_refused_where_forward_plans_are_expected(derive: Callable[[Plan], Plan]) -> None:
    with pytest.raises(AssertionError):
        derive(transpose(build_plan("zigzag", 2, 8)))


def kinds(plan: Plan) -> set[Kind]:
    return {move.block.kind for step in plan.steps for move in step.moves}


@pytest.mark.parametrize("mask", [causal(64), documents([30, 34], window=(25, 0))])
def test_kept_blocks_do_not_travel_again(mask: Mask) -> None:
    def backward(schedule: str, keep: bool = True) -> Plan:
        plan = build_plan(schedule, 4, mask, ModeOptions(inner_size=2))
        return backward_plan(keep_received(plan) if keep else plan)

    assert kinds(backward("ulysses")) == {Kind.GRAD, Kind.DQ, Kind.DKV}
    assert kinds(backward("ulysses", keep=False)) == {Kind.KV, Kind.Q_GRAD, Kind.DQ, Kind.DKV}
    for schedule in ("ring", "zigzag", "all_gather", "double_ring"):
        assert kinds(backward(schedule)) == {Kind.DKV}
    # Several calls compute a query's attention: its out is not known where the first of them runs.
    assert kinds(backward("usp")) == {Kind.Q_GRAD, Kind.DQ, Kind.DKV}
    # Three quarters of a rank's tokens go to the others and as many arrive, for a quarter of the heads.
    assert moved_tokens(backward("ulysses"))[1][Kind.GRAD] == (12, 12)


def test_auto_keeps_with_ulysses_up_to_a_number_of_tokens() -> None:
    assert keeps_received(None, "ulysses", 4, 4 * KEPT_TOKENS)
    assert not keeps_received(None, "ulysses", 4, 4 * KEPT_TOKENS + 1)
    assert not keeps_received(None, "ulysses", 4, 4 * KEPT_TOKENS, batch=2)
    assert not keeps_received(None, "usp", 4, 64)
    assert keeps_received(True, "usp", 4, 2**24) and not keeps_received(True, "usp", 1, 64)
    assert not keeps_received(False, "ulysses", 4, 64)


def refuse(plan: Plan, message: str, forward: Plan | None = None) -> None:
    with pytest.raises(PlanError, match=message):
        verify(plan, forward)


def test_wrong_kept_blocks_are_refused() -> None:
    plan = keep_received(build_plan("ulysses", 3, 12))
    backward = backward_plan(plan)
    kept = list(plan.kept[0])
    keys = Block(Kind.KV, 1, 0, 4, heads=Heads(0, 3))
    assert keys in kept

    def keeps(blocks: list[Block], of: Plan = plan) -> Plan:
        return replace(of, kept=(tuple(blocks), *plan.kept[1:]))

    refuse(keeps([*kept, Block(Kind.KV, 1, 0, 4)]), r"rank 0 keeps kv1\[0:4\], which it never receives")
    refuse(keeps([*kept, Block(Kind.KV, 0, 0, 4)]), r"rank 0 keeps kv0\[0:4\], which is not a query or key of another")
    refuse(keeps([*kept, Block(Kind.OUT, 1, 0, 4, 0)]), "which is not a query or key of another rank")
    refuse(keeps([*kept, Block(Kind.KV, 1, 0, 9)]), "is not a span of its home rank's tokens")
    refuse(replace(plan, kept=plan.kept[1:]), "lists the kept blocks of 2 ranks, has 3")
    refuse(backward, "expects other kept blocks than ulysses keeps", build_plan("ulysses", 3, 12))
    refuse(plan, "expected a backward plan to follow ulysses", plan)
    # Backward without the blocks that it expects to be kept, or without the gradients that are never kept.
    refuse(keeps([b for b in kept if b != keys], backward), r"rank 0 attends kv.*before it arrives")
    only_keys = [block for block in kept if block.kind is Kind.KV]
    refuse(keeps(only_keys, backward), r"rank 0 attends q_grad.*before it arrives")
    without_grad = with_moves(backward, 0, lambda moves: [m for m in moves if m.block.kind is not Kind.GRAD])
    refuse(without_grad, r"rank 0 attends grad1\[0:4\] heads 1/3 before it arrives")


def test_queries_whose_out_comes_from_several_calls_are_not_kept() -> None:
    plan = build_plan("usp", 4, 64, ModeOptions(inner_size=2))
    received = [{move.block for step in plan.steps for move in step.moves if move.destination == r} for r in range(4)]
    queries = [tuple(sorted(block for block in blocks if block.kind is Kind.Q)) for blocks in received]
    refuse(replace(plan, kept=tuple(queries)), r"rank \d keeps the out of q\d\[.*\].*, some of it from elsewhere")


def test_the_time_that_keeping_saves() -> None:
    """Of q, k, v, out, its gradient and LSE only the gradient arrives in backward; dq, dk and dv go home as before."""
    length = 4 * 4096
    slow = Cluster("slow", 1, 4, Mesh(1.0))
    instant = Costs(1e6, 1e6, call_s=0.0, merge_gibps=1e9, step_s=0.0, message_s=0.0)
    plan = build_plan("ulysses", 4, length)
    kept = keep_received(plan)
    token = 2 * 8 * 64 // 4  # bytes of one token of a quarter of the heads of one tensor
    lse = 4 * 8 // 4
    fetched, less = (simulate(backward_plan(each), slow, WORK, instant).seconds for each in (plan, kept))
    # To and from every other rank over a separate link.
    assert fetched == pytest.approx(4096 * (8 * token + lse) / 2**30, rel=1e-3)
    assert less == pytest.approx(4096 * 4 * token / 2**30, rel=1e-3)
    assert simulate(kept, slow, WORK, instant).seconds == simulate(plan, slow, WORK, instant).seconds


def footprint_of(plan: Plan, work: Workload = WORK) -> Footprint:
    """Return the footprint on rank 0."""
    return footprint(record(plan, 0, Target(work, PACKED)), work)


def test_memory_of_kept_blocks() -> None:
    plan, tensor, lse = build_plan("ulysses", 4, 4096), 1024 * 2 * 8 * 64, 1024 * 4 * 8
    kept = keep_received(plan)
    # q, k, v and out, with the rank's own share
    assert footprint_of(plan).kept == 0 and footprint_of(kept).kept == 4 * tensor + lse
    # Shared buffers hold only outputs of the rank's own queries; backward reads nothing of its own but the gradient.
    assert footprint_of(kept).buffers < footprint_of(plan).buffers
    assert record(backward_plan(kept), 0, Target(WORK, PACKED)).reads_own == {Kind.GRAD}
    assert Kind.KV in record(backward_plan(plan), 0, Target(WORK, PACKED)).reads_own
    # If there are more ranks than KV heads, several ranks hold the same one.
    assert footprint_of(kept, Workload(8, 2, 64)).kept == 2 * tensor + lse + 2 * tensor // 4 * 2
    fetched = build_plan("all_gather", 4, 4096)  # rank 0 has the last tokens, which see everything
    gathered = keep_received(fetched)
    assert footprint_of(gathered).kept == 3 * 2 * tensor == footprint_of(fetched).buffers
    assert footprint_of(gathered).buffers == 0 and footprint_of(gathered).total == footprint_of(fetched).total


def test_modes_are_chosen_by_what_they_will_keep() -> None:
    cluster, target = load_cluster("h200_x8").resized(4), Target(Workload(32, 32, 128), PACKED)

    def ulysses(length: int, keep: bool | None) -> float:
        problem = Problem(4, causal(length), target, keep_received=keep)
        (candidate,) = rank_modes(problem, cluster, candidates=[Ulysses()])
        return candidate.seconds

    short, long = 4 * KEPT_TOKENS, 4 * KEPT_TOKENS + 4
    assert ulysses(short, None) == ulysses(short, True) < ulysses(short, False)
    assert ulysses(long, None) == ulysses(long, False) > ulysses(long, True)


@pytest.mark.parametrize("schedule", MODES)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_divided_blocks_compute_the_same_pairs(schedule: str, n: int) -> None:
    long = n * LEAST_TOKENS + 2 * n + 1
    pack = documents([long // 3, 5, long - long // 3 - 5], window=(long // 4, None))
    for mask in (causal(long), full(long), pack, causal(4 * n + 1)):
        plan = build_plan(schedule, n, mask)
        ordered, plain = backward_plan(plan), transpose(plan)
        verify(ordered)
        assert rank_pairs(ordered) == rank_pairs(plain)


@pytest.mark.parametrize("schedule", ["ring", "zigzag", "striped", "all_gather", "tasp", "double_ring"])
@pytest.mark.parametrize("mask", [causal, full], ids=["causal", "full"])
def test_a_part_of_the_own_block_comes_first_and_the_rest_last(schedule: str, mask: Callable[[int], Mask]) -> None:
    plan = build_plan(schedule, 4, mask(4 * LEAST_TOKENS))
    ordered = backward_plan(plan)
    for rank in range(4):
        (first,), (last,) = ordered.steps[0].attends[rank], ordered.steps[-1].attends[rank]
        assert first.num_queries == last.num_queries == LEAST_TOKENS // 2
        assert first.queries[0].stop == last.queries[0].start
        assert {block.home for a in (first, last) for block in (*a.queries, *a.keys)} == {rank}
        # In a causal block the first queries see only the first keys.
        assert (first.num_keys, last.num_keys) == (LEAST_TOKENS // (2 if mask is causal else 1), LEAST_TOKENS)
    assert ordered.steps[-1].moves == transpose(plan).steps[-1].moves


def test_small_blocks_stay_whole() -> None:
    plan = build_plan("zigzag", 4, 4 * LEAST_TOKENS - 4)
    assert backward_plan(plan) == transpose(plan)


def test_the_last_gradients_are_hidden() -> None:
    """If a message takes as long as half of the own block, the plain order waits for the last messages."""
    plan = build_plan("all_gather", 4, 4 * 8192)
    cluster, target = Cluster("mesh", 1, 4, Mesh(50.0)), Target(Workload(32, 8, 128), PACKED)
    times = [simulate(each, cluster, target, Costs(600.0, 500.0)) for each in (transpose(plan), backward_plan(plan))]
    assert max(times[1].exposed_s) < max(times[0].exposed_s) / 2
    assert times[1].seconds < times[0].seconds
