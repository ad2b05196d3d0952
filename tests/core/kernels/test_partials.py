"""Several partials combined in one pass: values, gaps, and the fused kernel under Triton's interpreter."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_longctx.core.kernels import CopySum, Partial, merge_partials, sum_partials
from megatron_longctx.core.kernels import partials as partials_module
from megatron_longctx.core.plans.recording import MAX_PARTIALS

S, B, H, D = 9, 2, 4, 8


def partials(count, dtype=torch.float32, head_dim=D, seed=0):
    """Draw partials of all rows, the last rows, some heads and the middle, with the strides of kernels' results."""
    gen = torch.Generator().manual_seed(seed)
    found = []
    for start, stop, first, last in [(0, S, 0, H), (5, S, 0, H), (0, S, 1, 3), (2, 7, 2, H)][:count]:
        t, g = stop - start, last - first
        value = torch.randn(B, g, t, head_dim, generator=gen).to(dtype).permute(2, 0, 1, 3)
        lse = (torch.randn(B, g, t, generator=gen) * 3).permute(2, 0, 1)
        lse[0] = -torch.inf
        value[0] = 0
        found.append(Partial(start, first, value, lse))
    return found


def expected_merge(parts, head_dim=D):
    """Compute out and lse by their definition in fp64."""
    weights = torch.zeros(S, B, H, dtype=torch.float64)
    total = torch.zeros(S, B, H, head_dim, dtype=torch.float64)
    for part in parts:
        rows, heads = slice(part.start, part.stop), slice(part.first_head, part.last_head)
        weight = part.lse.double().exp()
        weights[rows, :, heads] += weight
        total[rows, :, heads] += weight[..., None] * part.value.double()
    return torch.where(weights[..., None] > 0, total / weights[..., None], 0.0), weights.log()


def expected_sum(parts, head_dim=D):
    total = torch.zeros(S, B, H, head_dim, dtype=torch.float64)
    for part in parts:
        total[part.start : part.stop, :, part.first_head : part.last_head] += part.value.double()
    return total


@pytest.mark.parametrize("count", range(MAX_PARTIALS + 1))
def test_partials_are_merged_and_summed(count):
    parts = partials(count)
    out, lse = torch.full((S, B, H, D), torch.nan), torch.full((S, B, H), torch.nan)
    merge_partials(parts, out, lse)
    wanted, wanted_lse = expected_merge(parts)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)
    total = torch.full((S, B, H, D), torch.nan)
    sum_partials(parts, total)
    torch.testing.assert_close(total.double(), expected_sum(parts), rtol=1e-6, atol=1e-6)


def test_the_result_may_overwrite_a_partial():
    parts = partials(3)
    wanted, wanted_lse = expected_merge(parts)
    merge_partials(parts, parts[0].value, parts[0].lse)
    torch.testing.assert_close(parts[0].value.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts[0].lse.double(), wanted_lse, rtol=1e-6, atol=1e-6)


def test_fp64_stays_fp64():
    parts = [part._replace(value=part.value.double(), lse=part.lse.double()) for part in partials(2)]
    out, lse = torch.empty(S, B, H, D, dtype=torch.float64), torch.empty(S, B, H, dtype=torch.float64)
    merge_partials(parts, out, lse)
    torch.testing.assert_close(out, expected_merge(parts)[0], rtol=1e-12, atol=1e-12)
    sum_partials(parts, out)
    torch.testing.assert_close(out, expected_sum(parts), rtol=1e-12, atol=1e-12)


def merged(*parts):
    """Merge constant partials, given as (value, lse), over all rows and heads."""
    out, lse = torch.full((S, B, H, D), torch.nan), torch.full((S, B, H), torch.nan)
    found = [torch.full_like(out, value) for value, _ in parts]
    sums = [torch.full_like(lse, number) for _, number in parts]
    merge_partials([Partial(0, 0, *each) for each in zip(found, sums, strict=True)], out, lse)
    assert out.unique().numel() == lse.unique().numel() == 1
    return float(out[0, 0, 0, 0]), float(lse[0, 0, 0])


NONE = -torch.inf


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([(0.0, NONE), (0.3, 1.5)], (0.3, 1.5)),
        ([(0.3, 1.5), (0.0, NONE), (0.0, NONE)], (0.3, 1.5)),
        ([(0.0, NONE), (0.0, NONE)], (0.0, NONE)),
        *([[(0.3, -far), (0.7, far), (0.0, NONE)], (0.7, far)] for far in (1e2, 1e4, 1e30)),
        *([[(0.3, far), (0.7, -far)], (0.3, far)] for far in (1e2, 1e4, 1e30)),
    ],
    ids=str,
)
def test_empty_partials_are_neutral_and_far_larger_ones_win(parts, wanted):
    assert merged(*parts) == pytest.approx(wanted, rel=1e-6)


SPANS = ((2, 5), (0, 4), (2, 5), (6, 1))
"""Of the rows of a sum of `S`, of which the last two have no copies."""


def copies(dtype, head_dim=D):
    """Draw copies of `SPANS`; return them with their sum by definition in fp64."""
    gen = torch.Generator().manual_seed(1)
    drawn = torch.randn(sum(tokens for _, tokens in SPANS), B, H, head_dim, generator=gen).to(dtype)
    wanted = torch.zeros(S, B, H, head_dim, dtype=torch.float64)
    for row, copy in zip((at + i for at, tokens in SPANS for i in range(tokens)), drawn.double(), strict=True):
        wanted[row] += copy
    return drawn, wanted


def test_copies_are_summed_in_more_precision():
    drawn, wanted = copies(torch.float64)
    CopySum(SPANS)(drawn, out := torch.full_like(wanted, torch.nan))
    torch.testing.assert_close(out, wanted, rtol=1e-15, atol=1e-15)
    drawn, wanted = copies(torch.bfloat16)
    CopySum(SPANS)(drawn, out := torch.full_like(wanted, torch.nan, dtype=torch.bfloat16))
    assert torch.equal(out, wanted.to(torch.bfloat16))


def test_results_without_rows():
    merge_partials([], torch.zeros(0, B, H, D), torch.zeros(0, B, H))
    sum_partials([], torch.zeros(0, B, H, D))


def test_too_many_partials_are_refused():
    with pytest.raises(AssertionError):
        sum_partials([*partials(4), partials(1)[0]], torch.empty(S, B, H, D))


def compare_fused_with_torch() -> None:
    """Run in a separate process, whose environment enables Triton's interpreter."""
    from megatron_longctx.core.kernels.partials_triton import combine_triton

    cases = itertools.product(range(MAX_PARTIALS + 1), (8, 20, 128), (torch.float32, torch.bfloat16, torch.float16))
    for count, head_dim, dtype in cases:
        parts = partials(count, dtype, head_dim, seed=count)
        # The layouts in use: one of two tensors packed row by row, lse with heads first in memory.
        out = torch.full((S, 2, B, H, head_dim), torch.nan)[:, 1]
        lse = torch.full((B, H, S), torch.nan).permute(2, 0, 1)
        combine_triton(parts, out, lse)
        wanted, wanted_lse = expected_merge(parts, head_dim)
        torch.testing.assert_close(out.double(), wanted, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(lse.double(), wanted_lse, rtol=2e-6, atol=2e-6)
        combine_triton(parts, out, None)
        torch.testing.assert_close(out.double(), expected_sum(parts, head_dim), rtol=2e-6, atol=2e-6)


def compare_sums_of_copies_with_torch() -> None:
    """As above."""
    from megatron_longctx.core.kernels.partials_triton import sum_copies_triton

    for head_dim, dtype in itertools.product((8, 20, 160), (torch.float32, torch.bfloat16)):
        drawn, wanted = copies(dtype, head_dim)  # 160 takes more than one program a row
        into = torch.full(wanted.shape, torch.nan)
        sum_copies_triton(drawn, *CopySum(SPANS).table(S), into)
        torch.testing.assert_close(into.double(), wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("tokens", "fused"), [(2**31 // 32 - 64, True), (2**31 // 32 - 63, False), (2**31 // 16, False)]
)
def test_the_fused_kernels_refuse_rows_beyond_32_bits(tokens, fused):
    """Including the last program's excess rows: an overflowed, negative number would pass for a row."""

    def on_gpu(dtype, *shape):
        return SimpleNamespace(shape=torch.Size(shape), dtype=dtype, is_cuda=True, stride=lambda _: 1)

    out = on_gpu(torch.float32, tokens, 1, 32, 8)
    part = SimpleNamespace(value=on_gpu(torch.bfloat16, 16, 1, 32, 8))
    assert partials_module._fusable([part], out) is fused


if __name__ == "__main__":
    compare_sums_of_copies_with_torch()
    compare_fused_with_torch()
