"""Programs compute what plans say, use no memory too early, and take as little of it as is promised."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.schedules import (
    MODES,
    Kind,
    Lowering,
    Mask,
    ModeOptions,
    Plan,
    Takes,
    Target,
    Workload,
    backward_plan,
    build_plan,
    keep_received,
    lower,
    places,
)
from megatron_longctx.schedules.cache_modes import CACHE_MODES
from megatron_longctx.schedules.footprint import Footprint, footprint
from megatron_longctx.schedules.mask import causal, documents, full
from megatron_longctx.schedules.program import Acquire, Compute, Copy, Merge, Release, Send, Space, Wait
from megatron_longctx.schedules.send_layout import Batch, place
from megatron_longctx.schedules.totals import MOST_PARTIALS
from tests.schedules.follow import parts_of
from tests.schedules.interpret import interpret
from tests.schedules.masks import Cache, cache_of, caches, masks
from tests.shared.plans import helper_plan, one_sided_plan, tangled_plan

WORK = Workload(num_heads=4, num_kv_heads=4, head_dim=64, element_bytes=4)
PACKED = Takes(packed=True, rectangles=True, windows=True)
BANDS = Takes(windows=True, bands=True)


def hosts_of(n: int, way: str) -> tuple[tuple[int, ...], ...] | None:
    """Who reads whose memory: all, those of a node of two, or nobody."""
    if way == "messages":
        return None
    node = n if way == "peers" else 2
    return tuple(tuple(range(r // node * node, min(n, (r // node + 1) * node))) for r in range(n))


def run_both_ways(plan: Plan, target: Target, order: random.Random) -> None:
    kept = interpret(plan, target, order=order)
    interpret(backward_plan(plan), target, kept, order)


@st.composite
def targets(draw: st.DrawFn, n: int, parts: int) -> Target:
    heads = draw(st.sampled_from([parts, *(g for g in range(1, parts) if parts % g == 0)]))
    takes = draw(st.sampled_from([PACKED, PACKED._replace(longest_causal=3), BANDS]))
    ways = st.sampled_from(["peers", "nodes", "messages"])
    return Target(Workload(2 * parts, heads, 2), takes, hosts_of(n, draw(ways)), draw(st.booleans()))


@pytest.mark.parametrize("schedule", MODES)
@settings(max_examples=25, deadline=None)
@given(masks(30), st.sampled_from([1, 2, 3, 4, 6]), st.data())
def test_programs_compute_what_plans_say(schedule: str, mask: Mask, n: int, data: st.DataObject) -> None:
    said = ModeOptions(data.draw(st.sampled_from([None, 6])), head_chunks=data.draw(st.sampled_from([1, 2])))
    plan = build_plan(schedule, n, mask, said)
    plan = keep_received(plan) if data.draw(st.booleans()) else plan
    run_both_ways(plan, data.draw(targets(n, parts_of(plan))), data.draw(st.randoms(use_true_random=False)))


@pytest.mark.parametrize("mode", CACHE_MODES)
@settings(max_examples=20, deadline=None)
@given(caches(), st.data())
def test_programs_over_a_cache(mode: str, cache: Cache, data: st.DataObject) -> None:
    plan = CACHE_MODES[mode](*cache)
    interpret(plan, data.draw(targets(plan.n, 1)), order=data.draw(st.randoms(use_true_random=False)))


@pytest.mark.parametrize("way", ["peers", "nodes", "messages"])
def test_programs_of_plans_by_hand(way: str) -> None:
    for plan in (helper_plan(3, 11), tangled_plan(15), one_sided_plan(10)):
        for each in (plan, keep_received(plan)):
            run_both_ways(each, Target(Workload(2, 1, 2), PACKED, hosts_of(plan.n, way)), random.Random(0))


@pytest.mark.parametrize("schedule", MODES)
def test_few_partial_results_are_merged_at_once(schedule: str) -> None:
    """And of each place in a total none is merged twice: a call's or a message's rows are part of one merge."""
    plan = build_plan(schedule, 8, documents([300, 5, 400, 319], window=(200, None)), ModeOptions(40))
    for each in (plan, backward_plan(plan)):
        for program in map(Lowering(each, Target(Workload(8, 8, 2), PACKED)).program, range(8)):
            assert all(1 <= len(merge.parts) <= MOST_PARTIALS for merge in program.merges)
            parts = [part.rows for merge in program.merges for part in merge.parts]
            of_calls = [rows for rows in parts if rows.space is Space.CALL]
            assert len(of_calls) == len(set(of_calls))


def test_messages_are_started_before_what_is_computed_beside_them() -> None:
    def names(program_of: Plan, hosts: str) -> list[str]:
        program = lower(program_of, 1, Target(Workload(2, 2, 2), PACKED, hosts_of(2, hosts)))
        return [type(op).__name__ for op in program.ops]

    ring = build_plan("ring", 2, full(8))
    wanted = [Copy, Send, Compute, Wait, Compute, Merge]
    for hosts in ("messages", "peers"):
        assert [name for name in names(ring, hosts) if name != "Mark"] == [each.__name__ for each in wanted]
    # Where nothing is computed beside messages they are read where they lie: queries and keys, at the end the outputs.
    ulysses = build_plan("ulysses", 2, full(8))
    wanted = [Copy, Acquire, Copy, Release, Compute, Copy, Acquire, Copy, Release]
    assert [name for name in names(ulysses, "peers") if name != "Mark"] == [each.__name__ for each in wanted]
    assert "Acquire" not in names(ulysses, "messages")


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", ["ring", "zigzag", "striped", "double_ring"])
def test_a_ring_needs_two_buffers_of_keys_whatever_the_number_of_ranks(schedule: str, n: int) -> None:
    """One of them attended while the other is filled. In backward as many of gradients, of a rank's size too."""
    for mask in (full(8 * n), causal(8 * n)):
        plan = build_plan(schedule, n, mask, ModeOptions(inner_size=n))
        lowering = Lowering(plan, Target(Workload(2, 2, 2), PACKED))
        found = [each for rank in range(n) for each in lowering.program(rank).buffers]
        assert {each.kind for each in found} == {Kind.KV} and max(each.tokens for each in found) <= 8
        assert max(len(lowering.program(rank).buffers) for rank in range(n)) == min(2, n - 1)


WINDOW = 64
HOPS = {
    # Over n - 1 borders between neighbouring ranks, in one hop; over 2n - 2 where a rank holds two pieces. A ring needs
    # n - 1 hops to the rank before.
    "ring": lambda n: n - 1,
    "helper": lambda n: n - 1,
    "all_gather": lambda n: 2 * (n - 1),
    "zigzag": lambda n: n * (n - 1),
    "usp": lambda n: n // 2 * (n // 2 - 1),  # between groups of two, whose ranks have half the heads each
    "double_ring": {4: 8, 8: 26}.get,
    "tasp": {4: 18, 8: 52}.get,  # in one of n - 1 rings, whatever the way there: at most
}


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("schedule", HOPS)
def test_a_window_costs_the_bytes_of_a_window(schedule: str, n: int) -> None:
    """Whatever the length, keys of a window are sent, buffered and kept for readers."""
    work = Workload(8, 8, 16)
    token, most = work.token_bytes(Kind.KV), HOPS[schedule](n) * WINDOW
    for length in (4096, 16384):
        plan = build_plan(schedule, n, documents([length], window=(WINDOW, 0)), ModeOptions(inner_size=2))
        groups = length // 2 if schedule == "usp" else 0  # exchange half their tokens' heads
        for each in (plan, backward_plan(plan)):
            sent = sum(work.block_bytes(m.block) for step in each.steps for m in step.moves if m.block.kind is Kind.KV)
            assert sent <= (most + groups) * token and (sent == (most + groups) * token or schedule == "tasp")
        lowering = Lowering(plan, Target(work, PACKED, hosts_of(n, "peers")))
        if not groups:
            assert max(sum(each.tokens for each in lowering.program(r).buffers) for r in range(n)) <= 4 * WINDOW
            assert lowering.send_bytes() <= 5.5 * WINDOW * token


def test_documents_that_lie_on_one_rank_take_one_kernel_call() -> None:
    plan = build_plan("zigzag", 4, documents([4] * 32))
    for rank in range(4):
        (call,) = lower(plan, rank, Target(Workload(1, 1, 2), PACKED)).ops
        assert isinstance(call, Compute) and len(call.call.segments) == 8 and call.homes == (rank,)


def test_one_rank_alone_computes_in_place() -> None:
    program = lower(build_plan("zigzag", 1, 64), 0, Target(Workload(4, 2, 8), PACKED))
    (call,) = program.ops
    assert isinstance(call, Compute) and call.queries.space is call.keys.space is Space.OWN
    assert program.own[Kind.OUT].space is Space.CALL and not program.buffers and program.sends.num_bytes == 0


def test_long_stretches_of_keys_are_not_copied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short neighbours are; and all where results may not depend on where keys lie."""
    long = 64
    monkeypatch.setattr(places, "LONG_RUN", long)

    def work(*runs: int, joined: bool = False) -> tuple[int, int]:
        """(rows copied, kernel calls) of a query over stretches of keys that lie apart in a cache."""
        plan = CACHE_MODES["pass_kv"](*cache_of({"lengths": [sum(runs)]}, [1], runs, 1, free=5))
        program = lower(plan, 0, Target(Workload(1, 1, 2), PACKED, joined=joined))
        copies = [into for op in program.ops if isinstance(op, Copy) for into, _ in op.pairs]
        return sum(into.tokens for into in copies), len(program.calls)

    assert work(long, long) == (0, 2) and work(long, long, joined=True) == (2 * long, 1)
    assert work(9, 9, 9) == (27, 1) and work(long) == (0, 1)
    assert work(long, 9, 9, long) == (18, 3) and work(long, 9, long) == (0, 3)


def test_footprint_of_a_ring_by_hand() -> None:
    """2 ranks with 1,024 tokens of 4 heads of 64 in fp32 each: 1 MiB is one of q, k, v and out."""
    mib, lse = 2**20, 1024 * 4 * 4
    plan = build_plan("ring", 2, full(2048))
    found = [footprint(lower(plan, rank, Target(WORK, PACKED)), WORK) for rank in range(2)]
    # q, k, v; the other's k, v; its own to be sent; two outs and what they become.
    assert found[0] == found[1] == Footprint(3 * mib, 2 * mib, 0, 2 * mib, 3 * (mib + lse))
    assert found[0].total == 10 * mib + 3 * lse
    peers = footprint(lower(plan, 0, Target(WORK, PACKED, hosts_of(2, "peers"))), WORK)
    assert peers.sent == 4 * mib, "for two passes in turn"
    backward = footprint(lower(backward_plan(plan), 0, Target(WORK, PACKED)), WORK)
    # q, k, v, out and its gradient with lse; k, v and a gradient of these; k, v and the gradient sent.
    assert (backward.inputs, backward.buffers, backward.sent) == (5 * mib + lse, 4 * mib, 4 * mib)


def test_a_causal_ring_leaves_the_first_rank_with_its_own() -> None:
    plan = build_plan("ring", 2, 2048)
    first, second = (footprint(lower(plan, rank, Target(WORK, PACKED)), WORK) for rank in range(2))
    assert (first.buffers, second.buffers) == (0, 2**21) and (first.sent, second.sent) == (2**21, 0)
    assert first.results == 2**20 + 1024 * 16


def test_kernels_workspaces_are_counted_where_asked_for() -> None:
    """Backward: dq in fp32 and a sum for every query; with grouped heads a dk and dv of every query head."""
    grouped, plan = Workload(4, 2, 64), backward_plan(build_plan("zigzag", 1, full(1024)))
    program = lower(plan, 0, Target(grouped, PACKED))
    plain, more = (footprint(program, grouped, workspace).results for workspace in (False, True))
    assert more - plain == 1024 * (4 * 64 * 4 + 4 * 4) + 1024 * 2 * 4 * 64 * 2
    forward = lower(build_plan("zigzag", 1, full(1024)), 0, Target(grouped, PACKED))
    assert footprint(forward, grouped) == footprint(forward, grouped, workspace=True)


def test_memory_of_a_ring_does_not_depend_on_more_ranks() -> None:
    def total(n: int) -> int:
        lowering = Lowering(build_plan("zigzag", n, full(1024 * n)), Target(WORK, PACKED))
        return max(footprint(lowering.program(rank), WORK).total for rank in range(n))

    assert total(8) == total(16) > total(4), "of up to four ranks no results are merged before the end"


batches = st.lists(
    st.builds(
        lambda step, early, size, passed: Batch(step, step if passed else max(0, step - early), 256 * size, passed),
        st.integers(0, 9), st.integers(0, 3), st.integers(1, 4), st.booleans(),
    ),
    max_size=9,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(batches)
def test_what_is_sent_lies_apart_for_as_long_as_it_is_needed(some: list[Batch]) -> None:
    found = place(some)
    ends = [at + batch.num_bytes for at, batch in zip(found.offsets, some, strict=True)]
    assert found.num_bytes == max(ends, default=0) <= sum(batch.num_bytes for batch in some)
    for i, one in enumerate(some):
        for j, two in enumerate(some[:i]):
            if found.offsets[i] < ends[j] and found.offsets[j] < ends[i]:
                first, second = sorted((one, two), key=lambda batch: (batch.written, batch.step))
                # Readers are done two steps before, and their word is awaited in time.
                assert first.step + 2 <= second.freed
                assert found.awaited[first.step] <= second.freed


def test_names_of_buffers_are_shared_by_sequences_of_other_lengths() -> None:
    """The largest of each kind comes first, so that a shorter sequence fits into a longer one's memory."""
    program = lower(build_plan("tasp", 4, 999), 1, Target(WORK, PACKED))
    sizes: dict[tuple[Kind, int], list[tuple[int, int]]] = {}
    for each, name in zip(program.buffers, program.buffer_names, strict=True):
        sizes.setdefault((each.kind, each.parts), []).append((name, -each.tokens))
    for found in sizes.values():
        assert [name for name, _ in sorted(found)] == list(range(len(found)))
        assert [tokens for _, tokens in sorted(found)] == sorted(tokens for _, tokens in found)


@pytest.mark.parametrize("n", [8, 24])
def test_keys_that_are_copied_together_take_no_more_memory_with_more_ranks(n: int) -> None:
    """Halves of a block come in different steps, and every other call has them copied together."""
    plan = build_plan("double_ring", n, full(16 * n), ModeOptions(inner_size=2))
    for each in (plan, backward_plan(plan)):
        for rank in (0, 1, n - 1):
            buffers = lower(each, rank, Target(Workload(2, 2, 8))).buffers
            assert sum(buffer.tokens for buffer in buffers if buffer.kind is Kind.KV) <= 3 * 24 + 16


def test_long_causal_segments_are_cut_in_backward_alone() -> None:
    target, plan = Target(Workload(2, 2, 2), PACKED._replace(longest_causal=256)), build_plan("ring", 1, 1024)
    forward, backward = (lower(each, 0, target) for each in (plan, backward_plan(plan)))
    (whole,) = forward.calls
    assert whole.call.causal and len(backward.calls) == 3
    assert sum(op.call.pairs for op in backward.calls) == whole.call.pairs
