"""What other packages take: bf16, `[b, s, heads, d]`, and equal parts of the sequence."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ..layout import Layout, build_layout
from .attention import Case


def batch_first(x: Tensor) -> Tensor:
    """`[s, b, heads, d]` to `[b, s, heads, d]`: a view of ours for a batch of one."""
    return x.transpose(0, 1).contiguous()


def whole_parts(group: dist.ProcessGroup, layout: str, case: Case) -> Layout:
    """Equal parts of the sequence, two a rank in zigzag.

    Raises:
        ValueError: the length does not divide, or numbers are not bf16. In fp32 ring-flash-attn 0.1.8
            adds up in the very buffers that its next kernel call overwrites, and gives wrong gradients (seen);
            TransformerEngine refuses it.
    """
    if case.element_bytes != 2:
        raise ValueError("fp32: expected bf16")
    n = dist.get_world_size(group)
    parts = 2 * n if layout == "zigzag" else n
    if case.length % parts:
        raise ValueError(f"{case.length} tokens: expected a multiple of {parts}")
    return build_layout(layout, n, case.length)
