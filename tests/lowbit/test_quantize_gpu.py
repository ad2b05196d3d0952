"""The fused quantizing kernels: compiled for a GPU (which takes none), and run on one."""

import itertools

import pytest
import torch

from megatron_longctx.lowbit.quantize import (
    QuantFormat,
    dequantize,
    error_bound,
    quantize,
    requantize_sum,
    sum_quantized,
)
from tests.kernels.interpreter import hopper_code

FORMS = [
    QuantFormat(bits, group_size, symmetric, ends)
    for bits, group_size, symmetric, ends in itertools.product(
        (4, 8), (32, 128), (False, True), (torch.bfloat16, torch.float32)
    )
]


@pytest.mark.parametrize(("bits", "symmetric", "short"), [(4, False, True), (8, True, False)])
def test_kernels_compile_for_hopper(bits: int, symmetric: bool, short: bool) -> None:
    """Triton's interpreter, which runs them on CPUs, takes more than its compiler does."""
    pytest.importorskip("triton")
    from megatron_longctx.lowbit import quantize_triton as fused

    constants = {"BITS": bits, "SYMMETRIC": symmetric, "SHORT": short, "HALF": 64, "ROWS": 16}
    pointers = {"x": "*bf16", "out": "*bf16", "values": "*u8", "to_values": "*u8"}
    pointers |= dict.fromkeys(("ends", "to_ends"), "*i16" if short else "*fp32")
    for kernel in (fused._quantize_kernel, fused._unpack_kernel, fused._requantize_kernel):
        hopper_code(kernel, {**constants, "TO_BITS": 8}, pointers)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernels_equal_torch_on_a_gpu(form: QuantFormat, dtype: torch.dtype) -> None:
    """Up to one step where a value lies half way between two, which fused multiplications may round the other way."""
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
        total = torch.empty(chunk, device="cuda")
        host_total = torch.empty(chunk)
        sum_quantized(packed, chunk, form, total)
        sum_quantized(packed.cpu(), chunk, form, host_total)
        # A small sum of large values carries their rounding, which differs where multiplications are fused.
        rounding = 4 * 2.0**-23 * float(x.float().nan_to_num().abs().max())
        torch.testing.assert_close(total.cpu(), host_total, rtol=1e-5, atol=rounding, equal_nan=True)
        again = requantize_sum(packed, chunk, form, form)
        twice = dequantize(again[None], chunk, form, torch.empty(chunk, device="cuda")).cpu()
        allowed = error_bound(host_total, chunk, form) * 1.001 + host_total.abs() * 1e-5
        assert ((twice - host_total).abs() <= allowed)[~host_total.isnan() & ~allowed.isnan()].all()
