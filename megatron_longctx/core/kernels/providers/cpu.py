"""ATen's fused attention for CPU: about 8 times faster than matrix products, in a fraction of the memory.

As of torch 2.11 and 2.13, it supports fp64, fp32, bf16 and fp16, and fewer KV heads natively both ways. Its natural-log
lse `(b, h, s)` is stored as `[b, s, h]`, in fp64 for fp64 inputs and else fp32. Repeated runs agree bit for bit.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ...plans.kernel_calls import KernelSupport
from ..interface import (
    AttentionKernel,
    BlockInputs,
    KernelRequest,
    heads_first,
    token_first,
    wrong_device,
    wrong_dtype,
    wrong_value_dim,
)
from .reference import ReferenceKernel, hidden_keys


class CpuKernel(AttentionKernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu` and its backward, with a mask for bands other than full and
    causal squares."""

    name: ClassVar[str] = "cpu"
    speed: ClassVar[dict[str, int]] = {"cpu": 20}
    takes: KernelSupport = KernelSupport(windows=True, bands=True)

    def why_not(self, request: KernelRequest) -> str | None:
        return (
            wrong_device(request, "cpu")
            or wrong_dtype(request, torch.float64, torch.float32, torch.bfloat16, torch.float16)
            or wrong_value_dim(request)
        )

    def _forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        # The op aligns unequal lengths at the top left and gives rows without keys an lse of 0, not -inf. Neither
        # happens here: causal blocks are square, others get a mask, and every query of a call sees some key.
        causal, mask = _mask(inputs)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *map(heads_first, inputs[:3]), 0.0, causal, attn_mask=mask, scale=inputs.scale
        )
        out, lse = token_first(out), lse.permute(2, 0, 1)
        # The op also gives an lse of 0 to rows in which it finds no score, e.g. those whose few scores are all NaN.
        if (lse == 0).any():
            broken = ReferenceKernel()._forward(inputs)[1].isnan()
            out, lse = out.masked_fill(broken.unsqueeze(-1), torch.nan), lse.masked_fill(broken, torch.nan)
        return out, lse

    def _backward(self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        causal, mask = _mask(inputs)
        tensors = (grad_out, inputs.q, inputs.k, inputs.v, out)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(heads_first, tensors),
            lse.permute(1, 0, 2).contiguous().permute(0, 2, 1),  # the layout in which the forward op stores it
            0.0, causal, attn_mask=mask, scale=inputs.scale,
        )  # fmt: skip
        return token_first(dq), token_first(dk), token_first(dv)


def _mask(inputs: BlockInputs) -> tuple[bool, Tensor | None]:
    """Return whether the call is a causal square; if not, the mask to add to the scores, in q's dtype, if any."""
    queries, keys = inputs.q.shape[0], inputs.k.shape[0]
    if inputs.call.causal and queries == keys:
        return True, None
    hidden = hidden_keys(inputs, slice(0, queries), slice(0, keys))
    if hidden is None:
        return False, None
    return False, torch.zeros(hidden.shape, dtype=inputs.q.dtype).masked_fill_(hidden, -torch.inf)[None, None]
