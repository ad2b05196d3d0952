"""The error bound of quantized values."""

import torch
from torch import Tensor

from megatron_longctx.lowbit.quantize import SMALLEST_STEP, QuantFormat, _ends, _grouped, _half_step


@torch.no_grad()
def error_bound(x: Tensor, chunk: int, form: QuantFormat) -> Tensor:
    """Return the largest error of each element of `x` after quantizing and dequantizing in fp32, `[N]` fp32.

    It is half a step of its group plus rounding errors of fp32, and NaN in groups with an infinity or a NaN.
    """
    num_chunks = -(-x.numel() // chunk)
    ends = _ends(*_grouped(x, num_chunks, chunk, form), form)
    half_step = _half_step(ends, form)
    largest = torch.maximum(ends[0].abs(), ends[-1].abs())
    bound = half_step * (1 + 2.0**-11) + largest * 2.0**-22 + 2 * form.levels * SMALLEST_STEP
    return bound.unsqueeze(-1).expand(-1, -1, form.group_size).flatten(1)[:, :chunk].flatten()[: x.numel()]
