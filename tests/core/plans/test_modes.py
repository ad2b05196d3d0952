"""Properties of each mode besides correctness: balance, few messages, use of links."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.config.cluster import load_cluster
from megatron_longctx.config.tasp import Tasp
from megatron_longctx.core.layout import LAYOUTS, contiguous
from megatron_longctx.core.plans import (
    MODES,
    Attend,
    Block,
    KernelSupport,
    Kind,
    Mask,
    ModeOptions,
    Move,
    Plan,
    Recorder,
    Step,
    Target,
    Workload,
    backward_plan,
    build_plan,
    find_mode,
    kernel_calls,
    record,
    sum_in_nodes,
)
from megatron_longctx.core.plans.mask import documents, full
from megatron_longctx.core.plans.modes.double_ring import DoubleRing
from megatron_longctx.core.plans.modes.helper import Helper
from megatron_longctx.core.plans.modes.node_gather import NodeGather
from megatron_longctx.core.plans.plan import trim
from megatron_longctx.core.plans.recording import Compute
from megatron_longctx.planner.describe import idle_fraction, imbalance_pct
from megatron_longctx.testing.verify import verify
from tests.core.plans.masks import masks

PACKED = KernelSupport(packed=True, rectangles=True, windows=True)


def moves_of(plan: Plan) -> list[Move]:
    return [move for step in plan.steps for move in step.moves]


def idle_slots(plan: Plan) -> Fraction:
    """Return the rank-steps without a call between the first and the last call, as a share of n x n.

    This is the measure of DistFlashAttn (section 3.2), which counts the diagonal block as a whole one: (n^2 - n) / 2n^2
    for the plain ring.
    """
    busy = [t for t, step in enumerate(plan.steps) if any(step.attends)]
    return Fraction(sum(step.attends.count(()) for step in plan.steps[busy[0] : busy[-1] + 1]), plan.n**2)


@pytest.mark.parametrize("name", MODES)
def test_a_layout_depends_on_the_documents_and_not_on_their_windows(name: str) -> None:
    mode = find_mode(name, 4, ModeOptions())
    pack, one = ([300, 20, 20, 60], [400])
    layouts = [build_plan(mode, 4, documents(pack, window=(w, None))).queries for w in (None, 0, 16)]
    assert layouts[0] == layouts[1] == layouts[2]
    own = name in ("striped", "ulysses", "usp")
    assert layouts[0].name == (mode.layout if own else "balanced")
    assert build_plan(mode, 4, documents(one)).queries.name == mode.layout


@pytest.mark.parametrize("name", [name for name in MODES if MODES[name].takes_any_layout])
def test_every_layout_can_be_named(name: str) -> None:
    for layout in LAYOUTS:
        for mask in (documents([300, 20, 20, 60]), documents([400])):
            plan = build_plan(name, 4, mask, layout=layout)
            assert plan.queries.name == layout
            verify(plan)


@pytest.mark.parametrize("name", ["ulysses", "usp"])
def test_a_layout_that_a_mode_cannot_take_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"layout=balanced: expected .* another schedule than {name}"):
        build_plan(name, 4, documents([4, 4]), layout="balanced")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", [name for name in MODES if name not in ("striped", "ulysses", "usp")])
def test_short_whole_documents_send_nothing(name: str, backward: bool) -> None:
    plan = build_plan(name, 8, documents([256] * 64))
    recorder = Recorder(backward_plan(plan) if backward else plan, Target(Workload(8, 2, 64), PACKED))
    assert recorder.send_bytes() == 0
    assert not moves_of(recorder.plan)


def test_a_pack_takes_one_call_of_own_keys_and_one_or_two_of_others() -> None:
    """Whatever the number of documents on a rank."""
    lengths = [1450, 1879, 4182, 1610, 9859, 287, 2502, 425, 1696, 1276, 1272, 144, 2001, 3836, 13564, 4919, 112, 415]
    plan = build_plan("all_gather", 8, documents(lengths))
    target = Target(Workload(8, 2, 64), PACKED)
    calls = [sum(isinstance(op, Compute) for op in record(plan, rank, target).ops) for rank in range(8)]
    assert all(1 <= count <= 3 for count in calls) and sum(calls) <= 16


@pytest.mark.parametrize("n", range(2, 12))
def test_idle_slots_of_helper_and_ring_are_the_papers(n: int) -> None:
    assert idle_slots(build_plan(Helper(shares=False), n, 16 * n)) == (0 if n % 2 else Fraction(1, 2 * n))
    assert idle_slots(build_plan("ring", n, 16 * n)) == Fraction(n * n - n, 2 * n * n)


@pytest.mark.parametrize("n", [3, 4, 8])
def test_helpers_that_share_the_last_pairs_leave_nobody_idle(n: int) -> None:
    """The paper's own schedule reaches n / (n + 1) of the ranks' speed for even n."""
    plan, printed = (build_plan(mode, n, 4096 * n) for mode in ("helper", Helper(shares=False)))
    verify(plan)
    verify(backward_plan(plan), plan)
    assert idle_slots(plan) == 0 and imbalance_pct(plan) == pytest.approx(0, abs=1e-9)
    assert 1 - idle_fraction(printed) == pytest.approx(1 if n % 2 else n / (n + 1), rel=1e-3)
    # Results of the last helpers travel while ranks compute the rest of their own blocks, forward and backward.
    assert all(any(each.steps[-1].attends) and each.steps[-1].moves for each in (plan, backward_plan(plan)))


@pytest.mark.parametrize("n", [3, 4, 7, 8])
def test_helpers_halve_the_steps(n: int) -> None:
    plan = build_plan("helper", n, 16 * n)
    assert sum(any(step.attends) for step in plan.steps) == n // 2 + 1
    kinds = Counter(move.block.kind for move in moves_of(plan))
    assert kinds[Kind.Q] == kinds[Kind.OUT] > 0


@pytest.mark.parametrize("n", [3, 5, 7, 8])
def test_tasp_uses_every_link_once_a_step(n: int) -> None:
    plan, one_ring = (build_plan(name, n, full(2 * n * (n - 1) * 4)) for name in ("tasp", "zigzag"))

    def links(step: Step) -> Counter[tuple[int, int]]:
        tokens: Counter[tuple[int, int]] = Counter()
        for block, source, destination in step.moves:
            tokens[source, destination] += block.tokens
        return tokens

    assert all(len(links(step)) == n * (n - 1) for step in plan.steps[:-1])
    # Each link carries an (n-1)-th of what one ring's links carry.
    assert max(links(plan.steps[0]).values()) * (n - 1) == max(links(one_ring.steps[0]).values())


@pytest.mark.parametrize("schedule", ["tasp", "all_gather", "zigzag", "double_ring"])
def test_the_keys_of_a_step_take_two_kernel_calls_at_most(schedule: str) -> None:
    """All pieces that the same queries see are side by side."""
    plan = build_plan(schedule, 8, 8 * 7 * 2 * 4)
    assert max(len(attends) for step in plan.steps for attends in step.attends) == 1
    calls = [kernel_calls(a.slices, PACKED) for step in plan.steps for attends in step.attends for a in attends]
    assert max(map(len, calls)) == (2 if schedule in ("tasp", "all_gather") else 1)


@pytest.mark.parametrize("rings", [(), ((0, 1, 2),), ((0, 1, 1, 2),)])
def test_tasp_refuses_wrong_rings(rings) -> None:
    with pytest.raises(ValueError, match="expected at least one ring that passes each of the 4 ranks once"):
        build_plan(Tasp(rings), 4, 64)


@pytest.mark.parametrize(("n", "inner"), [(4, 2), (8, 4), (6, 3), (6, 1), (5, 5)])
def test_double_ring_crosses_nodes_once_a_round(n: int, inner: int) -> None:
    def crossing(plan: Plan) -> int:
        return sum(m.block.tokens for m in moves_of(plan) if m.source // inner != m.destination // inner)

    plan = build_plan(DoubleRing(inner), n, full(16 * n))
    assert crossing(plan) == (n // inner - 1) * 16 * n
    if n == 8:  # a flat ring crosses between two nodes with every block that it passes there
        assert crossing(build_plan("zigzag", n, full(16 * n))) > crossing(plan)


SHOWN = (
    *(Mask.causal(75), full(75), documents([75], window=(13, 0)), documents([75], causal=False, window=(9, 4))),
    *(documents([20, 1, 33, 21]), documents([25, 30, 20], prefixes=[9, 0, 4], parents=[-1, 0, 0])),
)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_node_gather_is_proved_forward_and_backward_on_two_to_eight_nodes(ranks: int) -> None:
    """Backward sums in the nodes. Masks and rounds take turns."""
    for nodes in range(2, 9):
        mode, mask = NodeGather(ranks, [None, 1, 3, 5][nodes % 4]), SHOWN[(7 * ranks + nodes) % len(SHOWN)]
        plan = sum_in_nodes(build_plan(mode, nodes * ranks, mask), ranks)
        verify(plan)
        verify(backward_plan(plan), plan)


@pytest.mark.parametrize("rounds", [None, 1, 2, 6, 40])
def test_node_gather_sends_every_row_once_to_each_node(rounds: int | None) -> None:
    """It crosses to the rank with the same number. More rounds hold less at a time, a share of the remote keys."""
    m, nodes = 4, 4
    plan = build_plan(NodeGather(m, rounds), m * nodes, full(16 * m * nodes))
    crossing = [move for move in moves_of(plan) if move.source // m != move.destination // m]
    rows = Counter((m.block.home, row, m.destination) for m in crossing for row in range(m.block.start, m.block.stop))
    assert all(move.source == move.block.home and (move.source - move.destination) % m == 0 for move in crossing)
    assert set(rows.values()) == {1} and len(rows) == 16 * m * nodes * (nodes - 1)
    recorder = Recorder(plan, Target(Workload(2, 2, 2), PACKED))
    held = max(sum(each.tokens for each in recorder.record(rank).slots) for rank in range(m * nodes))
    count = rounds or nodes - 1
    part, own = -(-16 * (nodes - 1) // count), -(-16 // max(1, count // (nodes - 1)))
    assert held <= 3 * (m * part + (m - 1) * own) and (count < nodes - 1 or held < 16 * (m * nodes - 1))


def test_modes_in_words() -> None:
    assert str(MODES["zigzag"]()) == "zigzag" and str(DoubleRing(4)) == "double_ring (inner_size=4)"


def test_options_without_a_value_are_decided() -> None:
    cluster = load_cluster("dgx_h100_x4")
    assert [ModeOptions().resolve_inner_size(n) for n in (1, 2, 7, 8, 12, 32)] == [1, 1, 1, 4, 6, 8]
    assert ModeOptions(cluster=cluster).resolve_inner_size(32) == 8
    assert ModeOptions(inner_size=2, cluster=cluster).resolve_inner_size(32) == 2


@settings(max_examples=25, deadline=None)
@given(masks(24), st.integers(1, 8))
def test_only_needed_rows_travel(mask: Mask, n: int) -> None:
    for schedule in MODES:
        plan = build_plan(schedule, n, mask)
        assert trim(plan) == plan


def test_trim_keeps_rows_that_are_passed_on() -> None:
    # Rank 2 needs a part of the block of rank 0 and gets it by way of rank 1, which does not need it, nor does rank 3.
    block, part = (Block(Kind.KV, 0, 0, stop) for stop in (3, 2))
    call = Attend((Block(Kind.Q, 2, 0, 2),), (part,), full(2).slices)
    idle: tuple[tuple[Attend, ...], ...] = ((),) * 4
    steps = (
        Step((Move(block, 0, 1), Move(block, 0, 3)), idle),
        Step((Move(block, 1, 2),), idle),
        Step((Move(block, 2, 3),), ((), (), (call,), ())),
    )
    layout = contiguous(4, 12)
    trimmed = trim(Plan("by hand", full(12), layout, layout, steps))
    assert [step.moves for step in trimmed.steps] == [(Move(part, 0, 1),), (Move(part, 1, 2),), ()]
