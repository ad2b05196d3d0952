"""Plans over a cache: every new token attends to its own sequence up to itself, each pair exactly once."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.core.plans import KernelSupport, Kind, Plan, Recorder, Target, Workload, record
from megatron_longctx.core.plans import recorder as recording_of
from megatron_longctx.core.plans.cache_modes import CACHE_MODES
from megatron_longctx.core.plans.plan import trim
from megatron_longctx.core.plans.recording import Compute, Copy, Merge
from megatron_longctx.inference.batch import MAX_CONTIGUOUS, Batch
from megatron_longctx.inference.cache_manager import CacheManager
from megatron_longctx.planner.describe import moved_tokens, rank_pairs
from megatron_longctx.testing.verify import verify
from tests.inference.histories import Texts, batch_with_past, random_batch, random_family

CHAT = dict(pasts=[(9, 1, 1, 4), (), (2,)], new=(7, 12, 1))
HEADS = Workload(num_heads=4, num_kv_heads=2, head_dim=8)
PACKED = KernelSupport(packed=True)


def computed(batch: Batch, plan: Plan) -> dict[tuple[int, int], int]:
    """How often the plan's calls compute each pair of a new token and a slot."""
    count: Counter[tuple[int, int]] = Counter()
    tokens = [[number for span in spans for number in span] for spans in batch.queries.spans]
    for attend in (attend for step in plan.steps for attends in step.attends for attend in attends):
        queries = [tokens[block.home][i] for block in attend.queries for i in range(block.start, block.stop)]
        slots = [block.home * batch.slots + i for block in attend.keys for i in range(block.start, block.stop)]
        for each in attend.slices:
            for q, k in product(range(each.q_start, each.q_stop), range(each.k_start, each.k_stop)):
                count[queries[q], slots[k]] += each.lo <= k - q <= each.hi
    return +count


def visible(batch: Batch, window: int | None = None) -> dict[tuple[int, int], int]:
    """The same from the cache manager alone, which says where every token of every sequence is stored."""
    found, first = {}, 0
    for chunk in batch.chunks:
        places: dict[int, int] = {}  # keyed by position
        for rank in range(batch.n):
            held = [p for span in (*chunk.cached_positions[rank], *chunk.new_positions(rank)) for p in span]
            slots = [slot for run in (*chunk.cached_slots[rank], *chunk.new_slots[rank]) for slot in run]
            places |= {p: rank * batch.slots + slot for p, slot in zip(held, slots, strict=True)}
        assert sorted(places) == list(range(chunk.cached + chunk.new))
        for i in range(chunk.new):
            at = chunk.cached + i
            start = 0 if window is None else max(0, at - window)
            found |= {(first + i, places[p]): 1 for p in range(start, at + 1)}
        first += chunk.new
    return found


def keys_sent(plan: Plan) -> int:
    return sum(moved_tokens(plan)[rank].get(Kind.KV, (0, 0))[0] for rank in range(plan.n))


@pytest.mark.parametrize("mode", CACHE_MODES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), shared=st.booleans(), window=st.none() | st.integers(0, 30))
def test_every_mode_computes_attention_whatever_the_past(
    mode: str, seed: int, shared: bool, window: int | None
) -> None:
    batch = (random_family if shared else random_batch)(seed)
    batch = batch.with_window(window)
    plan = batch.plan(mode)
    verify(plan)
    assert plan.name == mode and trim(plan) == plan
    assert computed(batch, plan) == visible(batch, window)


@pytest.mark.parametrize("n", [2, 4])
def test_shared_keys_are_sent_once(n: int) -> None:
    manager = CacheManager(n, 200, 4, repeatable=True)  # all go on on one rank
    texts = Texts(manager)
    first = texts.open()
    texts.append({first: 40 * n})
    forks = [texts.fork(first, 40 * n) for _ in range(3)]

    def moved(*sessions: int) -> int:
        chunks = manager.append({session: 1 for session in sessions})
        plan = Batch(n, manager.slots[0], chunks).plan("pass_kv")
        manager.undo(chunks)
        verify(plan)
        return keys_sent(plan)

    assert moved(*forks) <= moved(first) + 2 * n  # the new tokens


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_joined_calls_do_not_depend_on_where_tokens_are_stored(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same history in a fresh cache and in the gaps of a used one: the same calls, of the same sizes in order."""
    monkeypatch.setattr(recording_of, "LONG_RUN", 32)

    def calls(joined: bool, gaps: bool) -> list[object]:
        manager = CacheManager(2, 12, 64)
        sessions = [manager.open() for _ in range(3)]
        for _ in range(3):
            manager.append({session: 128 for session in (sessions if gaps else sessions[:1])})
        chunks = manager.append({sessions[0]: 3})
        recorder = Recorder(Batch(2, manager.slots[0], chunks).plan(mode), Target(HEADS, PACKED, None, joined))
        ops = [op for rank in range(2) for op in recorder.record(rank).ops]
        return [op.call for op in ops if isinstance(op, Compute)]

    assert calls(True, True) == calls(True, False) == calls(False, False) != calls(False, True)


def test_messages_are_not_padded() -> None:
    """Ring pass-KV sends every cached and new key at most n-1 times, pass-Q every query and its partial results."""
    batch = batch_with_past(4, [(40,), (3,)], (8, 2))
    plan = batch.plan("pass_kv")
    assert keys_sent(plan) <= 3 * (batch.cached + batch.new)
    assert all(set(moved_tokens(plan)[rank]) <= {Kind.KV} for rank in range(4))
    for mode in ("pass_q", "one_hop"):
        moved = [moved_tokens(batch.plan(mode))[rank] for rank in range(4)]
        for kind in (Kind.Q, Kind.OUT):
            assert sum(m.get(kind, (0, 0))[1] for m in moved) <= 3 * batch.new


def test_keys_outside_the_window_are_not_sent() -> None:
    batch = batch_with_past(4, [(400,)], (8,))
    assert keys_sent(batch.with_window(16).plan("pass_kv")) < 0.2 * keys_sent(batch.plan("pass_kv"))


@pytest.mark.parametrize("n", [2, 3, 8])
def test_one_hop_takes_three_steps_and_the_ring_n_plus_one(n: int) -> None:
    batch = batch_with_past(n, [(5 * n,), (4 * n,)], (1, 1))
    steps = {mode: len(batch.plan(mode).steps) for mode in CACHE_MODES}
    assert steps == {"one_hop": 3, "pass_q": n + 1, "pass_kv": n}


def test_new_tokens_are_balanced_over_the_ranks_whatever_the_cache_holds() -> None:
    plan = batch_with_past(4, [(64,), (7, 1, 2)], (64, 32), page=2, pages=90, max_contiguous=0).plan("pass_kv")
    pairs = rank_pairs(plan)
    assert max(pairs) - min(pairs) <= 0.02 * max(pairs)


def host_operations(plan: Plan, rank: int) -> int:
    """Count a rank's kernel calls, merges, and steps with messages."""
    messages = sum(any(rank in move[1:] for move in step.moves) for step in plan.steps)
    return messages + sum(isinstance(op, Compute | Merge) for op in record(plan, rank, Target(HEADS, PACKED)).ops)


@pytest.mark.parametrize("mode", CACHE_MODES)
def test_few_new_tokens_take_few_operations_and_hardly_more_work(mode: str) -> None:
    """A call for every rank's keys, one more for the diagonal, and at most two merges."""
    rows, cut = (
        batch_with_past(4, [(131006,)], [66], page=64, pages=520, max_contiguous=few) for few in (MAX_CONTIGUOUS, 0)
    )
    issued = [max(host_operations(b.plan(mode), rank) for rank in range(4)) for b in (rows, cut)]
    exchanges = {"pass_kv": 3, "pass_q": 4, "one_hop": 2}[mode]
    assert issued[0] <= 5 + 2 + exchanges and issued[0] <= issued[1]
    pairs, even = (rank_pairs(b.plan(mode)) for b in (rows, cut))
    assert sum(pairs) == sum(even) and max(pairs) <= 1.001 * max(even)


@pytest.mark.parametrize("joined", [False, True])
def test_long_runs_are_read_in_place(joined: bool) -> None:
    long = recording_of.LONG_RUN
    batch = batch_with_past(1, [(long, 5, long), (3, 1, 1)], (1, 1), page=long, pages=9)
    assert len(batch.chunks[0].cached_slots[0]) > 1
    recording = Recorder(batch.plan("pass_q"), Target(HEADS, PACKED, None, joined)).record(0)
    copies = [rows for op in recording.ops if isinstance(op, Copy) for rows, _ in op.pairs if rows.kind is Kind.KV]
    assert (max((rows.tokens for rows in copies), default=0) >= long) == joined


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inference\.mode=pass_v: expected one of one_hop, pass_kv, pass_q"):
        batch_with_past(2, **CHAT).plan("pass_v")
