"""Plans whose ranks keep what they receive: what travels, what is refused, and what it costs.

That they are right is shown with all plans (`test_plans`, `test_lower`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_longctx.schedules import (
    Block,
    Costs,
    Heads,
    Kind,
    Mask,
    ModeOptions,
    Move,
    Plan,
    PlanError,
    Takes,
    Target,
    Workload,
    backward_plan,
    build_plan,
    keeping,
    keeps_received,
    lower,
    verify,
)
from megatron_longctx.schedules.describe import describe, moved_tokens
from megatron_longctx.schedules.footprint import Footprint, footprint
from megatron_longctx.schedules.mask import causal, documents
from megatron_longctx.schedules.modes.ulysses import Ulysses
from megatron_longctx.schedules.save_remote import KEPT_TOKENS
from megatron_longctx.schedules.select import Problem, rank_modes
from megatron_longctx.schedules.simulate import simulate
from megatron_longctx.topology import Cluster, Mesh, load_cluster

PACKED = Takes(packed=True, rectangles=True, windows=True)


def kinds(plan: Plan) -> set[Kind]:
    return {move.block.kind for step in plan.steps for move in step.moves}


@pytest.mark.parametrize("mask", [causal(64), documents([30, 34], window=(25, 0))])
def test_what_is_kept_does_not_travel_again(mask: Mask) -> None:
    def backward(schedule: str, keep: bool = True) -> Plan:
        plan = build_plan(schedule, 4, mask, ModeOptions(inner_size=2))
        return backward_plan(keeping(plan) if keep else plan)

    assert kinds(backward("ulysses")) == {Kind.GRAD, Kind.DQ, Kind.DKV}
    assert kinds(backward("ulysses", keep=False)) == {Kind.KV, Kind.Q_GRAD, Kind.DQ, Kind.DKV}
    for schedule in ("ring", "zigzag", "all_gather", "double_ring"):
        assert kinds(backward(schedule)) == {Kind.DKV}
    # Several calls compute a query's attention: its out is not known where the first of them runs.
    assert kinds(backward("usp")) == {Kind.Q_GRAD, Kind.DQ, Kind.DKV}
    # Three quarters of a rank's tokens go to the others and as many come, for a quarter of the heads.
    assert moved_tokens(backward("ulysses"))[1][Kind.GRAD] == (12, 12)


def test_auto_keeps_with_ulysses_up_to_a_number_of_tokens() -> None:
    assert keeps_received("auto", "ulysses", 4, 4 * KEPT_TOKENS)
    assert not keeps_received("auto", "ulysses", 4, 4 * KEPT_TOKENS + 1)
    assert not keeps_received("auto", "ulysses", 4, 4 * KEPT_TOKENS, batch=2)
    assert not keeps_received("auto", "usp", 4, 64)
    assert keeps_received("true", "usp", 4, 2**24) and not keeps_received("true", "usp", 1, 64)
    assert not keeps_received("false", "ulysses", 4, 64)


def refuse(plan: Plan, message: str, forward: Plan | None = None) -> None:
    with pytest.raises(PlanError, match=message):
        verify(plan, forward)


def with_moves(plan: Plan, edit: dict[Kind, list[Move]]) -> Plan:
    step = plan.steps[0]
    moves = tuple(move for move in step.moves if move.block.kind not in edit)
    return replace(plan, steps=(step._replace(moves=moves + sum(map(tuple, edit.values()), ())), *plan.steps[1:]))


def test_plans_that_keep_wrongly_are_refused() -> None:
    plan = keeping(build_plan("ulysses", 3, 12))
    backward = backward_plan(plan)
    kept = list(plan.kept[0])
    keys = Block(Kind.KV, 1, 0, 4, heads=Heads(0, 3))
    assert keys in kept

    def keeps(blocks: list[Block], of: Plan = plan) -> Plan:
        return replace(of, kept=(tuple(blocks), *plan.kept[1:]))

    refuse(keeps([*kept, Block(Kind.KV, 1, 0, 4)]), r"rank 0 keeps kv1\[0:4\], which it never receives")
    refuse(keeps([*kept, Block(Kind.KV, 0, 0, 4)]), r"rank 0 keeps kv0\[0:4\], which is no query or key of another")
    refuse(keeps([*kept, Block(Kind.OUT, 1, 0, 4, 0)]), "which is no query or key of another rank")
    refuse(keeps([*kept, Block(Kind.KV, 1, 0, 9)]), "is not a span of its home rank's tokens")
    refuse(replace(plan, kept=plan.kept[1:]), "says of 2 ranks what they keep, has 3")
    refuse(backward, "takes something else for kept than ulysses keeps", build_plan("ulysses", 3, 12))
    refuse(plan, "though it is no backward plan", plan)
    # Backward without what it takes for kept, or without the gradients that it does not.
    refuse(keeps([b for b in kept if b != keys], backward), r"rank 0 attends kv.*before it arrives")
    queries = [block for block in kept if block.kind is Kind.KV]
    refuse(keeps(queries, backward), r"rank 0 attends q_grad.*before it arrives")
    refuse(with_moves(backward, {Kind.GRAD: []}), r"rank 0 attends grad1\[0:4\] heads 1/3 before it arrives")
    with pytest.raises(ValueError, match="is a backward plan: expected a forward plan"):
        keeping(backward)


def test_queries_whose_out_comes_from_several_calls_are_not_kept() -> None:
    plan = build_plan("usp", 4, 64, ModeOptions(inner_size=2))
    kept = [{move.block for step in plan.steps for move in step.moves if move.destination == r} for r in range(4)]
    queries = [tuple(sorted(block for block in blocks if block.kind is Kind.Q)) for blocks in kept]
    refuse(replace(plan, kept=tuple(queries)), r"rank \d keeps the out of q\d\[.*\].*, some of it from elsewhere")


WORK = Workload(8, 8, 64)


def test_the_price_of_keeping() -> None:
    """Of q, k, v, out, its gradient and LSE only the gradient comes in backward; dq, dk and dv go home as before."""
    length = 4 * 4096
    slow = Cluster("slow", 1, 4, Mesh(1.0))
    instant = Costs(1e6, 1e6, call_s=0.0, merge_gibps=1e9, step_s=0.0, message_s=0.0)
    plan = build_plan("ulysses", 4, length)
    kept = keeping(plan)
    token = 2 * 8 * 64 // 4  # bytes of one token of a quarter of the heads of one tensor
    lse = 4 * 8 // 4
    fetched, less = (simulate(backward_plan(each), slow, WORK, instant).seconds for each in (plan, kept))
    # To and from every other rank over a link of its own.
    assert fetched == pytest.approx(4096 * (8 * token + lse) / 2**30, rel=1e-3)
    assert less == pytest.approx(4096 * 4 * token / 2**30, rel=1e-3)
    assert simulate(kept, slow, WORK, instant).seconds == simulate(plan, slow, WORK, instant).seconds


def held(plan: Plan, work: Workload = WORK) -> Footprint:
    """On rank 0."""
    return footprint(lower(plan, 0, Target(work, PACKED)), work)


def test_memory_of_what_is_kept() -> None:
    plan, tensor, lse = build_plan("ulysses", 4, 4096), 1024 * 2 * 8 * 64, 1024 * 4 * 8
    kept = keeping(plan)
    assert held(plan).kept == 0 and held(kept).kept == 4 * tensor + lse  # q, k, v and out, with the rank's own share
    # Only outputs of its own queries come into shared buffers; in backward nothing of its own is read but the gradient.
    assert held(kept).buffers < held(plan).buffers
    assert lower(backward_plan(kept), 0, Target(WORK, PACKED)).reads_own == {Kind.GRAD}
    assert Kind.KV in lower(backward_plan(plan), 0, Target(WORK, PACKED)).reads_own
    # With more ranks than KV heads, several hold the same one.
    assert held(kept, Workload(8, 2, 64)).kept == 2 * tensor + lse + 2 * tensor // 4 * 2
    fetched = build_plan("all_gather", 4, 4096)  # rank 0 has the last tokens, which see everything
    gathered = keeping(fetched)
    assert held(gathered).kept == 3 * 2 * tensor == held(fetched).buffers and held(gathered).buffers == 0
    assert held(gathered).total == held(fetched).total


def test_modes_are_chosen_by_what_they_will_keep() -> None:
    cluster, target = load_cluster("h200_x8").resized(4), Target(Workload(32, 32, 128), PACKED)

    def ulysses(length: int, keep: str) -> float:
        problem = Problem(4, causal(length), target, keep_received=keep)
        (found,) = rank_modes(problem, cluster, candidates=[Ulysses()])
        return found.seconds

    short, long = 4 * KEPT_TOKENS, 4 * KEPT_TOKENS + 4
    assert ulysses(short, "auto") == ulysses(short, "true") < ulysses(short, "false")
    assert ulysses(long, "auto") == ulysses(long, "false") > ulysses(long, "true")


def test_a_plan_says_what_it_keeps() -> None:
    target = Target(Workload(8, 8, 64), PACKED)
    said = describe(keeping(build_plan("ulysses", 4, 64)), target)
    # Of q, k and v 64 tokens of 2 heads.
    assert "kept of other ranks', for backward: 48 KiB at most, and the outputs of its queries" in said
    assert "kept of" not in describe(build_plan("ulysses", 4, 64), target)
