"""Partial gradients that are summed within a node before they are sent to another node."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.config import summed_node_size
from megatron_longctx.config.cluster import Cluster, Device, Mesh, Network, load_cluster
from megatron_longctx.core.plans import (
    MODES,
    Block,
    KernelSupport,
    Kind,
    Mask,
    ModeOptions,
    Move,
    Plan,
    Recorder,
    Target,
    Workload,
    backward_plan,
    build_plan,
    find_mode,
    keep_received,
    node_size_to_sum,
    sum_in_nodes,
    transpose,
)
from megatron_longctx.core.plans.backward import LEAST_TOKENS
from megatron_longctx.core.plans.mask import full
from megatron_longctx.core.plans.plan import GRADIENTS
from megatron_longctx.core.plans.recording import Merge, Place
from megatron_longctx.planner.choose_mode import Problem, rank_modes
from megatron_longctx.planner.describe import describe
from megatron_longctx.planner.footprint import footprint
from megatron_longctx.planner.memory.shapes import Job
from megatron_longctx.planner.simulate import simulate
from megatron_longctx.testing.verify import PlanError, verify
from megatron_longctx.training.compose import compose_config
from tests.core.plans.masks import masks, parts_of
from tests.shared.plans import tangled_plan, with_moves

PACKED = KernelSupport(packed=True, rectangles=True, windows=True)


def crossing(plan: Plan, node: int) -> list[Move]:
    """Return the moves of partial gradients between nodes."""
    moves = (move for step in plan.steps for move in step.moves if move.block.kind in GRADIENTS)
    return [move for move in moves if move.source // node != move.destination // node]


def summed(plan: Plan, node: int) -> Plan:
    return backward_plan(sum_in_nodes(plan, node))


def check(plan: Plan, node: int) -> None:
    for forward in (plan, keep_received(plan)):
        with_sums = sum_in_nodes(forward, node)
        for backward in (transpose(with_sums), backward_plan(with_sums)):
            verify(backward, with_sums)
    sent: Counter[tuple[int, Block]] = Counter()  # keyed by node and row, for one part of the heads
    parts = parts_of(backward)
    for (kind, home, start, stop, _, heads), source, _ in crossing(backward, node):
        each = parts // heads.parts
        for part in range(heads.part * each, (heads.part + 1) * each):
            sent.update((source // node, Block(kind, home, row, part)) for row in range(start, stop))
    assert max(sent.values(), default=1) == 1, "a row leaves a node once"


@pytest.mark.parametrize("schedule", MODES)
@settings(max_examples=20, deadline=None)
@given(masks(), st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 2), (2, 4)]), st.data())
def test_sums_are_proved_for_every_mode_and_mask(
    schedule: str, mask: Mask, nodes: tuple[int, int], data: st.DataObject
) -> None:
    n, node = nodes[0] * nodes[1], nodes[1]
    inner = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
    check(build_plan(schedule, n, mask, ModeOptions(data.draw(st.sampled_from([None, 3, 8])), inner)), node)


OTHERS = ("zigzag", "double_ring", "node_gather", "tasp", "all_gather")
CROSS = {"ring": (512, 128), **dict.fromkeys(OTHERS, (768, 192))}


@pytest.mark.parametrize("schedule", CROSS)
def test_tokens_sent_between_two_nodes_of_four(schedule: str) -> None:
    """256 causal tokens: one row of dK, dV for each of the 4 ranks of the other node that see it, or one in all."""
    plan = build_plan(schedule, 8, 256, ModeOptions(inner_size=4))
    found = [sum(move.block.tokens for move in crossing(each, 4)) for each in (backward_plan(plan), summed(plan, 4))]
    assert tuple(found) == CROSS[schedule]
    # The ranks of a node share its sums evenly.
    made = Counter(move.source for move in crossing(summed(plan, 4), 4) for _ in range(move.block.tokens))
    for node in (range(4), range(4, 8)):
        assert len({made[rank] for rank in node}) == 1 or schedule == "tasp"
        assert max(made[rank] for rank in node) <= 1.25 * sum(made[rank] for rank in node) / 4


@pytest.mark.parametrize("schedule", ["zigzag", "ring", "double_ring", "tasp"])
def test_a_ring_takes_one_step_more(schedule: str) -> None:
    """Because the rank that computes the last part makes the sum."""
    plan = build_plan(schedule, 8, full(256), ModeOptions(inner_size=4))
    assert len(summed(plan, 4).steps) == len(backward_plan(plan).steps) + 1


def test_without_other_nodes_nothing_changes() -> None:
    for schedule in MODES:
        plan = build_plan(schedule, 4, 64, ModeOptions(inner_size=2))
        assert sum_in_nodes(plan, 0) is plan
        for node in (1, 4, 8):
            assert summed(plan, node).steps == backward_plan(plan).steps
    for node in (1, 2):  # no head's gradient is computed by two ranks of a node
        usp = build_plan("usp", 8, 64, ModeOptions(inner_size=2))
        assert summed(usp, node).steps == backward_plan(usp).steps


def relayed() -> Plan:
    """Return a plan in which ranks 2 and 3 have gradients for 0 and 1; rank 3 sums those for 0, rank 2 those for 1."""
    plan = transpose(sum_in_nodes(build_plan("ring", 4, 16), 2))
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


def edited(plan: Plan, t: int, home: int, by: int, edit: Callable[[Move], list[Move]]) -> Plan:
    """Return the plan with the move of one gradient in step `t` replaced."""
    block = Block(Kind.DKV, home, 0, 4, by)
    return with_moves(plan, t, lambda moves: [e for m in moves for e in (edit(m) if m.block == block else [m])])


def test_a_partial_that_is_summed_twice_is_refused() -> None:
    plan = relayed()
    for again in (
        edited(plan, 3, 0, 2, lambda m: [m, m]),
        edited(plan, 3, 0, 2, lambda m: [m, m._replace(destination=0)]),  # to the summing rank and home
        edited(plan, 5, 0, 3, lambda m: [m, m]),
    ):
        with pytest.raises(PlanError, match=r"the source has nothing of it computed that is not sent yet"):
            verify(again)
    late = with_moves(plan, 4, lambda _: [Move(Block(Kind.DKV, 0, 0, 4, 2), 3, 0)])
    with pytest.raises(PlanError, match=r"dkv0\[0:4\] by 2 from 3 to 0: what has arrived there is part of a sum"):
        verify(late)


def test_a_partial_that_is_left_out_is_refused() -> None:
    plan = relayed()
    for place, name in (((3, 0, 2), "dkv0.* by 2"), ((5, 0, 3), "dkv0.* by 3"), ((5, 1, 2), "dkv1.* by 2")):
        with pytest.raises(PlanError, match=rf"^ring: {name} never reaches its home, nor do \d more results"):
            verify(edited(plan, *place, lambda _: []))
    # The sum leaves before its last part has arrived: what arrives in a step is added up in the next.
    to_0, to_1 = plan.steps[5].moves
    early = with_moves(with_moves(plan, 4, lambda _: [to_1]), 5, lambda _: [to_0])
    with pytest.raises(PlanError, match=r"dkv1\[0:4\] by 2 never reaches its home, nor do 0 more results"):
        verify(early)
    half = edited(plan, 5, 0, 3, lambda m: [m._replace(block=m.block._replace(stop=2))])
    with pytest.raises(PlanError, match=r"dkv0\[0:2\] by 3 from 3 to 0: .*(cuts a result|nothing of it computed)"):
        verify(half)


def test_a_partial_that_bypasses_the_sum_is_refused() -> None:
    plan = edited(relayed(), 3, 0, 2, lambda m: [m._replace(destination=0)])
    with pytest.raises(PlanError, match=r"dkv0\[0:4\] by 3 and dkv0\[0:4\] by 2 both leave the node .* their sum$"):
        verify(plan)
    with pytest.raises(PlanError, match=r"goes from 3 to 2: expected its home, or a rank of the node that sums"):
        verify(replace(plan, sum_in_node=0))  # the moves are correct, but the plan does not declare sums


def test_sums_of_uneven_parts_of_a_block() -> None:
    """If ranks see different rows of one block, overlapping rows are summed, in one message of all rows."""
    for node in (1, 2):
        check(tangled_plan(15), node)


def test_parts_are_added_in_a_fixed_order_in_sums() -> None:
    plan = summed(build_plan("zigzag", 8, full(256)), 4)
    recorder = Recorder(plan, Target(Workload(2, 2, 2), PACKED))
    for rank in range(8):
        recording = recorder.record(rank)
        (sum_of,) = [move for move in crossing(plan, 4) if move.source == rank]
        region = next(m.region for some in recording.sends.messages for m in some if m.block == sum_of.block)
        every = [op for op in recording.ops if isinstance(op, Merge)]
        (last,) = [op for op in every if (op.into.memory.place, op.into.memory.number) == (Place.SENT, region)]
        totals = {part.rows.memory for part in last.parts if part.rows.memory.place is Place.SUM}
        merges = [op for op in every if op is last or op.into.memory in totals]
        places = [part.rows.memory.place for op in merges for part in op.parts]
        # Its own, and in the order of arrival those of the node's three others.
        added = [place for place in places if place is not Place.SUM]
        assert sorted(added) == [Place.CALL, Place.HELD, Place.HELD, Place.HELD]


SLOW = Cluster("two", 2, 4, Mesh(50.0), Network(1, 5.0), Device("fast", 900.0, 0.6))


def test_auto_sums_if_links_within_a_node_are_faster() -> None:
    assert (
        node_size_to_sum(None, SLOW, 8) == node_size_to_sum(True, SLOW, 8) == 4
        and node_size_to_sum(False, SLOW, 8) == 0
    )
    fast = replace(SLOW, network=Network(4, 60.0))
    assert node_size_to_sum(None, fast, 8) == 0 and node_size_to_sum(True, fast, 8) == 4
    assert node_size_to_sum(None, replace(fast, network=Network(2, 60.0)), 8) == 4, "two ranks share a NIC"
    alone = load_cluster("dgx_h100_x1")
    for setting in (None, True, False):
        assert node_size_to_sum(setting, alone, 8) == node_size_to_sum(setting, load_cluster("h200_8x1_ib400"), 8) == 0
        assert node_size_to_sum(setting, SLOW, 4) == 0
    assert node_size_to_sum(None, None, 8) == node_size_to_sum(False, None, 8) == node_size_to_sum(True, None, 1) == 0
    with pytest.raises(ValueError, match=r"sum_in_node=True: expected a cluster, which defines"):
        node_size_to_sum(True, None, 8)


@pytest.mark.parametrize("schedule", ["zigzag", "ring", "double_ring", "tasp"])
def test_backward_is_faster_if_the_network_is_the_limit(schedule: str) -> None:
    """It saves the gradients that no longer leave a node; keys and values, 1 of 5 blocks or more, still do."""
    plan = build_plan(schedule, 8, full(8 * LEAST_TOKENS), ModeOptions(inner_size=4, cluster=SLOW))
    target = Target(Workload(8, 8, 64), PACKED)
    plain, less = (simulate(each, SLOW, target) for each in (backward_plan(plan), summed(plan, 4)))
    assert less.seconds < 0.6 * plain.seconds
    assert less.links[next(r for r in less.links if r.kind == "nic_out")] * less.seconds < 0.6 * plain.seconds


@pytest.mark.parametrize("schedule", ["zigzag", "ring"])
def test_no_rank_of_many_nodes_has_many_sums_at_a_time(schedule: str) -> None:
    """One part arrives per rank and step, as one gradient does without sums. Else all would wait for one rank."""
    plan = summed(build_plan(schedule, 32, full(32 * 32)), 4)
    moves = [(t, move) for t, step in enumerate(plan.steps) for move in step.moves if move.block.kind is Kind.DKV]
    arrived = Counter((t, move.destination) for t, move in moves if move.destination != move.block.home)
    assert set(arrived.values()) == {1}
    cluster = replace(SLOW, nodes=8, network=Network(4, 5.0))
    plain = backward_plan(build_plan(schedule, 32, full(32 * 2048)))
    less = summed(build_plan(schedule, 32, full(32 * 2048)), 4)
    times = [simulate(each, cluster, Target(Workload(32, 8, 128), PACKED)).seconds for each in (plain, less)]
    assert times[1] < times[0]


def test_the_memory_of_a_sum_is_counted() -> None:
    """Buffers for arriving parts, and one sum at a time: a few blocks, for any number of ranks."""
    work = Workload(4, 4, 64)
    for n, node in ((8, 2), (8, 4), (16, 4), (16, 8)):
        plan = build_plan("zigzag", n, full(n * 1024))
        found = [
            max(footprint(Recorder(each, Target(work, PACKED)).record(rank), work).total for rank in range(n))
            for each in (backward_plan(plan), summed(plan, node))
        ]
        assert 0 < found[1] - found[0] <= 10 * 1024 * work.token_bytes(Kind.DKV)


def test_configurations_define_the_nodes() -> None:
    """Training, `plan`, the memory model and `auto` use the same plan."""

    def ranks(setting: str, *more: str) -> int:
        words = ["model=tiny", "parallelism.context_parallel_size=16", f"attention.sum_in_node={setting}", *more]
        config = compose_config([*words, *more])
        assert backward_plan(Job(config, 256).plan).sum_in_node == summed_node_size(config)
        return summed_node_size(config)

    several, one = "parallelism.cluster=a100_2x8", "parallelism.context_parallel_size=8"
    assert ranks("auto", several) == ranks("true", several) == 8
    assert ranks("false", several) == ranks("auto") == ranks("auto", several, one) == ranks("true", several, one) == 0


def test_descriptions_name_sums() -> None:
    plan = build_plan("zigzag", 4, 64)
    assert "nodes    2 ranks each sum" in describe(summed(plan, 2)) and "nodes" not in describe(backward_plan(plan))


def test_modes_are_chosen_by_sums() -> None:
    def backward(setting: bool | None) -> float:
        options = ModeOptions(cluster=SLOW)
        target = Target(Workload(8, 8, 64), PACKED)
        problem = Problem(8, full(8192), target, options=options, sum_in_node=setting)
        (found,) = rank_modes(problem, SLOW, candidates=[find_mode("zigzag", 8, options)])
        return found.predicted[1]

    assert backward(None) == backward(True) < backward(False)
