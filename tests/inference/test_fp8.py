"""Products in FP8: their quantization and error, and the fused kernels under Triton's interpreter and on a GPU."""

import pytest
import torch

from megatron_longctx.inference import fp8
from megatron_longctx.inference.fp8 import Fp8Weight, product, quantize_rows

SHAPES = [(1, 64, 48), (3, 4112, 16), (5, 48, 32)]  # rows, inputs, outputs
DTYPES = (torch.bfloat16, torch.float32)


def rows_of(shape: tuple[int, ...], dtype: torch.dtype, special: bool = False) -> torch.Tensor:
    """Return rows of very different sizes; some are zeros or have an infinity or a NaN if `special`."""
    gen = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=gen) * torch.exp2(torch.randint(-14, 9, (shape[0], 1), generator=gen).float())
    if special and len(x) > 2:
        x[0], x[1, 3], x[2, 5] = 0, torch.inf, torch.nan
    return x.to(dtype)


def as_numbers(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().float()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_is_off_by_a_sixteenth_or_by_a_part_of_its_row(dtype: torch.dtype) -> None:
    x = rows_of((40, 512), dtype).float()
    values, scales = quantize_rows(x.to(dtype))
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (40, 1) and scales.dtype == torch.float32
    error, largest = (values.float() * scales - x).abs(), x.abs().amax(-1, keepdim=True)
    assert (error <= torch.maximum(x.abs() / 16, largest * 2.0**-18) * 1.001).all()
    assert torch.equal(values.float().abs().amax(-1), torch.full((40,), 448.0))


def test_broken_rows_stay_broken_and_zeros_stay_zeros() -> None:
    values, scales = quantize_rows(rows_of((4, 64), torch.bfloat16, special=True))
    restored = values.float() * scales
    assert (restored[0] == 0).all() and restored[1].isnan().any() and restored[2].isnan().any()
    assert restored[3].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_that_of_the_quantized_numbers(dtype: torch.dtype) -> None:
    x, weight = rows_of((6, 128), dtype).view(2, 3, 128), rows_of((48, 128), dtype)
    (xs, x_scales), (ws, w_scales) = quantize_rows(x.flatten(0, 1)), quantize_rows(weight)
    expected = (xs.float() * x_scales) @ (ws.float() * w_scales).t()
    found = product(x, Fp8Weight.of(weight))
    assert found.shape == (2, 3, 48) and found.dtype == dtype
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.flatten(0, 1).float(), expected, rtol=rtol, atol=float(expected.abs().max()) / 1e5)
    assert product(x[:0], Fp8Weight.of(weight)).shape == (0, 3, 48)
    assert torch.equal(product(x, weight), torch.nn.functional.linear(x, weight))


def test_sizes_that_fp8_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weights=fp8: expected exact for a product of size 24 x 32"):
        Fp8Weight.of(torch.ones(24, 32))


def compare(device: str) -> int:
    """Compare the fused kernels with plain PyTorch."""
    from megatron_longctx.inference import fp8_triton as fused

    compared = 0
    for (rows, inputs, outputs), dtype in ((shape, dtype) for shape in SHAPES for dtype in DTYPES):
        x = rows_of((rows, inputs), dtype, special=True)
        expected, expected_scales = fp8._quantize_torch(x)
        strided = torch.cat([x, x], 1).to(device)[:, :inputs]
        values, scales = fused.quantize_rows(strided)
        usable = expected_scales.isfinite().flatten()
        same = as_numbers(values) == as_numbers(expected)
        if device == "cpu":  # the interpreter loses the carry where a number is rounded up to a power of two
            same |= as_numbers(values) * 2 == as_numbers(expected)
        assert same[usable].all() and torch.equal(scales.cpu()[usable], expected_scales[usable])
        assert not scales.cpu().flatten()[~usable].isfinite().any()
        weight = Fp8Weight.of(rows_of((outputs, inputs), dtype))
        one = (quantize_rows(rows_of((1, inputs), dtype))[0].float() * 2**-7).to(dtype)  # numbers that stay as they are
        found = fused.vector_product(one.to(device), weight.values.to(device), weight.scales.to(device))
        exact = one.double() @ (weight.values.double() * weight.scales).t()
        rtol = 2**-7 if dtype == torch.bfloat16 else 1e-5  # the interpreter truncates bf16 where GPUs round it
        torch.testing.assert_close(found.cpu().double(), exact, rtol=rtol, atol=float(exact.abs().max()) / 1e5)
        plain = rows_of((outputs, inputs), dtype)
        found, exact = fused.vector_product(one.to(device), plain.to(device), None), one.double() @ plain.double().t()
        torch.testing.assert_close(found.cpu().double(), exact, rtol=rtol, atol=float(exact.abs().max()) / 1e5)
        compared += 1
    return compared


@pytest.mark.gpu
def test_fused_kernels_equal_torch_on_a_gpu() -> None:
    assert compare("cuda") == len(SHAPES) * len(DTYPES)


if __name__ == "__main__":
    assert compare("cpu") == len(SHAPES) * len(DTYPES) == 6
