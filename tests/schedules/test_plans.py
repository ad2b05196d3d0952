"""Plans compute attention: proved by `verify`, and apart from it by following tokens step by step."""

from collections import Counter, defaultdict
from math import ceil

import pytest

from megatron_longctx import config
from megatron_longctx.layout import Layout, build_layout, contiguous, striped, zigzag
from megatron_longctx.schedules import (
    RESULTS,
    SCHEDULES,
    Kind,
    Plan,
    PlanError,
    PlanOptions,
    buffer_need,
    build_plan,
    moved_tokens,
    seal,
    stays,
    transpose,
    verify,
)
from megatron_longctx.schedules.all_gather import all_gather
from megatron_longctx.schedules.ring import ring
from megatron_longctx.testing.plans import helper_plan, tangled_plan

# Modes that share heads among ranks have tests of their own: not every number of ranks fits them.
WHOLE_HEADS = tuple(name for name, mode in SCHEDULES.items() if not mode.splits_heads)


def dense_mask(plan: Plan) -> dict[int, Counter]:
    """Per query token, how often it has to see each key token."""
    length = plan.layout.length
    return {q: Counter(range(q + 1 if plan.causal else length)) for q in range(length)}


def simulate(plan: Plan) -> None:
    """Follow every token through the plan, with arithmetic of its own, and compare what comes home with the mask.

    A rank's memory is a bag of input tokens and, for results, queues of contributions: which pairs went into them.
    """
    layout, n = plan.layout, plan.n
    inputs = [{(kind, r, slot) for kind in (Kind.Q, Kind.Q_GRAD, Kind.KV) for slot in range(layout.num_tokens(r))}
              for r in range(n)]  # fmt: skip
    results = [defaultdict(list) for _ in range(n)]
    home: dict[Kind, dict[int, Counter]] = {kind: defaultdict(Counter) for kind in RESULTS}

    def token(home_rank, slot):
        return list(layout.tokens(home_rank))[slot]

    def deliver(block, contribution):
        for one, others in contribution.items():
            home[block.kind][one].update(others)

    for step in plan.steps:
        arriving_inputs, arriving_results = [], []
        for block, source, destination, _ in step.moves:
            assert source != destination
            if block.kind in RESULTS:
                carried = defaultdict(Counter)  # all parts of it that lie here
                parts = [part for part in results[source] if block.contains(part)]
                assert parts, f"{block} was not computed by {source}, or not since it was last sent"
                for part in parts:
                    for contribution in results[source].pop(part):
                        for one, others in contribution.items():
                            carried[one].update(others)
                contribution = carried
                arriving_results.append((destination, block, contribution))
                continue
            sent = {(block.kind, block.home, slot) for slot in range(block.start, block.stop)}
            assert sent <= inputs[source], f"{block} is not on {source}"
            arriving_inputs.append((destination, sent))
        computed = []
        for rank, attends in enumerate(step.attends):
            for attend in attends:
                needed = Kind.Q_GRAD if plan.backward else Kind.Q
                q_slots = range(attend.queries[0].start, attend.queries[0].stop)
                k_slots = [(key.home, slot, key) for key in attend.keys for slot in range(key.start, key.stop)]
                assert {(needed, attend.queries[0].home, slot) for slot in q_slots} <= inputs[rank]
                assert {(Kind.KV, key_home, slot) for key_home, slot, _ in k_slots} <= inputs[rank]
                dq = defaultdict(Counter)
                dkv = {key: defaultdict(Counter) for key in attend.keys}
                for i, q_slot in enumerate(q_slots):
                    for j, (key_home, k_slot, key) in enumerate(k_slots):
                        if not attend.causal or j <= i:
                            q_token, k_token = token(attend.queries[0].home, q_slot), token(key_home, k_slot)
                            dq[q_token][k_token] += 1
                            dkv[key][k_token][q_token] += 1
                kinds = (Kind.DQ,) if plan.backward else (Kind.OUT,)
                parts = [(attend.queries[0]._replace(kind=kind), dq) for kind in kinds]
                parts += [(key._replace(kind=Kind.DKV), dkv[key]) for key in attend.keys] if plan.backward else []
                for block, contribution in parts:
                    if block.home == rank:
                        deliver(block, contribution)
                    else:
                        computed.append((rank, block._replace(origin=rank), contribution))
        for destination, sent in arriving_inputs:
            assert not sent & inputs[destination], "arrives twice"
            inputs[destination] |= sent
        for destination, block, contribution in arriving_results:
            if block.home == destination:
                deliver(block, contribution)
            else:
                results[destination][block].append(contribution)
        for rank, block, contribution in computed:
            results[rank][block].append(contribution)

    expected = dense_mask(plan)
    queries = home[Kind.DQ if plan.backward else Kind.OUT]
    assert {q: queries[q] for q in expected} == expected
    if plan.backward:
        seen_by = {k: Counter(q for q in expected if k in expected[q]) for k in expected}
        assert {k: home[Kind.DKV][k] for k in expected} == seen_by


def tokens_held(plan: Plan) -> dict[Kind, int]:
    """Most tokens of other ranks that one rank needs at the same time, counted block by block: a lower bound."""
    most: dict[Kind, int] = {}
    for rank in range(plan.n):
        held: Counter = Counter()
        for t, step in enumerate(plan.steps):
            for move in step.moves:
                if move.destination != rank:
                    continue
                uses = [t + 1] if move.block.kind in RESULTS else [t]
                for u, later in enumerate(plan.steps):
                    blocks = [m.block for m in later.moves if m.source == rank]
                    for attend in later.attends[rank]:
                        blocks += [
                            attend.queries[0]._replace(kind=Kind.Q_GRAD if plan.backward else Kind.Q),
                            *attend.keys,
                        ]
                    uses += [u] if any(move.block.contains(block) for block in blocks) else []
                for u in range(t, max(uses) + 1):
                    held[move.block.kind, u] += move.block.tokens
        for (kind, _), tokens in held.items():
            most[kind] = max(most.get(kind, 0), tokens)
    return most


def check(plan: Plan, brute_force: bool = True) -> None:
    backward = seal(transpose(plan))
    for each in (plan, backward):
        verify(each)
        if brute_force:
            simulate(each)
            for kind, tokens in tokens_held(each).items():
                assert tokens <= each.buffer_tokens(kind)


def bounds(schedule: str, n: int, length: int, causal: bool) -> list[int | None]:
    if schedule != "all_gather":
        return [None]
    need = build_plan(schedule, n, length, causal).buffer_tokens(Kind.KV)
    return [None] if need < 2 else [None, *sorted({2, max(2, need // 3), max(2, need - 1), need})]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("schedule", WHOLE_HEADS)
def test_every_mode_computes_attention(schedule, n, causal):
    for length in sorted({0, 1, n - 1, n, n + 1, 2 * n, 2 * n + 1, 3 * n - 1}):
        for bound in bounds(schedule, n, length, causal):
            check(build_plan(schedule, n, length, causal, PlanOptions(bound)), brute_force=length <= 2 * n + 1)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("schedule", WHOLE_HEADS)
def test_every_mode_at_sixteen_ranks(schedule, causal):
    for length in (5, 16, 64, 129, 1000):
        for bound in bounds(schedule, 16, length, causal)[:3]:
            check(build_plan(schedule, 16, length, causal, PlanOptions(bound)), brute_force=False)


# Not tasp: 63 rings of 64 ranks are half a million messages.
@pytest.mark.parametrize("schedule", [name for name in WHOLE_HEADS if name != "tasp"])
def test_every_mode_at_sixty_four_ranks_and_a_million_tokens(schedule):
    for length, causal in ((1_000_003, True), (77, True), (4096, False)):
        plan = build_plan(schedule, 64, length, causal)
        check(plan, brute_force=False)
        assert sum(map(plan.pairs, range(64))) == (length * (length + 1) // 2 if causal else length**2)


@pytest.mark.parametrize("layout", [contiguous, zigzag, striped])
@pytest.mark.parametrize("mode", [ring, all_gather])
def test_modes_on_any_layout(mode, layout):
    for n in (1, 2, 3, 4):
        for length in (0, 1, 3, 7, 8, 12, 13):
            for causal in (True, False):
                check(seal(mode(layout(n, length), causal)))


@pytest.mark.parametrize("mode", [ring, all_gather])
def test_modes_on_pieces_dealt_in_turn(mode):
    """Several spans a rank, each seen from another query on: they may not be joined into one call."""
    for n, pieces, size in ((2, 2, 2), (2, 3, 1), (3, 3, 2)):
        spans = tuple(tuple(range(i * size, (i + 1) * size) for i in range(r, n * pieces, n)) for r in range(n))
        for causal in (True, False):
            check(seal(mode(Layout("dealt", n * pieces * size, spans), causal)))


@pytest.mark.parametrize("bound", [4, 5, 6, 8, 11, 100])
def test_all_gather_of_stripes_respects_its_bound(bound):
    for n, length in ((2, 4), (3, 6), (4, 8), (4, 7)):
        plan = seal(all_gather(striped(n, length), True, bound))
        check(plan)
        assert plan.buffer_tokens(Kind.KV) <= bound


def test_units_reach_the_layout():
    plan = build_plan("zigzag", 2, 12, True, PlanOptions(unit=4))
    assert plan.layout == zigzag(2, 12, 4) != zigzag(2, 12)
    check(plan)


@pytest.mark.parametrize("plan", [helper_plan(2, 4), helper_plan(2, 9), helper_plan(3, 6), helper_plan(3, 11)])
def test_helped_queries_and_their_results_travel(plan):
    check(plan)
    backward = seal(transpose(plan))
    kinds = {move.block.kind for step in plan.steps for move in step.moves}
    assert kinds == {Kind.KV, Kind.Q, Kind.OUT}
    kinds = {move.block.kind for step in backward.steps for move in step.moves}
    assert kinds == {Kind.KV, Kind.Q_GRAD, Kind.DKV, Kind.DQ}


def test_the_balanced_helper_plan_is_never_idle():
    assert helper_plan(3, 12).idle_fraction() == 0


@pytest.mark.parametrize("length", [12, 15])
def test_legal_and_awkward_plans_compute_attention(length):
    check(tangled_plan(length))


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("c", [1, 2, 7])
def test_idle_fraction_of_the_ring(n, c):
    """With c tokens a rank: step 0 lasts c(c+1)/2 pairs (the diagonal), each later step c*c.

    Of n * (c(c+1)/2 + (n-1)c*c) pairs of rank-time, nc(nc+1)/2 are work. The well known (n*n-n)/(2n*n) counts the
    diagonal as a whole block; both tend to one half.
    """
    plan = build_plan("ring", n, n * c)
    assert plan.idle_fraction() == pytest.approx((n - 1) * c / ((2 * n - 1) * c + 1), abs=1e-12)


@pytest.mark.parametrize("n", range(1, 10))
def test_zigzag_is_never_idle_when_pieces_are_equal(n):
    for length in (2 * n, 6 * n):
        assert build_plan("zigzag", n, length).idle_fraction() == 0
    assert build_plan("zigzag", n, 8 * n, False).idle_fraction() == 0
    assert build_plan("ring", n, 8 * n, False).idle_fraction() == 0


def test_idle_fraction_of_uneven_pieces():
    # zigzag(2, 5) holds [0, 3, 4] and [1, 2]. Step 0: 6 and 3 pairs. Step 1: rank 0 attends its last two queries to
    # both keys of rank 1 (4), rank 1 its two queries to token 0 (2).
    plan = build_plan("zigzag", 2, 5)
    assert [plan.pairs(0), plan.pairs(1)] == [10, 5]
    assert plan.idle_fraction() == pytest.approx(1 - 15 / 20)
    assert build_plan("ring", 4, 0).idle_fraction() == 0


@pytest.mark.parametrize("n", range(1, 10))
def test_tokens_moved(n):
    c = 4

    def total(plan, kind=Kind.KV):
        moved = [moved_tokens(plan, rank).get(kind, (0, 0)) for rank in range(n)]
        assert sum(sent for sent, _ in moved) == sum(received for _, received in moved)
        return sum(sent for sent, _ in moved)

    # A block of the causal ring stops at the last rank; a block of zigzag visits everybody.
    assert total(build_plan("ring", n, n * c)) == c * n * (n - 1) // 2
    assert total(build_plan("ring", n, n * c, False)) == c * n * (n - 1)
    assert total(build_plan("zigzag", n, n * c)) == c * n * (n - 1)
    # Only what is seen: of an earlier rank the first half, of a later one all.
    assert total(build_plan("all_gather", n, n * c)) == 3 * c // 2 * (n * (n - 1) // 2)
    # Every fetched span gives one gradient, which goes home in one hop.
    for schedule in WHOLE_HEADS:
        backward = transpose(build_plan(schedule, n, n * c))
        computed = sum(
            key.tokens
            for step in backward.steps
            for rank, attends in enumerate(step.attends)
            for attend in attends
            for key in attend.keys
            if key.home != rank
        )
        assert total(backward, Kind.DKV) == computed
        assert total(backward) == total(build_plan(schedule, n, n * c))


def test_tokens_moved_by_each_rank():
    plan = build_plan("ring", 3, 12)
    assert [moved_tokens(plan, rank) for rank in range(3)] == [
        {Kind.KV: (4, 0)},
        {Kind.KV: (8, 4)},
        {Kind.KV: (0, 8)},
    ]


@pytest.mark.parametrize("n", range(1, 10))
def test_all_gather_takes_two_calls_for_all_remote_keys(n):
    plan = build_plan("all_gather", n, 4 * n)
    assert len(plan.steps) == (2 if n > 1 else 1)
    for rank in range(n):
        remote = [attend for step in plan.steps[1:] for attend in step.attends[rank]]
        # The first and the last rank have only later or only earlier ranks: one call.
        assert len(remote) == (0 if n == 1 else 1 if rank in (0, n - 1) else 2)


@pytest.mark.parametrize("bound", [2, 3, 7, 10, 16, 24, 47, 48, 1000])
def test_all_gather_respects_its_bound(bound):
    for causal in (True, False):
        plan = build_plan("all_gather", 4, 64, causal, PlanOptions(bound))
        check(plan)
        assert plan.buffer_tokens(Kind.KV) <= bound
        free = build_plan("all_gather", 4, 64, causal)
        if bound >= free.buffer_tokens(Kind.KV):
            assert plan == free
        else:  # as few groups as half the bound allows
            most = max(moved_tokens(plan, rank)[Kind.KV][1] for rank in range(4))
            assert len(plan.steps) == 1 + ceil(most / (bound // 2))


@pytest.mark.parametrize(
    ("schedule", "n", "forward", "backward"),
    [
        ("ring", 1, {}, {}),
        ("ring", 2, {Kind.KV: 8}, {Kind.KV: 8, Kind.DKV: 8}),
        ("ring", 4, {Kind.KV: 16}, {Kind.KV: 16, Kind.DKV: 16}),
        ("zigzag", 4, {Kind.KV: 16}, {Kind.KV: 16, Kind.DKV: 16}),
        ("all_gather", 4, {Kind.KV: 24}, {Kind.KV: 24, Kind.DKV: 24}),
    ],
)
def test_buffers_stated(schedule, n, forward, backward):
    plan = build_plan(schedule, n, 8 * n)
    assert dict(plan.buffers) == forward == buffer_need(plan)
    assert dict(seal(transpose(plan)).buffers) == backward
    assert plan.buffer_tokens(Kind.Q) == 0


def test_a_result_passed_on_stays_until_it_has_been():
    plan = tangled_plan(12)
    (relayed,) = stays(plan)[0]
    assert (relayed.kind, relayed.first, relayed.last) == (Kind.OUT, 2, 4)
    (delivered,) = [stay for stay in stays(plan)[2] if stay.kind is Kind.OUT]
    assert (delivered.first, delivered.last) == (4, 5)


def test_backward_of_a_backward_plan_is_refused():
    backward = transpose(build_plan("zigzag", 2, 8))
    assert backward.backward
    with pytest.raises(ValueError, match="zigzag is a backward plan: expected a forward plan"):
        transpose(backward)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spiral", 2, 8), "schedule 'spiral': expected one of ring, zigzag, striped, helper"),
        (("ring", 0, 8), "n=0"),
        (("zigzag", 2, -8), "length=-8"),
        (("zigzag", 2, 9, True, PlanOptions(unit=2)), "length=9: expected a multiple of unit=2"),
        (("all_gather", 4, 64, True, PlanOptions(1)), "max_buffer_tokens=1: expected at least 2 .* would take 48"),
        (("all_gather", 4, 64, True, PlanOptions(0)), "max_buffer_tokens=0"),
        (("all_gather", 4, 64, True, PlanOptions(-5)), "max_buffer_tokens=-5"),
    ],
)
def test_wrong_arguments_are_refused_with_their_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_plan(*arguments)


def test_a_causal_stripe_that_does_not_fit_its_bound_is_refused():
    with pytest.raises(ValueError, match=r"leaves 3 tokens a group: expected 4 at least.*Raise max_buffer_tokens to 8"):
        all_gather(striped(4, 16), True, 6)


def test_layouts_that_interleave_otherwise_are_refused():
    mixed = Layout("mixed", 8, (striped(2, 8).spans[0], (range(1, 4, 2), range(5, 8, 2))))
    with pytest.raises(ValueError, match="layout mixed: expected spans of consecutive tokens or one stripe per rank"):
        ring(mixed, True)


def test_the_configuration_knows_the_same_modes():
    assert set(config.SCHEDULES) == set(SCHEDULES)
    for mode in SCHEDULES.values():
        assert build_layout(mode.layout, 2, 8).name == mode.layout
        assert mode.about


def test_plans_are_built_once():
    assert build_plan("zigzag", 4, 64) is build_plan("zigzag", 4, 64)
    assert build_plan("zigzag", 4, 64, False) is not build_plan("zigzag", 4, 64)


def test_a_plan_error_is_a_value_error():
    assert issubclass(PlanError, ValueError)
