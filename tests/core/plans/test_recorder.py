"""What recordings do and in which order, and that they need no more memory than promised.

tests/core/attention runs them: test_masks on tensors, test_peer_protocol with messages as early and late as can be.
"""

from unittest import mock

import pytest

from megatron_longctx.core.plans import (
    ALL_HEADS,
    MODES,
    KernelSupport,
    Kind,
    ModeOptions,
    Plan,
    Recorder,
    Target,
    Workload,
    backward_plan,
    build_plan,
    record,
    recorder,
)
from megatron_longctx.core.plans.cache_modes import CACHE_MODES
from megatron_longctx.core.plans.key_copies import key_copies
from megatron_longctx.core.plans.mask import causal, documents, full
from megatron_longctx.core.plans.recording import (
    MAX_PARTIALS,
    Acquire,
    Compute,
    Copy,
    Merge,
    Place,
    Recording,
    Release,
    Send,
    Wait,
)
from megatron_longctx.planner.footprint import Footprint, footprint
from tests.core.plans.masks import cache_of

WORK = Workload(num_heads=4, num_kv_heads=4, head_dim=64, element_bytes=4)
PACKED = KernelSupport(packed=True, rectangles=True, windows=True)


@pytest.mark.parametrize("schedule", MODES)
def test_a_merge_has_few_parts_and_no_part_is_merged_twice(schedule: str) -> None:
    plan = build_plan(schedule, 8, documents([300, 5, 400, 319], window=(200, None)), ModeOptions(40))
    for each in (plan, backward_plan(plan)):
        for recording in map(Recorder(each, Target(Workload(8, 8, 2), PACKED)).record, range(8)):
            merges = [op for op in recording.ops if isinstance(op, Merge)]
            assert all(1 <= len(merge.parts) <= MAX_PARTIALS for merge in merges)
            of_calls = [part.rows for merge in merges for part in merge.parts if part.rows.memory.place is Place.CALL]
            assert len(of_calls) == len(set(of_calls))


def test_the_first_messages_start_behind_the_first_call() -> None:
    def types(plan: Plan, over_peers: bool) -> list[type]:
        return list(map(type, record(plan, 1, Target(Workload(2, 2, 2), PACKED, over_peers)).ops))

    ring = build_plan("ring", 2, full(8))
    for over_peers in (False, True):
        assert types(ring, over_peers) == [Copy, Compute, Send, Wait, Compute, Merge]
    # Messages that overlap nothing are read in place: queries and keys, at the end the outputs.
    ulysses = build_plan("ulysses", 2, full(8))
    assert types(ulysses, True) == [Copy, Acquire, Copy, Release, Compute, Copy, Acquire, Copy, Release]
    assert Acquire not in types(ulysses, False)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", ["ring", "zigzag", "striped", "double_ring"])
def test_a_ring_needs_two_buffers_of_keys_whatever_the_number_of_ranks(schedule: str, n: int) -> None:
    """One buffer is attended to while the other is filled."""
    for mask in (full(8 * n), causal(8 * n)):
        plan = build_plan(schedule, n, mask, ModeOptions(inner_size=n))
        recorded = Recorder(plan, Target(Workload(2, 2, 2), PACKED))
        found = [each for rank in range(n) for each in recorded.record(rank).slots]
        assert {each.kind for each in found} == {Kind.KV} and max(each.tokens for each in found) <= 8
        assert max(len(recorded.record(rank).slots) for rank in range(n)) == min(2, n - 1)


WINDOW = 64
HOPS = {
    # A window crosses n - 1 borders between neighbouring ranks in one hop each, or 2n - 2 borders if a rank holds two
    # pieces. A ring needs n - 1 hops to the rank before.
    "ring": lambda n: n - 1,
    "helper": lambda n: n - 1,
    "all_gather": lambda n: 2 * (n - 1),
    "zigzag": lambda n: n * (n - 1),
    "usp": lambda n: n // 2 * (n // 2 - 1),  # between groups of two ranks with half the heads each
    "double_ring": {4: 8, 8: 26}.get,
    "tasp": {4: 18, 8: 59}.get,  # upper bounds: the hops depend on which of the n - 1 rings a block takes
}


@pytest.mark.parametrize("n", [4, 8])
@pytest.mark.parametrize("schedule", HOPS)
def test_a_window_costs_the_bytes_of_a_window(schedule: str, n: int) -> None:
    """Only a window's keys are sent, buffered and held in send memory, whatever the length."""
    work = Workload(8, 8, 16)
    token, most = work.token_bytes(Kind.KV), HOPS[schedule](n) * WINDOW
    for length in (4096, 16384):
        plan = build_plan(schedule, n, documents([length], window=(WINDOW, 0)), ModeOptions(inner_size=2))
        groups = length // 2 if schedule == "usp" else 0  # the heads of half their tokens are exchanged
        for each in (plan, backward_plan(plan)):
            blocks = [move.block for step in each.steps for move in step.moves if move.block.kind is Kind.KV]
            sent = sum(block.tokens * work.token_bytes(Kind.KV, block.heads) for block in blocks)
            assert sent <= (most + groups) * token and (sent == (most + groups) * token or schedule == "tasp")
        recorded = Recorder(plan, Target(work, PACKED, over_peers=True))
        if not groups:
            assert max(sum(each.tokens for each in recorded.record(r).slots) for r in range(n)) <= 4 * WINDOW
            assert recorded.send_bytes() <= 6 * WINDOW * token


def test_documents_on_one_rank_take_one_kernel_call() -> None:
    plan = build_plan("zigzag", 4, documents([4] * 32))
    for rank in range(4):
        (call,) = record(plan, rank, Target(Workload(1, 1, 2), PACKED)).ops
        assert isinstance(call, Compute) and len(call.call.segments) == 8 and call.homes == (rank,)


DEEP = documents([1500, 700, 900, 400, 600, 800, 500], parents=[-1, 0, 1, 2, 1, 0, 5])


def sums_of_copies(recording: Recording) -> list[Merge]:
    return [op for op in recording.ops if isinstance(op, Merge) and op.into.memory.place is Place.CALL]


@pytest.mark.parametrize("schedule", MODES)
def test_branches_of_a_tree_have_their_own_copies_of_keys(schedule: str) -> None:
    """Then calls of several branches are few, and no copy is without its part of a gradient."""
    plan, target = build_plan(schedule, 2, DEEP), Target(Workload(8, 2, 64), PACKED)
    for each in (plan, backward_plan(plan)):
        with mock.patch.object(recorder, "key_copies", return_value=None):
            apart = [Recorder(each, target).record(rank) for rank in range(2)]
        together = [Recorder(each, target).record(rank) for rank in range(2)]
        assert sum(len(of.calls) for of in together) <= sum(len(of.calls) for of in apart) - 2
        for few, many in zip(together, apart, strict=True):
            assert sum(op.call.pairs for op in few.calls) == sum(op.call.pairs for op in many.calls)
            sums = sums_of_copies(few)
            assert all(op.parts[0].rows.memory.tokens == sum(rows.tokens for rows, _ in op.parts) for op in sums)
            assert bool(sums) == (each.backward and len(few.calls) < len(many.calls))


def test_keys_are_copied_in_trees_alone_and_where_that_pays() -> None:
    target = Target(Workload(8, 2, 64), PACKED)
    of = target.takes, target.workload, ALL_HEADS
    prompt = documents([32768, *[512] * 32], parents=[-1, *[0] * 32])
    for backward in (False, True):
        assert key_copies(DEEP.slices, *of, backward) is not None
        assert key_copies(prompt.slices, *of, backward) is None  # 32 copies of a long prompt
    with mock.patch.object(recorder, "key_copies", side_effect=AssertionError):
        for mask in (causal(4000), documents([900, 700, 400]), documents([3000, 1000], window=(500, 0))):
            plan = build_plan("all_gather", 2, mask)
            for each in (plan, backward_plan(plan)):
                record(each, 0, target)
        with pytest.raises(AssertionError):
            record(build_plan("all_gather", 2, DEEP), 0, target)


def test_copies_are_priced_and_counted() -> None:
    """The simulator and the memory model take them from the recording."""
    plan, target = backward_plan(build_plan("all_gather", 1, DEEP)), Target(Workload(8, 2, 64), PACKED)
    (op,) = sums_of_copies(record(plan, 0, target))
    token, copied = target.workload.token_bytes(Kind.DKV), op.parts[0].rows.memory.tokens
    assert copied > op.into.tokens == DEEP.length
    with mock.patch.object(recorder, "key_copies", return_value=None):
        apart = footprint(record(plan, 0, target), target.workload)
    found = footprint(record(plan, 0, target), target.workload)
    assert found.buffers == copied * token and apart.buffers == 0
    assert found.results >= (copied + op.into.tokens) * token


def test_a_single_rank_copies_nothing() -> None:
    recording = record(build_plan("zigzag", 1, 64), 0, Target(Workload(4, 2, 8), PACKED))
    (call,) = recording.ops
    assert isinstance(call, Compute) and call.queries.memory.place is call.keys.memory.place is Place.OWN
    assert recording.own[Kind.OUT].memory.place is Place.CALL and not recording.slots and recording.sends.num_bytes == 0


def test_long_runs_of_keys_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short neighbours are, and all keys are if results may not depend on their place in the cache."""
    long = 64
    monkeypatch.setattr(recorder, "LONG_RUN", long)

    def work(*runs: int, joined: bool = False) -> tuple[int, int]:
        """Return the rows copied and the kernel calls of a query over runs of keys with gaps in the cache."""
        plan = CACHE_MODES["pass_kv"](*cache_of({"lengths": [sum(runs)]}, [1], runs, 1, free=5))
        recording = record(plan, 0, Target(Workload(1, 1, 2), PACKED, joined=joined))
        copies = [into for op in recording.ops if isinstance(op, Copy) for into, _ in op.pairs]
        return sum(into.tokens for into in copies), len(recording.calls)

    assert work(long, long) == (0, 2) and work(long, long, joined=True) == (2 * long, 1)
    assert work(9, 9, 9) == (27, 1) and work(long) == (0, 1)
    assert work(long, 9, 9, long) == (18, 3) and work(long, 9, long) == (0, 3)


def test_footprint_of_a_ring_by_hand() -> None:
    """2 ranks have 1,024 tokens each, of 4 heads of 64 in fp32: q, k, v and out take 1 MiB each."""
    mib, lse = 2**20, 1024 * 4 * 4
    plan = build_plan("ring", 2, full(2048))
    found = [footprint(record(plan, rank, Target(WORK, PACKED)), WORK) for rank in range(2)]
    # q, k, v; the other rank's k, v; its own in send memory; two outs and their merged result.
    assert found[0] == found[1] == Footprint(3 * mib, 2 * mib, 0, 2 * mib, 3 * (mib + lse))
    assert found[0].total == 10 * mib + 3 * lse
    peers = footprint(record(plan, 0, Target(WORK, PACKED, over_peers=True)), WORK)
    assert peers.sent == 4 * mib, "two passes alternate"
    backward = footprint(record(backward_plan(plan), 0, Target(WORK, PACKED)), WORK)
    # q, k, v, out, its gradient, lse; k, v and a gradient of these; k, v and the gradient in send memory.
    assert (backward.inputs, backward.buffers, backward.sent) == (5 * mib + lse, 4 * mib, 4 * mib)


def test_the_first_rank_of_a_causal_ring_receives_nothing() -> None:
    plan = build_plan("ring", 2, 2048)
    first, second = (footprint(record(plan, rank, Target(WORK, PACKED)), WORK) for rank in range(2))
    assert (first.buffers, second.buffers) == (0, 2**21) and (first.sent, second.sent) == (2**21, 0)
    assert first.results == 2**20 + 1024 * 16


def test_kernel_workspaces_are_counted_on_request() -> None:
    """Backward needs dq in fp32, a sum per query and, with grouped heads, a dk and dv of every query head."""
    grouped, plan = Workload(4, 2, 64), backward_plan(build_plan("zigzag", 1, full(1024)))
    recording = record(plan, 0, Target(grouped, PACKED))
    plain, more = (footprint(recording, grouped, workspace).results for workspace in (False, True))
    assert more - plain == 1024 * (4 * 64 * 4 + 4 * 4) + 1024 * 2 * 4 * 64 * 2
    forward = record(build_plan("zigzag", 1, full(1024)), 0, Target(grouped, PACKED))
    assert footprint(forward, grouped) == footprint(forward, grouped, workspace=True)


@pytest.mark.parametrize("n", [8, 24])
def test_gathered_keys_take_no_more_memory_with_more_ranks(n: int) -> None:
    """The halves of a block arrive in different steps, and every other call gathers them."""
    plan = build_plan("double_ring", n, full(16 * n), ModeOptions(inner_size=2))
    for each in (plan, backward_plan(plan)):
        for rank in (0, 1, n - 1):
            found = record(each, rank, Target(Workload(2, 2, 8))).slots
            assert sum(buffer.tokens for buffer in found if buffer.kind is Kind.KV) <= 3 * 24 + 16


def test_long_causal_segments_are_cut_only_in_backward() -> None:
    target, plan = Target(Workload(2, 2, 2), PACKED._replace(longest_causal=256)), build_plan("ring", 1, 1024)
    forward, backward = (record(each, 0, target) for each in (plan, backward_plan(plan)))
    (whole,) = forward.calls
    assert whole.call.causal and len(backward.calls) == 3
    assert sum(op.call.pairs for op in backward.calls) == whole.call.pairs
