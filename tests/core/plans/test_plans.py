"""Plans compute attention: `verify` proves it. tests/core/attention runs them on tensors."""

import sys
import time
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.core.layout import Layout, contiguous, striped, zigzag
from megatron_longctx.core.plans import (
    MODES,
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
    record,
    transpose,
)
from megatron_longctx.core.plans.mask import causal, documents, full
from megatron_longctx.core.plans.modes import outer_modes
from megatron_longctx.core.plans.modes.all_gather import AllGather
from megatron_longctx.core.plans.modes.ring import ring
from megatron_longctx.core.plans.visibility import Visibility
from megatron_longctx.planner.describe import idle_fraction, moved_tokens, rank_pairs
from megatron_longctx.testing.verify import verify
from tests.core.plans.masks import masks
from tests.shared.plans import helper_plan, one_sided_plan, tangled_plan

MASKS = [causal, full]


def check(plan: Plan) -> None:
    """Check forward and backward, with all received blocks kept and with none."""
    for forward in (plan, keep_received(plan)):
        verify(forward)
        for backward in (transpose(forward), backward_plan(forward)):
            verify(backward, forward)


@st.composite
def options(draw: st.DrawFn, n: int) -> ModeOptions:
    return ModeOptions(
        draw(st.sampled_from([None, 2, 3, 8, 20])),
        draw(st.sampled_from([None, *(k for k in range(1, n + 1) if n % k == 0)])),
        draw(st.sampled_from(outer_modes())),
    )


@pytest.mark.parametrize("schedule", MODES)
@settings(max_examples=25, deadline=None)
@given(masks(), st.integers(1, 8), st.data())
def test_every_mode_computes_attention_of_every_mask(schedule: str, mask: Mask, n: int, data: st.DataObject) -> None:
    check(build_plan(schedule, n, mask, data.draw(options(n))))


@pytest.mark.parametrize("mask", MASKS, ids=["causal", "full"])
@pytest.mark.parametrize("schedule", MODES)
def test_every_mode_at_few_tokens_and_at_nine_ranks(schedule, mask):
    for n, length in ((1, 0), (3, 0), (9, 1), (9, 8), (9, 19)):
        check(build_plan(schedule, n, mask(length)))


@pytest.mark.parametrize("schedule", MODES)
def test_every_mode_at_sixteen_ranks(schedule):
    for mask in (causal(5), causal(500), full(129), documents([1, 200, 7, 7, 85], window=(40, None))):
        plan = build_plan(schedule, 16, mask, ModeOptions(60))
        verify(plan)
        verify(backward_plan(plan))


# Not tasp, whose 63 rings of 64 ranks are half a million messages, nor modes whose calls have all ranks' tokens.
@pytest.mark.parametrize("schedule", [name for name in MODES if name not in ("tasp", "ulysses", "usp")])
def test_every_mode_at_sixty_four_ranks_and_a_million_tokens(schedule):
    plan = build_plan(schedule, 64, 1_000_003)
    verify(plan)
    assert sum(rank_pairs(plan)) == 1_000_003 * 1_000_004 // 2


@settings(max_examples=25, deadline=None)
@given(masks(20), st.integers(1, 4), st.data())
def test_modes_on_any_layout(mask: Mask, n: int, data: st.DataObject) -> None:
    """Including pieces that are dealt in turn: several spans per rank, each visible from another query on."""
    size = data.draw(st.integers(1, 4))
    pieces = [range(at, min(at + size, mask.length)) for at in range(0, mask.length, size)]
    dealt = Layout("dealt", mask.length, tuple(tuple(pieces[rank::n]) for rank in range(n)))
    layout = data.draw(st.sampled_from([dealt, *(each(n, mask.length) for each in (contiguous, zigzag, striped))]))
    visible = Visibility(mask, layout, layout)
    check(ring(visible, "ring"))
    check(AllGather(data.draw(st.sampled_from([None, 2, 5]))).plan(visible))


@pytest.mark.parametrize("schedule", MODES)
def test_trees_of_64_responses_are_proven_in_less_than_a_second(schedule: str) -> None:
    plan = build_plan(schedule, 8, documents((640, *[31] * 64), parents=(-1, *[0] * 64)))
    begun = time.thread_time()  # of this thread alone: other processes do not count
    verify(plan)
    assert time.thread_time() - begun < 1


def test_units_reach_the_layout():
    plan = build_plan("zigzag", 2, 12, unit=4)
    assert plan.queries == plan.keys == zigzag(2, 12, 4) != zigzag(2, 12)
    check(plan)


@pytest.mark.parametrize(
    "plan",
    [helper_plan(2, 4), helper_plan(2, 9), helper_plan(3, 11), tangled_plan(12), tangled_plan(15), one_sided_plan(10)],
    ids=lambda plan: f"{plan.name}-{plan.n}-{plan.mask.length}",
)
def test_plans_by_hand(plan):
    check(plan)
    kinds = {move.block.kind for step in transpose(plan).steps for move in step.moves}
    assert kinds == {Kind.KV, Kind.Q_GRAD, Kind.DKV, Kind.DQ}, "queries and partial results travel"


@pytest.mark.parametrize("n", range(1, 10))
def test_zigzag_is_never_idle_when_pieces_are_equal(n):
    for length in (2 * n, 6 * n):
        assert idle_fraction(build_plan("zigzag", n, length)) == 0
    assert idle_fraction(build_plan("zigzag", n, full(8 * n))) == 0
    assert idle_fraction(build_plan("ring", n, full(8 * n))) == 0


def test_idle_fraction_of_uneven_pieces():
    # zigzag(2, 5) holds [0, 3, 4] and [1, 2]. Step 0: 6 and 3 pairs. Step 1: rank 0 attends its last two queries to
    # both keys of rank 1 (4), rank 1 its two queries to token 0 (2).
    plan = build_plan("zigzag", 2, 5)
    assert rank_pairs(plan) == [10, 5]
    assert idle_fraction(plan) == pytest.approx(1 - 15 / 20)
    assert idle_fraction(build_plan("ring", 4, 0)) == 0
    assert idle_fraction(helper_plan(3, 12)) == 0


def total_moved(plan: Plan, kind: Kind = Kind.KV) -> float:
    moved = [each.get(kind, (0, 0)) for each in moved_tokens(plan)]
    assert sum(sent for sent, _ in moved) == sum(received for _, received in moved)
    return sum(sent for sent, _ in moved)


@pytest.mark.parametrize("n", range(1, 10))
def test_tokens_moved(n):
    c = 4
    # A block of the causal ring stops at the last rank. A block of zigzag visits all, half of it the first rank.
    assert total_moved(build_plan("ring", n, n * c)) == c * n * (n - 1) // 2
    assert total_moved(build_plan("ring", n, full(n * c))) == c * n * (n - 1)
    assert total_moved(build_plan("zigzag", n, n * c)) == c * (n - 1) ** 2 + c // 2 * (n - 1)
    # Only visible keys: the first half of an earlier rank's, all of a later rank's.
    assert total_moved(build_plan("all_gather", n, n * c)) == 3 * c // 2 * (n * (n - 1) // 2)
    # Every fetched span has one gradient, which goes home in one hop.
    for schedule in (name for name, mode in MODES.items() if not mode.splits_heads):
        plan = build_plan(schedule, n, n * c)
        backward = transpose(plan)
        used = sum(key.tokens for _, rank, attend in plan.calls() for key in attend.keys if key.home != rank)
        assert total_moved(backward, Kind.DKV) == used
        assert total_moved(backward) == total_moved(plan)


def test_tokens_moved_by_each_rank():
    plan = build_plan("ring", 3, 12)
    found = [moved_tokens(plan)[rank] for rank in range(3)]
    assert found == [{Kind.KV: (4, 0)}, {Kind.KV: (8, 4)}, {Kind.KV: (0, 8)}]


@pytest.mark.parametrize("bound", [2, 3, 7, 10, 16, 24, 47, 48, 1000])
def test_all_gather_respects_its_bound(bound):
    for mask in (causal(64), full(64), documents([30, 34], window=(9, 0))):
        plan = build_plan("all_gather", 4, mask, ModeOptions(bound))
        arriving = [
            sum(move.block.tokens for move in step.moves if move.destination == rank)
            for rank in range(4)
            for step in plan.steps
        ]
        most = max(moved_tokens(plan)[rank].get(Kind.KV, (0, 0))[1] for rank in range(4))
        if bound >= most:
            assert plan == build_plan("all_gather", 4, mask) and len(plan.steps) == 2
        else:  # as few groups as half the bound allows
            assert max(arriving) <= bound // 2 and len(plan.steps) == 1 + ceil(most / (bound // 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spiral", 2, 8), r"schedule=spiral: expected one of all_gather, double_ring, helper, node_gather"),
        (("ring", 0, 8), "n=0"),
        (("zigzag", 2, 9, None, 2), "length=9: expected a multiple of unit=2"),
        (("all_gather", 4, 64, ModeOptions(1)), r"max_buffer_tokens=1: expected at least 2.*would take 48"),
        (("all_gather", 4, 64, ModeOptions(0)), "max_buffer_tokens=0"),
        (("all_gather", 4, 64, ModeOptions(-5)), "max_buffer_tokens=-5"),
        (("usp", 4, 64, ModeOptions(outer_schedule="striped")), "outer_schedule=striped: expected one of all_gather"),
        (("usp", 8, 64, ModeOptions(inner_size=3)), r"inner_size=3: expected a divisor of the 8 ranks.*1, 2, 4, 8"),
    ],
)
def test_wrong_arguments_are_refused_with_their_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_plan(*arguments)


def test_plans_are_built_once():
    assert build_plan("zigzag", 4, 64) is build_plan("zigzag", 4, causal(64))
    assert build_plan("zigzag", 4, 64) is not build_plan("zigzag", 4, full(64))
    assert replace(build_plan("ring", 2, 8), name="other").sends(0) == build_plan("ring", 2, 8).sends(0)


def test_caches_stay_within_their_bounds() -> None:
    """With hundreds of packs, as in a training run."""
    target = Target(Workload(2, 2, 8), KernelSupport(packed=True, rectangles=True, windows=True))
    for number in range(300):
        record(build_plan("zigzag", 2, documents([1 + number, 301 - number])), 0, target)
    modules = [of for name, of in sys.modules.items() if name.startswith("megatron_longctx.core.plans")]
    caches = {x for of in modules for x in vars(of).values() if hasattr(x, "cache_info")}
    assert {"_build_cached", "visibility", "_calls"} <= {cache.__name__ for cache in caches}
    for cache in caches:
        found = cache.cache_info()
        assert found.maxsize is not None and found.currsize <= found.maxsize
        assert cache.__name__ not in ("_build_cached", "visibility") or found.currsize == found.maxsize == 64
