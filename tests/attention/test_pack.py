"""Strided copies in wide words: the same values, whatever the strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_longctx.attention.pack import copy

SIZES = st.integers(1, 24)


@given(
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    starts=st.tuples(*[st.integers(0, 9)] * 3),
    order=st.permutations(range(3)),
    seed=st.integers(0, 9),
)
def test_any_strides_are_copied_and_nothing_beside_them(dtype, sizes, starts, order, seed):
    """Parts of larger tensors, whose dimensions lie in different orders in memory."""
    torch.manual_seed(seed)
    source = torch.randint(0, 250, (30, 30, 48)).to(dtype)
    inside = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    part = source[inside].permute(*order)
    into = torch.full((33, 33, 64), 7, dtype=dtype)
    expected = into.clone()
    target = tuple(slice(3, 3 + size) for size in part.shape)
    expected[target].copy_(part)
    copy(into[target], part)
    assert torch.equal(into, expected)


@pytest.mark.parametrize(("last", "word"), [(128, torch.complex128), (4, torch.int64), (3, torch.bfloat16)])
def test_the_widest_words_that_fit_are_moved(last, word, monkeypatch):
    moved = []
    original = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, source: moved.append(into.dtype) or original(into, source))
    source = torch.randn(5, 2, 256).bfloat16()[:, :, :last]
    copy(torch.empty(5, 2, last, dtype=torch.bfloat16), source)
    assert moved == [word]
