"""Quantized messages: error bounds, non-finite values, sizes, and the fused kernels in the interpreter and on GPUs."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_longctx.lowbit import quantize as plain
from megatron_longctx.lowbit.quantize import QuantFormat, dequantize, quantize, requantize_sum, sum_quantized
from tests.core.kernels.interpreter import hopper_code
from tests.lowbit.bounds import error_bound

FORMS = [
    QuantFormat(bits, group_size, symmetric, range_dtype)
    for bits, group_size, symmetric, range_dtype in itertools.product(
        (4, 8), (32, 64, 128), (False, True), (torch.bfloat16, torch.float32)
    )
]
KERNEL_FORMS = [form for form in FORMS if form.group_size != 64]
LARGEST = torch.finfo(torch.bfloat16).max
forms = st.sampled_from(FORMS)
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


def values(kind: str, numel: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=gen)
    if kind == "outliers":  # like those of activations
        x *= torch.where(torch.rand(numel, generator=gen) < 0.02, 1000.0, 1.0)
    elif kind == "offset":
        x += 300
    elif kind == "exponents":  # the full range of the dtype
        low, high = (-133, 127) if dtype == torch.bfloat16 else (-24, 15) if dtype == torch.float16 else (-149, 127)
        x = torch.sign(x) * torch.exp2(torch.randint(low, high + 1, (numel,), generator=gen).double()).float()
    elif kind == "largest":
        x = torch.where(x > 0, 1.0, -1.0) * min(LARGEST, torch.finfo(dtype).max)
    return x.to(dtype)


def assert_same_messages(ours: torch.Tensor, theirs: torch.Tensor, chunk: int, form: QuantFormat) -> None:
    """Compare messages except their padding, which is neither written nor read."""
    for mine, other in zip(form.split(ours, chunk), form.split(theirs, chunk), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


kinds = st.sampled_from(["normal", "outliers", "offset", "exponents", "largest"])


@settings(max_examples=150, deadline=None)
@given(forms, dtypes, kinds, st.integers(1, 700), st.integers(1, 5), st.integers(0, 2**31))
def test_errors_are_within_the_bound(form, dtype, kind, numel, num_chunks, seed):
    chunk = -(-numel // num_chunks)
    x = values(kind, numel, seed, dtype)
    packed = quantize(x, num_chunks, chunk, form)
    assert packed.shape == (num_chunks, form.message_bytes(chunk)) and form.message_bytes(chunk) % 16 == 0
    back = dequantize(packed, chunk, form, torch.empty(numel))
    assert back.isfinite().all()
    assert ((back.double() - x.double()).abs() <= error_bound(x, chunk, form).double()).all()


@settings(max_examples=60, deadline=None)
@given(forms, dtypes, st.integers(1, 300), st.integers(1, 4), st.integers(0, 2**31))
def test_the_bound_is_half_a_step_of_the_group(form, dtype, numel, num_chunks, seed):
    """Compute the bound from the smallest and the largest element of each group."""
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
def test_values_that_are_restored_exactly(form):
    """Groups of a single value, the ends of ranges and, if symmetric, zero."""
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
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_non_finite_value_makes_its_group_nan_and_no_other(form, value):
    g = form.group_size
    x = torch.randn(5 * g - 3)
    x[g + 5] = value
    x[-1] = value  # in the incomplete last group
    back = dequantize(quantize(x, 2, 3 * g, form), 3 * g, form, torch.empty_like(x))
    broken = torch.zeros(5 * g - 3, dtype=torch.bool)
    broken[g : 2 * g] = broken[4 * g :] = True
    assert torch.equal(back.isnan(), broken)
    assert torch.equal(error_bound(x, 3 * g, form).isnan(), broken)
    assert not back.isinf().any()


@pytest.mark.parametrize("symmetric", [False, True])
def test_a_sum_that_overflows_is_nan(symmetric):
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


def test_unsuitable_arguments_are_refused():
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
    with pytest.raises(ValueError, match="the same with other bits"):
        requantize_sum(packed, 5, form, QuantFormat(4, 64))


def compare_fused_with_torch() -> None:
    """Runs in a separate process whose environment enables Triton's interpreter."""
    from megatron_longctx.lowbit import quantize_triton as fused

    compared = 0
    sizes = [(1, 40, 40), (3, 300, 813), (2, 128, 256), (4, 64, 70)]  # the last has chunks without elements
    for form, (num_chunks, chunk, numel) in itertools.product(KERNEL_FORMS, sizes):
        seed = compared % 3  # combines every format and every size with every dtype
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
        # The interpreter truncates bf16, which GPUs round.
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
    assert compared == len(KERNEL_FORMS) * len(sizes)


@pytest.mark.parametrize(("bits", "symmetric", "short"), [(4, False, True), (8, True, False)])
def test_kernels_compile_for_hopper(bits: int, symmetric: bool, short: bool) -> None:
    """Triton's interpreter accepts more than its compiler."""
    pytest.importorskip("triton")
    from megatron_longctx.lowbit import quantize_triton as fused

    constants = {"BITS": bits, "SYMMETRIC": symmetric, "SHORT": short, "HALF": 64, "ROWS": 16}
    pointers = {"x": "*bf16", "out": "*bf16", "values": "*u8", "to_values": "*u8"}
    pointers |= dict.fromkeys(("ends", "to_ends"), "*i16" if short else "*fp32")
    for kernel in (fused._quantize_kernel, fused._unpack_kernel, fused._requantize_kernel):
        hopper_code(kernel, {**constants, "TO_BITS": 8}, pointers)


@pytest.mark.gpu
@pytest.mark.parametrize("form", KERNEL_FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_equal_torch_on_a_gpu(form: QuantFormat, dtype: torch.dtype) -> None:
    """Compare up to one step: fused multiplications may round a value half way between two steps differently."""
    for num_chunks, chunk, numel in ((1, 40, 40), (3, 300, 813), (4, 4096, 16384), (4, 64, 70)):
        gen = torch.Generator().manual_seed(numel)
        x = (torch.randn(numel, generator=gen) * torch.where(torch.rand(numel, generator=gen) < 0.02, 100, 1)).to(dtype)
        x[numel // 2] = torch.nan
        broken = error_bound(x, chunk, form).isnan()
        packed = quantize(x.cuda(), num_chunks, chunk, form)
        on_host = quantize(x, num_chunks, chunk, form)
        for mine, theirs in zip(form.split(packed.cpu(), chunk)[1:], form.split(on_host, chunk)[1:], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        back = dequantize(packed, chunk, form, torch.empty(numel, device="cuda")).cpu()
        assert torch.equal(back.isnan(), broken)
        assert ((back - x.float()).abs() <= error_bound(x, chunk, form))[~broken].all()
        total, host_total = torch.empty(chunk, device="cuda"), torch.empty(chunk)
        sum_quantized(packed, chunk, form, total)
        sum_quantized(packed.cpu(), chunk, form, host_total)
        # A small sum of large values has their rounding errors, which differ if multiplications are fused.
        rounding = 4 * 2.0**-23 * float(x.float().nan_to_num().abs().max())
        torch.testing.assert_close(total.cpu(), host_total, rtol=1e-5, atol=rounding, equal_nan=True)
        again = requantize_sum(packed, chunk, form, form)
        twice = dequantize(again[None], chunk, form, torch.empty(chunk, device="cuda")).cpu()
        allowed = error_bound(host_total, chunk, form) * 1.001 + host_total.abs() * 1e-5
        assert ((twice - host_total).abs() <= allowed)[~host_total.isnan() & ~allowed.isnan()].all()


if __name__ == "__main__":
    compare_fused_with_torch()
