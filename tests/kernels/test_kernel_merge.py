"""Merging partial attention: values, edge cases, and the fused kernel under Triton's interpreter."""

import importlib.util

import pytest
import torch

from megatron_longctx.kernels import merge_into, merge_into_torch
from tests.kernels.interpreter import run_interpreted


def partial(lse_value, seed=0, s=3, dtype=torch.float32):
    """A partial whose lse is `lse_value` everywhere; zeros when it is empty."""
    gen = torch.Generator().manual_seed(seed)
    out = torch.randn(s, 2, 4, 8, generator=gen, dtype=torch.float64).to(dtype)
    lse = torch.full((s, 2, 4), lse_value, dtype=torch.float32)
    return (torch.zeros_like(out) if lse_value == -torch.inf else out), lse


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("acc_dtype", [torch.float32, torch.float64], ids=str)
def test_merge_is_the_weighted_mean(acc_dtype, dtype):
    (a, _), (b, _) = partial(0.0, 1, dtype=acc_dtype), partial(0.0, 2, dtype=dtype)
    l_a, l_b = torch.randn(3, 2, 4, dtype=acc_dtype) * 3, torch.randn(3, 2, 4) * 3
    lse = torch.logaddexp(l_a.double(), l_b.double())
    weight_a, weight_b = (l_a - lse).exp()[..., None], (l_b - lse).exp()[..., None]
    expected = a.double() * weight_a + b.double() * weight_b
    merge_into(a, l_a, b, l_b)
    tolerance = 1e-6 if acc_dtype == torch.float32 else 1e-12
    torch.testing.assert_close(a.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(l_a.double(), lse, rtol=tolerance, atol=tolerance)


def test_empty_is_neutral_on_both_sides():
    for first, second in ((-torch.inf, 1.5), (1.5, -torch.inf)):
        (out, lse), (other, other_lse) = partial(first, 1), partial(second, 2)
        expected = other.clone() if first == -torch.inf else out.clone()
        merge_into(out, lse, other, other_lse)
        assert torch.equal(out, expected)
        assert (lse == 1.5).all()


def test_two_empty_sets_stay_empty():
    out, lse = partial(-torch.inf)
    merge_into(out, lse, *partial(-torch.inf))
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("far", [1e2, 1e4, 1e30])
def test_far_apart_takes_the_larger(far):
    for first, second in ((-far, far), (far, -far)):
        (out, lse), (other, other_lse) = partial(first, 1), partial(second, 2)
        expected = other.clone() if second > 0 else out.clone()
        merge_into(out, lse, other, other_lse)
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
        assert (lse == far).all()


def test_merge_writes_only_the_rows_of_a_view():
    out, lse = torch.zeros(9, 2, 4, 8), torch.full((2, 4, 9), -torch.inf).permute(2, 0, 1)
    part, part_lse = partial(0.5)
    merge_into(out[3:6], lse[3:6], part, part_lse.permute(1, 2, 0).contiguous().permute(2, 0, 1))
    assert torch.equal(out[3:6], part)
    assert (out[:3] == 0).all() and (out[6:] == 0).all()
    assert (lse[3:6] == 0.5).all()
    assert torch.isinf(lse[:3]).all() and torch.isinf(lse[6:]).all()


def test_no_rows_is_nothing_to_do():
    merge_into(torch.zeros(0, 2, 4, 8), torch.zeros(0, 2, 4), *partial(0.0, s=0))


def test_merge_refuses_what_does_not_fit():
    out, lse = partial(0.0)
    with pytest.raises(ValueError, match="accumulate both in float32"):
        merge_into(out.bfloat16(), lse, out, lse)
    with pytest.raises(ValueError, match="accumulate both in float32"):
        merge_into(out, lse.double(), out, lse)
    with pytest.raises(ValueError, match="equal sizes"):
        merge_into(out, lse, out[:2], lse[:2])
    with pytest.raises(ValueError, match="equal sizes"):
        merge_into(out, lse.transpose(1, 2), out, lse)


def compare_fused_with_torch() -> None:
    """Run in a process of its own, whose environment switches Triton's interpreter on."""
    from megatron_longctx.kernels.merge_triton import merge_into_triton

    gen = torch.Generator().manual_seed(0)
    for head_dim in (8, 20, 128):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            acc = torch.randn(11, 2, 3, head_dim, generator=gen)
            # Views as they occur: rows of a longer accumulator, lse stored heads first, a partial inside a buffer.
            lse = (torch.randn(2, 3, 11, generator=gen) * 4).permute(2, 0, 1)
            out = torch.randn(7, 2, 2, 3, head_dim, generator=gen).to(dtype)[:, 1]
            out_lse = torch.randn(2, 7, 3, generator=gen).transpose(0, 1) * 4
            lse[2:4], out_lse[1:3], out[1:3] = -torch.inf, -torch.inf, 0.0
            acc[2:4] = 0.0
            lse[5], lse[6] = 1e4, -1e4
            expected, expected_lse = acc.clone(), lse.clone()
            merge_into_torch(expected[2:9], expected_lse[2:9], out, out_lse)
            merge_into_triton(acc[2:9], lse[2:9], out, out_lse)
            torch.testing.assert_close(acc, expected, rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=2e-6)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_fused_kernel_equals_torch_under_the_interpreter():
    run_interpreted(__file__)


if __name__ == "__main__":
    compare_fused_with_torch()
