"""Matrix products in FP8 (E4M3): weights have a scale per output and are quantized once; tokens have one each, and are
quantized for every product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, linear, scaled_mm

from ..core.errors import refuse
from ..core.kernels.fused import load_fused

_fused = partial(load_fused, __name__, "FP8 quantization")

_LARGEST = 448.0
"""The largest E4M3 number."""
SMALLEST = 2.0**-100
"""Rows whose values are all smaller are quantized as if this were their largest value: its reciprocal is finite."""
_TWO_BYTES = torch.bfloat16, torch.float16
MULTIPLE = 16
"""What inputs and outputs of a product have to be multiples of, on GPUs."""


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row of `x` to E4M3, with a scale that maps its largest absolute value to 448.

    The scale of a row with an infinity or a NaN is no finite number.

    Args:
        x: `[rows, columns]`, bf16, fp16 or fp32; columns are adjacent.

    Returns:
        `[rows, columns]` float8_e4m3fn, and fp32 scales `[rows, 1]`; `values * scales` is about `x`.
    """
    kernels = _fused() if x.is_cuda else None
    return (kernels.quantize_rows if kernels else _quantize_torch)(x)


def _quantize_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    largest = x.abs().amax(-1, keepdim=True).float().clamp_min(SMALLEST)
    return (x * (_LARGEST / largest)).to(torch.float8_e4m3fn), largest * (1 / _LARGEST)


@dataclass(frozen=True)
class Fp8Weight:
    """The weight of a linear layer without its bias, `[outputs, inputs]`; call it to apply it.

    Attributes:
        values: `[outputs, inputs]`, float8_e4m3fn.
        scales: `[outputs, 1]`, fp32.
    """

    values: Tensor
    scales: Tensor
    requires_grad: bool = False

    @classmethod
    def of(cls, weight: Tensor) -> Fp8Weight:
        """Quantize a weight `[outputs, inputs]`. Raises ValueError: 16 does not divide both sizes."""
        if any(size % MULTIPLE for size in weight.shape):
            expected = f"exact for a product of size {' x '.join(map(str, weight.shape))}"
            raise refuse("inference.weights", "fp8", expected, f"FP8 needs multiples of {MULTIPLE}.")
        with torch.no_grad():
            return cls(*quantize_rows(weight.detach()))

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product of `x` `[..., inputs]`, as `[..., outputs]` in the dtype of x, which GPUs need in bf16."""
        rows = x.reshape(-1, x.shape[-1])
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        kernels = _fused() if x.is_cuda and len(rows) == 1 else None
        out: Tensor
        if kernels:
            out = kernels.vector_product(rows, self.values, self.scales)
        elif len(rows):
            values, scales = quantize_rows(rows)
            recipe = ScalingType.RowWise
            out = scaled_mm(values, self.values.t(), scales, recipe, self.scales.t(), recipe, output_dtype=x.dtype)
        else:
            out = x.new_empty(0, len(self.values))
        return out.view(*x.shape[:-1], len(self.values))


def product(x: Tensor, weight: Tensor | Fp8Weight) -> Tensor:
    """Return the product of `x` with a linear layer's weight.

    A single row on GPUs has a kernel of its own: one of two H200s reads its half of Llama 3 8B in 2.11 ms, by cuBLAS in
    2.37 ms (analysis/results/decode_kernels_h200_x2.md).
    """
    if isinstance(weight, Fp8Weight):
        return weight(x)
    is_row = x.is_cuda and x.numel() == x.shape[-1] > 0 and x.dtype == weight.dtype in _TWO_BYTES
    kernels = _fused() if is_row and x.is_contiguous() and weight.is_contiguous() else None
    if kernels is None:
        return linear(x, weight)
    out: Tensor = kernels.vector_product(x.view(1, -1), weight, None)
    return out.view(*x.shape[:-1], len(weight))
