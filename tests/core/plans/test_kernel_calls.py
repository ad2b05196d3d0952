"""Kernel calls cover slices once, within what the kernel supports, in as few calls as that allows."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.core.plans import KernelCall, KernelSupport, Segment, Slice, build_plan, kernel_calls
from megatron_longctx.core.plans.kernel_calls import PLAINEST
from megatron_longctx.core.plans.mask import causal, documents
from megatron_longctx.core.plans.slices import FAR
from tests.core.plans.masks import masks, pairs_of

PACKED = KernelSupport(packed=True, rectangles=True, windows=True)


@st.composite
def slices_of_a_rank(draw: st.DrawFn) -> tuple[Slice, ...]:
    """Draw what a range of queries sees of a range of keys."""
    mask = draw(masks(30))
    (q0, q1), (k0, k1) = (sorted(draw(st.tuples(*[st.integers(0, mask.length)] * 2))) for _ in range(2))
    return tuple(found for each in mask.slices if (found := each.cut(q0, q1, k0, k1)) is not None)


@settings(max_examples=500, deadline=None)
@given(slices_of_a_rank(), st.builds(KernelSupport, *[st.booleans()] * 4, st.sampled_from([FAR, 1, 2, 5])))
def test_calls_cover_slices_once_and_are_supported(slices: tuple[Slice, ...], takes: KernelSupport) -> None:
    if any(each.lo != -FAR for each in slices) and not (takes.bands or (takes.windows and takes.rectangles)):
        with pytest.raises(ValueError, match=r"a window \(.*\): expected causal or full attention of this kernel"):
            kernel_calls(slices, takes)
        return
    calls = kernel_calls(slices, takes)
    found = [each for call in calls for each in call.slices]
    np.testing.assert_array_equal(pairs_of(found, 30, 30), pairs_of(slices, 30, 30))
    assert sum(call.pairs for call in calls) == sum(each.pairs for each in slices)
    for call in calls:
        assert takes.packed or len(call.segments) == 1
        for a, b in pairwise(call.segments):
            assert a.q_stop <= b.q_start and a.k_stop <= b.k_start
        if not takes.bands:
            assert call.left >= 0 and call.right in (0, FAR)
        if not takes.rectangles and call.causal:
            assert all(q1 - q0 == k1 - k0 for q0, q1, k0, k1 in call.segments)
        assert not call.causal or call.most_queries <= takes.longest_causal
    if takes.rectangles and takes.longest_causal == FAR:
        assert len(calls) <= 2 * len(slices)


def test_long_causal_segments_are_cut_into_few_calls() -> None:
    """One call has the squares along the diagonal, and for every halving another one has what is below them."""
    cut = PACKED._replace(longest_causal=256)
    squares, near, far = sorted(kernel_calls(documents([1024]).slices, cut), key=lambda call: -len(call.segments))
    assert squares == KernelCall(tuple(Segment(r, r + 256, r, r + 256) for r in range(0, 1024, 256)), FAR, 0)
    assert near == KernelCall((Segment(256, 512, 0, 256), Segment(768, 1024, 512, 768)))
    assert far == KernelCall((Segment(512, 1024, 0, 512),))
    # With more keys than queries; long segments are cut between tiles.
    full, slanted = kernel_calls([Slice(0, 300, 0, 500, -FAR, 200)], cut)
    assert slanted == KernelCall((Segment(0, 256, 0, 456), Segment(256, 300, 456, 500)), FAR, 0)
    assert full == KernelCall((Segment(256, 300, 0, 456),))


def test_a_pack_is_one_call() -> None:
    lengths = [7 + 3 * number for number in range(24)]
    (call,) = kernel_calls(documents(lengths).slices, PACKED)
    assert call.causal and [q1 - q0 for q0, q1, _, _ in call.segments] == lengths
    assert len(kernel_calls(documents(lengths).slices, PACKED._replace(packed=False))) == 24
    (call,) = kernel_calls(documents(lengths, causal=False).slices, PACKED)
    assert call.full and len(call.segments) == 24


def test_documents_within_the_window_join_the_calls_of_longer_ones() -> None:
    (call,) = kernel_calls(documents([5, 40, 3, 11, 10, 60], window=(10, 0)).slices, PACKED)
    assert (call.left, call.right) == (10, 0) and len(call.segments) == 6
    # If the window limits no document, the pack is causal.
    (call,) = kernel_calls(documents([5, 11, 3], window=(10, 0)).slices, PACKED)
    assert call.causal


@pytest.mark.parametrize("lengths", [[4096], [100, 924, 1024, 7, 2041], [64] * 64])
def test_a_rank_needs_few_calls_for_a_pack(lengths: list[int]) -> None:
    """Packs are split into causal and full calls, not by document."""
    plan = build_plan("zigzag", 4, documents(lengths))
    calls = [kernel_calls(a.slices, PACKED) for step in plan.steps for attends in step.attends for a in attends]
    assert max(map(len, calls)) <= 2
    assert all(len(found) == 1 for found in calls) or len(lengths) > 1


def test_neighbouring_branches_of_a_tree_attend_to_their_prefix_together() -> None:
    """The first branch continues the trunk; the others are one rectangle over the trunk and a causal pack."""
    calls = kernel_calls(documents([50, 8, 9, 10], parents=[-1, 0, 0, 0]).slices, PACKED)
    assert calls == (
        KernelCall((Segment(58, 77, 0, 50),)),
        KernelCall(tuple(Segment(a, b, a, b) for a, b in pairwise((0, 58, 67, 77))), right=0),
    )


def test_causal_rectangles_split_for_kernels_with_squares_only() -> None:
    rectangle = [Slice(0, 10, 0, 30, -FAR, 20)]
    assert kernel_calls(rectangle, PACKED) == (KernelCall((Segment(0, 10, 0, 30),), right=0),)
    full, square = kernel_calls(rectangle, PLAINEST)
    assert full == KernelCall((Segment(0, 10, 0, 20),)) and square == KernelCall((Segment(0, 10, 20, 30),), right=0)
    # With more queries than keys, the queries that see all keys have a full call.
    square, full = sorted(kernel_calls([Slice(0, 30, 0, 10, -FAR, 0)], PLAINEST), key=lambda call: call.segments)
    assert square == KernelCall((Segment(0, 10, 0, 10),), right=0) and full == KernelCall((Segment(10, 30, 0, 10),))


def test_spans_of_a_call_move_with_it() -> None:
    (call,) = kernel_calls(documents([5, 6]).slices, PACKED)
    assert call.q_span == call.k_span == (0, 11) and call.causal and not call.full
    assert call.moved(3, 4).segments == (Segment(3, 8, 4, 9), Segment(8, 14, 9, 15))
    assert call.moved(3, 4).moved(-3, -4) == call and call.moved(0, 0) is call
    assert kernel_calls(causal(9).slices, PLAINEST)[0].pairs == 45
