"""Quantized messages: the error bound, what is not finite, sizes, and the fused kernels under Triton's interpreter."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.lowbit import quantize as plain
from megatron_longctx.lowbit.quantize import (
    QuantFormat,
    dequantize,
    error_bound,
    quantize,
    requantize_sum,
    sum_quantized,
)
from tests.kernels.interpreter import run_interpreted

FORMS = [
    QuantFormat(bits, group_size, symmetric, range_dtype)
    for bits, group_size, symmetric, range_dtype in itertools.product(
        (4, 8), (32, 64, 128), (False, True), (torch.bfloat16, torch.float32)
    )
]
FORMS_BY_KERNEL = [form for form in FORMS if form.group_size != 64]
LARGEST = torch.finfo(torch.bfloat16).max
forms = st.sampled_from(FORMS)
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def values(kind: str, numel: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=gen)
    if kind == "outliers":  # a few a thousand times as large, as activations have them
        x *= torch.where(torch.rand(numel, generator=gen) < 0.02, 1000.0, 1.0)
    elif kind == "offset":
        x += 300
    elif kind == "exponents":  # everything that the dtype has room for
        low, high = (-133, 127) if dtype == torch.bfloat16 else (-24, 15) if dtype == torch.float16 else (-149, 127)
        x = torch.sign(x) * torch.exp2(torch.randint(low, high + 1, (numel,), generator=gen).double()).float()
    elif kind == "largest":
        x = torch.where(x > 0, 1.0, -1.0) * min(LARGEST, torch.finfo(dtype).max)
    return x.to(dtype)


def assert_same_messages(ours: torch.Tensor, theirs: torch.Tensor, chunk: int, form: QuantFormat) -> None:
    """All but the padding, which nobody writes or reads."""
    for mine, other in zip(form.split(ours, chunk), form.split(theirs, chunk), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


kinds = st.sampled_from(["normal", "outliers", "offset", "exponents", "largest"])


@settings(max_examples=150, deadline=None)
@given(forms, dtypes, kinds, st.integers(1, 700), st.integers(1, 5), st.integers(0, 2**31))
def test_every_element_is_within_its_bound(form, dtype, kind, numel, num_chunks, seed):
    chunk = -(-numel // num_chunks)
    x = values(kind, numel, seed, dtype)
    packed = quantize(x, num_chunks, chunk, form)
    assert packed.shape == (num_chunks, form.message_bytes(chunk)) and form.message_bytes(chunk) % 16 == 0
    back = dequantize(packed, chunk, form, torch.empty(numel))
    assert back.isfinite().all()
    assert ((back.double() - x.double()).abs() <= error_bound(x, chunk, form).double()).all()


@settings(max_examples=60, deadline=None)
@given(forms, dtypes, st.integers(1, 300), st.integers(1, 4), st.integers(0, 2**31))
def test_half_a_step_of_the_group_is_the_bound(form, dtype, numel, num_chunks, seed):
    """The bound itself, from each group's least and largest element."""
    chunk = -(-numel // num_chunks)
    x = values("normal", numel, seed, dtype)
    bound = error_bound(x, chunk, form)
    for start in range(0, numel, chunk):
        for first in range(start, min(start + chunk, numel), form.group_size):
            group = slice(first, min(first + form.group_size, start + chunk, numel))
            low, high = (float(f(x[group].float())) for f in (torch.min, torch.max))
            if form.symmetric:
                high = max(-low, high)
                low = -high
            half_step = (high - low) / (2**form.bits - (2 if form.symmetric else 1)) / 2
            # bf16 ends of fp32 and fp16 values are rounded outward, by less than 2**-7 of them each
            outward = 0 if dtype == form.range_dtype or form.range_dtype == torch.float32 else 2.0**-7
            widest = half_step + (abs(low) + abs(high)) * outward / (2**form.bits - 2)
            assert (bound[group] >= half_step * 0.999).all()
            assert (bound[group] <= widest * 1.01 + 1e-5).all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_comes_back_exactly(form):
    """Groups of one value, the ends of ranges, and, if symmetric, zero."""
    g = form.group_size
    x = torch.cat([torch.full((g,), -7.3), torch.zeros(g), torch.full((g,), LARGEST), torch.randn(g)]).bfloat16()
    if form.symmetric:
        x[3 * g] = 0.0
    back = dequantize(quantize(x, 1, 4 * g, form), 4 * g, form, torch.empty_like(x))
    tight = {"rtol": 1e-6, "atol": 0.0}
    torch.testing.assert_close(back[: 3 * g].float(), x[: 3 * g].float(), **tight)
    last, last_back = x[3 * g :].float(), back[3 * g :].float()
    if form.symmetric:
        assert last_back[0] == 0
        at = last.abs().argmax()
        torch.testing.assert_close(last_back[at], last[at], **tight)
    else:
        for at in (last.argmin(), last.argmax()):
            torch.testing.assert_close(last_back[at], last[at], **tight)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("what", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_group_nan_and_no_other(form, what):
    g = form.group_size
    x = torch.randn(5 * g - 3)
    x[g + 5] = what
    x[-1] = what  # in the ragged group
    back = dequantize(quantize(x, 2, 3 * g, form), 3 * g, form, torch.empty_like(x))
    broken = torch.zeros(5 * g - 3, dtype=torch.bool)
    broken[g : 2 * g] = broken[4 * g :] = True
    assert torch.equal(back.isnan(), broken)
    assert torch.equal(error_bound(x, 3 * g, form).isnan(), broken)
    assert not back.isinf().any()


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_sum_beyond_the_range_is_nan_not_a_wrong_number(symmetric):
    form = QuantFormat(4, 32, symmetric)
    x = torch.full((64,), LARGEST).bfloat16()
    x[32:] = 1.0
    packed = quantize(x, 1, 64, form).repeat(3, 1)
    back = dequantize(requantize_sum(packed, 64, form, form)[None], 64, form, torch.empty(64))
    assert back[:32].isnan().all()
    torch.testing.assert_close(back[32:], torch.full((32,), 3.0))


@settings(max_examples=60, deadline=None)
@given(forms, st.sampled_from([4, 8]), dtypes, kinds, st.integers(0, 400), st.integers(1, 8), st.integers(0, 2**31))
def test_sums_are_within_the_sum_of_bounds(form, to_bits, dtype, kind, chunk, ranks, seed):
    if kind == "largest":
        kind = "normal"
    xs = [values(kind, chunk, seed + rank, dtype) for rank in range(ranks)]
    if kind == "exponents":
        xs = [x / 16 for x in xs]  # room for the sum
    packed = torch.cat([quantize(x, 1, chunk, form) for x in xs])
    exact = torch.stack(xs).double().sum(0)
    total = sum_quantized(packed, chunk, form, torch.empty(chunk))
    assert total.shape == (chunk,)
    if not chunk:
        assert requantize_sum(packed, 0, form, form).numel() == 0
        return
    bounds = torch.stack([error_bound(x, chunk, form) for x in xs]).double().sum(0)
    bounds += torch.stack(xs).double().abs().sum(0) * ranks * 2**-23
    assert ((total - exact).abs() <= bounds).all()
    to = QuantFormat(to_bits, form.group_size, form.symmetric, form.range_dtype)
    again = requantize_sum(packed, chunk, form, to)
    back = dequantize(again[None], chunk, to, torch.empty(chunk))
    assert ((back - exact).abs() <= bounds + error_bound(total, chunk, to)).all()
    assert_same_messages(again[None], quantize(total, 1, chunk, to), chunk, to)  # rounded once, by quantizing it


def test_finer_formats_err_less():
    def error(form, kind="outliers"):
        x = values(kind, 8192, 0, torch.float32)
        back = dequantize(quantize(x, 1, 8192, form), 8192, form, torch.empty(8192))
        return float((back - x).norm() / x.norm())

    for group_size in (32, 64, 128):
        assert error(QuantFormat(8, group_size)) < error(QuantFormat(4, group_size)) / 6
        assert error(QuantFormat(4, group_size), "normal") < error(QuantFormat(4, group_size, True), "normal")
    assert error(QuantFormat(4, 32)) < error(QuantFormat(4, 64)) < error(QuantFormat(4, 128))


def test_message_sizes():
    """Per 128 bf16 values (256 bytes): 64 or 128 of values, 4 or 2 of ends."""
    for form, each in ((QuantFormat(8), 132), (QuantFormat(4), 68), (QuantFormat(4, symmetric=True), 66)):
        assert form.message_bytes(128 * 1600) == 1600 * each
    assert QuantFormat(4, 32, range_dtype=torch.float32).message_bytes(33) == 48  # 2 groups of 16 + 8 bytes
    assert QuantFormat().message_bytes(0) == 0


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"bits=6: expected one of 4, 8"):
        QuantFormat(bits=6)
    with pytest.raises(ValueError, match=r"group_size=48: expected one of 32, 64, 128"):
        QuantFormat(group_size=48)
    with pytest.raises(ValueError, match=r"range_dtype=torch.float16: expected one of"):
        QuantFormat(range_dtype=torch.float16)
    form = QuantFormat()
    for x in (torch.ones(4, 4), torch.ones(8)[::2], torch.ones(4).double(), torch.ones(11)):
        with pytest.raises(ValueError, match="expected one contiguous dimension of at most 2 x 5"):
            quantize(x, 2, 5, form)
    packed = quantize(torch.ones(10), 2, 5, form)
    with pytest.raises(ValueError, match=r"expected contiguous rows of 144 bytes"):
        dequantize(packed[:, 1:], 5, form, torch.empty(10))
    with pytest.raises(ValueError, match="other bits at most"):
        requantize_sum(packed, 5, form, QuantFormat(4, 64))


def compare_fused_with_torch() -> None:
    """Run in a process of its own, whose environment switches Triton's interpreter on."""
    from megatron_longctx.lowbit import quantize_triton as fused

    compared = 0
    sizes = [(1, 40, 40), (3, 300, 813), (2, 128, 256), (4, 64, 70)]  # the last has chunks without elements
    for form, (num_chunks, chunk, numel) in itertools.product(FORMS_BY_KERNEL, sizes):
        seed = compared % 3  # by turns: every form and every size meets every dtype
        dtype = (torch.bfloat16, torch.float16, torch.float32)[seed]
        x = values(("outliers", "offset", "exponents")[(seed + num_chunks) % 3], numel, seed, dtype)
        x[numel // 2] = (torch.nan, torch.inf, 0.0)[seed]
        packed = quantize(x, num_chunks, chunk, form)
        ours = torch.empty_like(packed)
        fused.quantize(x, chunk, form, ours)
        assert_same_messages(ours, packed, chunk, form)
        out, expected = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        fused.dequantize(packed, chunk, form, out)
        plain._dequantize_torch(packed, chunk, form, expected)
        # The interpreter cuts bf16 off where GPUs round it.
        close = {"rtol": 2**-7 if dtype == torch.bfloat16 else 0, "atol": 0, "equal_nan": True}
        torch.testing.assert_close(out, expected, **close)
        total, expected = torch.empty(chunk, dtype=dtype), torch.empty(chunk, dtype=dtype)
        fused.sum_quantized(packed, chunk, form, total)
        plain._sum_torch(packed, chunk, form, expected)
        torch.testing.assert_close(total, expected, **close)
        to = QuantFormat(12 - form.bits, form.group_size, form.symmetric, form.range_dtype)
        summed = torch.zeros(1, to.message_bytes(chunk), dtype=torch.uint8)
        fused.requantize_sum(packed, chunk, (form, to), summed)
        reference = requantize_sum(packed, chunk, form, to)[None]
        assert_same_messages(summed, reference, chunk, to)
        compared += 1
    assert compared == len(FORMS_BY_KERNEL) * len(sizes)


def test_fused_kernels_equal_torch_under_the_interpreter():
    run_interpreted(__file__)


if __name__ == "__main__":
    compare_fused_with_torch()
