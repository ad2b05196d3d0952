"""Large calls over the cache come in few shapes, whatever the lengths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.inference.ledger import CacheLedger
from megatron_longctx.inference.pieces import pieces
from megatron_longctx.inference.plan import MODES, Batch, build, verify_over_cache
from megatron_longctx.inference.warm_up import turns_with_all
from megatron_longctx.kernels.planned import PlannedShapes, planned_shapes
from megatron_longctx.schedules import Attend
from tests.inference.histories import random_batch, random_family

SMALL = PlannedShapes(least_queries=2, least_keys=4, least_pairs=16, most=16)
LLAMA = planned_shapes(32, 128)
LENGTHS = st.one_of(st.integers(1, 2**12), st.integers(1, 2**18))


def floor_of(size: int) -> int:
    """The largest power of two that fits."""
    return 1 << size.bit_length() - 1


def parts(size: int, least: int, most: int) -> int:
    """Most powers of two that a size is cut into."""
    return size // most + (most // least).bit_length() - 1


@settings(max_examples=150, deadline=None)
@given(queries=st.integers(1, 70), keys=st.integers(1, 70), causal=st.booleans())
def test_pieces_cover_a_call_once(queries: int, keys: int, causal: bool) -> None:
    keys = queries if causal else keys
    count = torch.zeros(queries, keys, dtype=torch.int64)
    for q0, q1, k0, k1, square in pieces(queries, keys, causal, SMALL):
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.int64)
        assert not square or q1 - q0 == k1 - k0
        count[q0:q1, k0:k1] += seen.tril() if square else seen
    whole = torch.ones_like(count)
    assert torch.equal(count, whole.tril() if causal else whole)


@settings(max_examples=300, deadline=None)
@given(queries=LENGTHS, keys=LENGTHS, causal=st.booleans(), heads=st.sampled_from((4, 8, 28, 32, 64)))
def test_large_pieces_are_of_few_shapes_and_not_many(queries: int, keys: int, causal: bool, heads: int) -> None:
    """What is left over has no room for any of the shapes; the number of pieces grows with the work alone."""
    shapes = planned_shapes(heads, 128)
    keys = queries if causal else keys
    found = [(q1 - q0, k1 - k0, square) for q0, q1, k0, k1, square in pieces(queries, keys, causal, shapes)]
    planned = [piece for piece in found if shapes.has(*piece)]
    assert set(planned) <= set(shapes.all())
    for q, k, square in found:
        assert shapes.has(q, k, square) or not shapes.has(floor_of(q), floor_of(k), square)
    if not planned:
        assert found == [(queries, keys, causal and queries > 1)]
        return
    rows = parts(queries, shapes.least_queries, shapes.most)
    columns = parts(keys, shapes.least_keys, shapes.most)
    if causal:
        assert len(found) <= (columns + 1) * (rows + 2) * (1 + queries // shapes.most)
    else:
        assert len(planned) <= rows * columns and len(found) - len(planned) <= rows + 1
        assert sum(q * k for q, k, _ in planned) > queries * keys / 4


def test_what_large_prompts_come_to() -> None:
    """Calls of a rank with 131,072 tokens on 4: small ones stay whole, as do those that have planned shapes."""
    assert list(pieces(328, 32_604, False, LLAMA)) == [(0, 328, 0, 32_604, False)]
    assert list(pieces(3_276, 3_276, True, LLAMA)) == [(0, 3_276, 0, 3_276, True)]
    assert list(pieces(32_768, 16_384, False, LLAMA)) == [(0, 32_768, 0, 16_384, False)]
    assert list(pieces(1_638, 31_130, False, LLAMA)) == [
        (0, 1_024, 0, 16_384, False),
        (0, 1_024, 16_384, 24_576, False),
        (0, 1_024, 24_576, 28_672, False),
        (1_024, 1_536, 0, 16_384, False),
        (1_024, 1_536, 16_384, 24_576, False),
        (0, 1_024, 28_672, 31_130, False),
        (1_024, 1_536, 24_576, 31_130, False),
        (1_536, 1_638, 0, 31_130, False),
    ]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), joined=st.booleans(), shared=st.booleans())
def test_plans_of_pieces_compute_attention(mode: str, seed: int, joined: bool, shared: bool) -> None:
    batch = replace((random_family if shared else random_batch)(seed), joined=joined, shapes=SMALL)
    plan = build(mode, batch)
    verify_over_cache(plan)
    for attend in (attend for step in plan.steps for attends in step.attends for attend in attends):
        shape = shape_of(attend)
        assert SMALL.has(*shape) or not SMALL.has(floor_of(shape[0]), floor_of(shape[1]), attend.causal)


def shape_of(attend: Attend) -> tuple[int, int, bool]:
    return attend.num_queries, attend.num_keys, attend.causal


def shapes_of(n: int, new: int, cached: int, shapes: PlannedShapes) -> set[tuple[int, int, bool]]:
    """The planned ones among the calls of a turn."""
    ledger = CacheLedger(n, (new + cached) // (4 * n) + 2, 4)
    session = ledger.open()
    if cached:
        ledger.append({session: cached})
    batch = Batch(n, ledger.slots_per_rank, ledger.append({session: new}), shapes=shapes)
    calls = {shape_of(call) for of_rank in batch.calls for calls in of_rank for call in calls}
    return {shape for shape in calls if shapes.has(*shape)}


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 4), most_new=st.integers(1, 40), most_cached=st.integers(0, 70))
def test_a_few_turns_meet_all_shapes(n: int, most_new: int, most_cached: int) -> None:
    turns = turns_with_all(SMALL, most_new, most_cached)
    assert len(turns) <= 4
    met = set().union(*(shapes_of(n, n * new, n * cached, SMALL) for new, cached in turns))
    for queries, keys, causal in SMALL.all():
        if queries <= most_new and (causal or keys <= most_cached):
            assert (queries, keys, causal) in met
    assert all(new <= most_new and cached <= most_cached for new, cached in turns)


def test_chunks_of_a_prompt_have_the_same_shapes_over_whatever_is_cached() -> None:
    """In chunks of 2,048 tokens on 4 ranks, the three that are met before the first prompt."""
    wanted = {(512, 8192, False), (512, 16384, False), (512, 32768, False)}
    (turn,) = turns_with_all(LLAMA, 512, 32768)[:1]
    assert turn == (512, 32768)
    found = set()
    for cached in range(2048, 4 * 32768, 7 * 2048):
        found |= shapes_of(4, 2048, cached, LLAMA)
    met = [shapes_of(4, 4 * new, 4 * cached, LLAMA) for new, cached in turns_with_all(LLAMA, 512, 32768)]
    assert found <= set().union(*met) == wanted


@pytest.mark.parametrize("mode", MODES)
def test_messages_do_not_depend_on_pieces(mode: str) -> None:
    """Ranks whose kernels differ understand each other."""
    differ = 0
    for whole in (make(seed) for seed in range(12) for make in (random_batch, random_family)):
        cut = replace(whole, shapes=SMALL)
        differ += cut.calls != whole.calls
        assert [step.moves for step in build(mode, cut).steps] == [step.moves for step in build(mode, whole).steps]
    assert differ > 6
