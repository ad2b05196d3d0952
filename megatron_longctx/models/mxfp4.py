"""Weights of 4 bits as gpt-oss is published: blocks of 32 numbers with a power of two each.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3; `NAME_blocks` has two numbers a byte, the first in its low
bits, `NAME_scales` the exponents plus 127. The tensor NAME is their transpose, `[experts, in, out]`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
_HALF = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_HALF, *(-value for value in _HALF)], dtype=torch.bfloat16)


def shape_of(blocks: Sequence[int]) -> tuple[int, ...]:
    """Of the tensor, by that of its blocks, `[experts, out, in / 32, 16]`."""
    experts, rows, groups, half = blocks
    return experts, groups * half * 2, rows


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """`[experts, in, out]` in bf16, which holds every such number exactly.

    Args:
        blocks: bytes, `[experts, out, in / 32, 16]`.
        scales: bytes, `[experts, out, in / 32]`.
    """
    numbers = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    values = torch.ldexp(_VALUES[numbers.int()], scales.int()[..., None] - 127)
    return values.flatten(-2).transpose(1, 2).contiguous()
