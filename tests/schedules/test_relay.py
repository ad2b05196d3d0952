"""Partial gradients that are summed inside a node before they cross to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.compose import compose_config
from megatron_longctx.config import ranks_summed
from megatron_longctx.memory.shapes import Job
from megatron_longctx.schedules import (
    MODES,
    Block,
    Kind,
    Lowering,
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
    find_mode,
    keeping,
    ranks_to_sum,
    summing_in_nodes,
    transpose,
    verify,
)
from megatron_longctx.schedules.describe import describe
from megatron_longctx.schedules.footprint import footprint
from megatron_longctx.schedules.mask import full
from megatron_longctx.schedules.overlap import LEAST_TOKENS
from megatron_longctx.schedules.plan import GRADIENTS
from megatron_longctx.schedules.program import Merge, Space
from megatron_longctx.schedules.repeats import ShortPlans
from megatron_longctx.schedules.select import Problem, rank_modes
from megatron_longctx.schedules.simulate import simulate
from megatron_longctx.topology import Cluster, Device, Mesh, Network, load_cluster
from tests.schedules.follow import follow, parts_of
from tests.schedules.interpret import interpret
from tests.schedules.masks import masks
from tests.shared.plans import tangled_plan

PACKED = Takes(packed=True, rectangles=True, windows=True)


def crossing(plan: Plan, node: int) -> list[Move]:
    """Partial gradients that leave their node."""
    moves = (move for step in plan.steps for move in step.moves if move.block.kind in GRADIENTS)
    return [move for move in moves if move.source // node != move.destination // node]


def summed(plan: Plan, node: int) -> Plan:
    return backward_plan(summing_in_nodes(plan, node))


def check(plan: Plan, node: int) -> None:
    for forward in (plan, keeping(plan)):
        saying = summing_in_nodes(forward, node)
        for backward in (transpose(saying), backward_plan(saying)):
            verify(backward, saying)
            follow(backward, saying)
    seen: Counter[tuple[int, Block]] = Counter()  # by node and row, of one part of the heads
    parts = parts_of(backward)
    for (kind, home, start, stop, _, heads), source, _ in crossing(backward, node):
        each = parts // heads.parts
        for part in range(heads.part * each, (heads.part + 1) * each):
            seen.update((source // node, Block(kind, home, row, part)) for row in range(start, stop))
    assert max(seen.values(), default=1) == 1, "a row crosses from a node once"


@pytest.mark.parametrize("schedule", MODES)
@settings(max_examples=20, deadline=None)
@given(masks(), st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 2), (2, 4)]), st.data())
def test_sums_are_proved_for_every_mode_and_mask(
    schedule: str, mask: Mask, nodes: tuple[int, int], data: st.DataObject
) -> None:
    n, node = nodes[0] * nodes[1], nodes[1]
    inner = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
    check(build_plan(schedule, n, mask, ModeOptions(data.draw(st.sampled_from([None, 3, 8])), inner)), node)


@pytest.mark.parametrize("schedule", MODES)
@settings(max_examples=15, deadline=None)
@given(masks(30), st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.data())
def test_programs_add_up_what_plans_say(schedule: str, mask: Mask, nodes: tuple[int, int], data: st.DataObject) -> None:
    """Every pair once in every gradient, whoever reads whose memory, in any order in which ranks may run."""
    n, node = nodes[0] * nodes[1], nodes[1]
    plan = build_plan(schedule, n, mask, ModeOptions(data.draw(st.sampled_from([None, 6]))))
    plan = summing_in_nodes(keeping(plan) if data.draw(st.booleans()) else plan, node)
    of_node = tuple(tuple(range(r // node * node, (r // node + 1) * node)) for r in range(n))
    hosts = data.draw(st.sampled_from([None, of_node, (tuple(range(n)),) * n]))
    parts = parts_of(plan)
    target = Target(Workload(2 * parts, parts, 2), PACKED, hosts)
    order = data.draw(st.randoms(use_true_random=False))
    interpret(backward_plan(plan), target, interpret(plan, target, order=order), order)


OTHERS = ("zigzag", "double_ring", "tasp", "all_gather")
CROSS = {"ring": (512, 128), **dict.fromkeys(OTHERS, (768, 192))}


@pytest.mark.parametrize("schedule", CROSS)
def test_what_crosses_between_two_nodes_of_four(schedule: str) -> None:
    """256 causal tokens: a row of dK, dV for each of the 4 ranks of the other node that see it, or one."""
    plan = build_plan(schedule, 8, 256, ModeOptions(inner_size=4))
    found = [sum(move.block.tokens for move in crossing(each, 4)) for each in (backward_plan(plan), summed(plan, 4))]
    assert tuple(found) == CROSS[schedule]
    # The ranks of a node make even parts of its sums.
    made = Counter(move.source for move in crossing(summed(plan, 4), 4) for _ in range(move.block.tokens))
    for node in (range(4), range(4, 8)):
        assert len({made[rank] for rank in node}) == 1 or schedule == "tasp"
        assert max(made[rank] for rank in node) <= 1.25 * sum(made[rank] for rank in node) / 4


@pytest.mark.parametrize("schedule", ["zigzag", "ring", "double_ring", "tasp"])
def test_a_ring_takes_one_step_more(schedule: str) -> None:
    """Since the rank that computes the last part makes the sum."""
    plan = build_plan(schedule, 8, full(256), ModeOptions(inner_size=4))
    assert len(summed(plan, 4).steps) == len(backward_plan(plan).steps) + 1


def test_without_other_nodes_nothing_changes() -> None:
    for schedule in MODES:
        plan = build_plan(schedule, 4, 64, ModeOptions(inner_size=2))
        assert summing_in_nodes(plan, 0) is plan
        for node in (1, 4, 8):
            assert summed(plan, node).steps == backward_plan(plan).steps
    for node in (1, 2):  # no head's gradient is computed by two ranks of a node
        usp = build_plan("usp", 8, 64, ModeOptions(inner_size=2))
        assert summed(usp, node).steps == backward_plan(usp).steps
    with pytest.raises(ValueError, match="zigzag is a backward plan: expected a forward plan"):
        summing_in_nodes(backward_plan(build_plan("zigzag", 4, 64)), 2)


def relayed() -> Plan:
    """Ranks 2 and 3 have gradients for 0 and 1: rank 3 sums those for 0, rank 2 those for 1."""
    plan = transpose(summing_in_nodes(build_plan("ring", 4, 16), 2))
    verify(plan)
    moves = [(t, str(move.block), *move[1:]) for t, step in enumerate(plan.steps) for move in step.moves]
    assert [each for each in moves if "dkv0[0:4] by" in each[1] or "dkv1[0:4] by" in each[1]] == [
        (2, "dkv0[0:4] by 1", 1, 0),
        (3, "dkv0[0:4] by 2", 2, 3),
        (3, "dkv1[0:4] by 3", 3, 2),
        (5, "dkv0[0:4] by 3", 3, 0),
        (5, "dkv1[0:4] by 2", 2, 1),
    ]
    return plan


def edited(plan: Plan, edit: Callable[[int, Move], list[Move]]) -> Plan:
    steps = [step._replace(moves=tuple(e for m in step.moves for e in edit(t, m))) for t, step in enumerate(plan.steps)]
    return replace(plan, steps=tuple(steps))


def of(t: int, home: int, by: int) -> Callable[[int, Move], bool]:
    block = Block(Kind.DKV, home, 0, 4, by)
    return lambda step, move: step == t and move.block == block


def test_a_partial_that_is_summed_twice_is_refused() -> None:
    plan = relayed()
    to_relay, sums = of(3, 0, 2), of(5, 0, 3)
    for again in (
        edited(plan, lambda t, m: [m, m] if to_relay(t, m) else [m]),
        # To the one that sums and home, too.
        edited(plan, lambda t, m: [m, m._replace(destination=0)] if to_relay(t, m) else [m]),
        edited(plan, lambda t, m: [m, m] if sums(t, m) else [m]),
    ):
        with pytest.raises(PlanError, match=r"the source has nothing of it computed that is not sent yet"):
            verify(again)
    late = list(plan.steps)
    late[4] = late[4]._replace(moves=(Move(Block(Kind.DKV, 0, 0, 4, 2), 3, 0),))
    with pytest.raises(PlanError, match=r"dkv0\[0:4\] by 2 from 3 to 0: what has arrived there is part of a sum"):
        verify(replace(plan, steps=tuple(late)))


def test_a_partial_that_is_left_out_is_refused() -> None:
    plan = relayed()
    for lost, name in ((of(3, 0, 2), "dkv0.* by 2"), (of(5, 0, 3), "dkv0.* by 3"), (of(5, 1, 2), "dkv1.* by 2")):
        with pytest.raises(PlanError, match=rf"^ring: {name} never reaches its home, nor do \d more results"):
            verify(edited(plan, lambda t, m, lost=lost: [] if lost(t, m) else [m]))  # type: ignore[misc]
    # The sum leaves before the last of it has come: what came in a step is added up in the next.
    to_0, to_1 = plan.steps[5].moves
    early = list(plan.steps)
    early[4:] = [early[4]._replace(moves=(to_1,)), early[5]._replace(moves=(to_0,))]
    with pytest.raises(PlanError, match=r"dkv1\[0:4\] by 2 never reaches its home, nor do 0 more results"):
        verify(replace(plan, steps=tuple(early)))
    # Half of it arrives.
    half = edited(plan, lambda t, m: [m._replace(block=m.block._replace(stop=2))] if of(5, 0, 3)(t, m) else [m])
    with pytest.raises(PlanError, match=r"dkv0\[0:2\] by 3 from 3 to 0: .*(cuts a result|nothing of it computed)"):
        verify(half)


def test_a_partial_that_bypasses_the_sum_is_refused() -> None:
    plan = edited(relayed(), lambda t, m: [m._replace(destination=0)] if of(3, 0, 2)(t, m) else [m])
    with pytest.raises(PlanError, match=r"dkv0\[0:4\] by 3 and dkv0\[0:4\] by 2 both leave the node .* their sum$"):
        verify(plan)
    with pytest.raises(PlanError, match=r"goes from 3 to 2: expected its home, or a rank of the node that sums"):
        verify(replace(plan, sum_in_node=0))  # it is right, but no sum was asked for


def test_sums_of_uneven_parts_of_a_block() -> None:
    """Ranks see different rows of one block: what overlaps is summed, in one message of all its rows."""
    for node in (1, 2):
        check(tangled_plan(15), node)


def test_parts_are_added_in_a_fixed_order_in_accumulators() -> None:
    plan = summed(build_plan("zigzag", 8, full(256)), 4)
    lowering = Lowering(plan, Target(Workload(2, 2, 2), PACKED))
    for rank in range(8):
        program = lowering.program(rank)
        (sum_of,) = [move for move in crossing(plan, 4) if move.source == rank]
        region = next(m.region for some in program.sends.messages for m in some if m.block == sum_of.block)
        every = [op for op in program.ops if isinstance(op, Merge)]
        (last,) = [op for op in every if op.into[:2] == (Space.SENT, region)]
        totals = {(Space.ACCUMULATOR, part.rows.number) for part in last.parts if part.rows.space is Space.ACCUMULATOR}
        merges = [op for op in every if op is last or op.into[:2] in totals]
        added = [part.rows.space for op in merges for part in op.parts if part.rows.space is not Space.ACCUMULATOR]
        # Its own, and in the order of arrival those of the node's three others.
        assert sorted(added) == [Space.BUFFER, Space.BUFFER, Space.BUFFER, Space.CALL]
        assert program.ops == lowering.program(rank).ops


SLOW = Cluster("two", 2, 4, Mesh(50.0), Network(1, 5.0), Device("fast", 900.0, 0.6))


def test_auto_sums_where_links_within_a_node_are_faster() -> None:
    assert ranks_to_sum("auto", SLOW, 8) == ranks_to_sum("true", SLOW, 8) == 4 and ranks_to_sum("false", SLOW, 8) == 0
    fast = replace(SLOW, network=Network(4, 60.0))
    assert ranks_to_sum("auto", fast, 8) == 0 and ranks_to_sum("true", fast, 8) == 4
    assert ranks_to_sum("auto", replace(fast, network=Network(2, 60.0)), 8) == 4, "two ranks share a NIC"
    alone = load_cluster("dgx_h100_x1")
    for setting in ("auto", "true", "false"):
        assert ranks_to_sum(setting, alone, 8) == ranks_to_sum(setting, load_cluster("h200_8x1_ib400"), 8) == 0
        assert ranks_to_sum(setting, SLOW, 4) == 0
    assert ranks_to_sum("auto", None, 8) == ranks_to_sum("false", None, 8) == ranks_to_sum("true", None, 1) == 0
    with pytest.raises(ValueError, match=r"attention.sum_in_node=true: expected parallelism.cluster, which says"):
        ranks_to_sum("true", None, 8)


@pytest.mark.parametrize("schedule", ["zigzag", "ring", "double_ring", "tasp"])
def test_where_the_network_is_the_limit_backward_is_faster(schedule: str) -> None:
    """By about what crosses less: keys and values still do, 1 of 5 blocks (of double rings more)."""
    plan = build_plan(schedule, 8, full(8 * LEAST_TOKENS), ModeOptions(inner_size=4, cluster=SLOW))
    target = Target(Workload(8, 8, 64), PACKED)
    plain, less = (simulate(each, SLOW, target) for each in (backward_plan(plan), summed(plan, 4)))
    assert less.seconds < 0.6 * plain.seconds
    assert less.links[next(r for r in less.links if r.kind == "nic_out")] * less.seconds < 0.6 * plain.seconds


@pytest.mark.parametrize("schedule", ["zigzag", "ring"])
def test_no_rank_of_many_nodes_has_many_sums_at_a_time(schedule: str) -> None:
    """One part comes to a rank in a step, as one gradient does without sums; else all wait for the one that adds."""
    plan = summed(build_plan(schedule, 32, full(32 * 32)), 4)
    moves = [(t, move) for t, step in enumerate(plan.steps) for move in step.moves if move.block.kind is Kind.DKV]
    came = Counter((t, move.destination) for t, move in moves if move.destination != move.block.home)
    assert set(came.values()) == {1}
    cluster = replace(SLOW, nodes=8, network=Network(4, 5.0))
    plain = backward_plan(build_plan(schedule, 32, full(32 * 2048)))
    less = summed(build_plan(schedule, 32, full(32 * 2048)), 4)
    times = [simulate(each, cluster, Target(Workload(32, 8, 128), PACKED)).seconds for each in (plain, less)]
    assert times[1] < times[0]


def test_simulations_of_repeating_steps_hold_for_sums() -> None:
    """Of steps that repeat a few are lowered: the same as all of them."""
    cluster, target = replace(SLOW, nodes=48), Target(Workload(2, 2, 8), PACKED)
    plan = summed(build_plan("zigzag", 192, full(192 * 64)), 4)
    assert all(ShortPlans(plan, target.workload).of(rank).cuts for rank in (0, 77, 191))
    short, whole = (simulate(plan, cluster, target, timeline=timeline) for timeline in (False, True))
    assert short.seconds == pytest.approx(whole.seconds, rel=1e-12) and short.peak_bytes == whole.peak_bytes


def test_the_memory_of_a_sum_is_counted() -> None:
    """Buffers for what arrives, and a sum at a time: of a few blocks, however many ranks there are."""
    work = Workload(4, 4, 64)
    for n, node in ((8, 2), (8, 4), (16, 4), (16, 8)):
        plan = build_plan("zigzag", n, full(n * 1024))
        found = [
            max(footprint(Lowering(each, Target(work, PACKED)).program(rank), work).total for rank in range(n))
            for each in (backward_plan(plan), summed(plan, node))
        ]
        assert 0 < found[1] - found[0] <= 10 * 1024 * work.token_bytes(Kind.DKV)


def test_configurations_say_what_the_nodes_are() -> None:
    """The plan that training runs, `plan` shows, memory counts and `auto` prices is the same."""

    def ranks(setting: str, *more: str) -> int:
        words = ["model=tiny", "parallelism.context_parallel_size=16", f"attention.sum_in_node={setting}", *more]
        config = compose_config([*words, *more])
        assert Job(config, 256).backward.sum_in_node == ranks_summed(config)
        return ranks_summed(config)

    several, one = "parallelism.cluster=a100_2x8", "parallelism.context_parallel_size=8"
    assert ranks("auto", several) == ranks("true", several) == 8
    assert ranks("false", several) == ranks("auto") == ranks("auto", several, one) == ranks("true", several, one) == 0


def test_a_plan_says_that_it_sums() -> None:
    plan = build_plan("zigzag", 4, 64)
    assert "nodes    of 2 ranks sum" in describe(summed(plan, 2)) and "nodes" not in describe(backward_plan(plan))


def test_modes_are_chosen_by_sums() -> None:
    def backward(setting: str) -> float:
        options = ModeOptions(cluster=SLOW)
        target = Target(Workload(8, 8, 64), PACKED)
        problem = Problem(8, full(8192), target, options=options, sum_in_node=setting)
        (found,) = rank_modes(problem, SLOW, candidates=[find_mode("zigzag", 8, options)])
        return found.predicted[1]

    assert backward("auto") == backward("true") < backward("false")
