"""What sharded attention is compared with: dense attention written out, and sequences cut and joined by a layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import AttentionKernel
from ..layout import Layout

RESULTS = ("out", "dq", "dk", "dv")
"""What the functions here return, by name."""


def random_qkv(
    length: int, b: int, h: int, g: int, d: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and the gradient of the output for a whole sequence, alike in every process that asks."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(length, b, heads, d, generator=generator, dtype=torch.float32).to(device, dtype)

    return draw(h), draw(g), draw(g), draw(h)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    causal: bool,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """out, dq, dk, dv of attention over a whole sequence by plain matrix products in `dtype`.

    Computed one query head at a time, so that memory holds a few score matrices of one head only.

    Args:
        q, grad_out: `[S, b, h, d]`.
        k, v: `[S, b, g, d]`.
    """
    length, _, h, d = q.shape
    groups = h // k.shape[2]
    scale = d**-0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (q, k, v))
    visible = torch.ones(length, length, dtype=torch.bool, device=q.device)
    visible = visible.tril() if causal else visible
    for head in range(h if length else 0):
        kv_head = head // groups
        leaves = [
            x.to(dtype).transpose(0, 1).requires_grad_() for x in (q[:, :, head], k[:, :, kv_head], v[:, :, kv_head])
        ]
        q_bsd, k_btd, v_btd = leaves
        with torch.enable_grad():
            scores = (q_bsd @ k_btd.mT * scale).masked_fill(~visible, -torch.inf)
            out_bsd = scores.softmax(-1) @ v_btd
        grads = torch.autograd.grad(out_bsd, leaves, grad_out[:, :, head].to(dtype).transpose(0, 1))
        out[:, :, head] = out_bsd.detach().transpose(0, 1)
        dq[:, :, head] = grads[0].transpose(0, 1)
        dk[:, :, kv_head] += grads[1].transpose(0, 1)
        dv[:, :, kv_head] += grads[2].transpose(0, 1)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def kernel_attention(
    kernel: AttentionKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    causal: bool,
    scale: float | None = None,
) -> dict[str, Tensor]:
    """The same by one call of `kernel` over the whole sequence: the error that sharding is measured by."""
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, lse = kernel.forward(q, k, v, causal=causal, scale=scale)
    dq, dk, dv = kernel.backward(grad_out, q, k, v, out, lse, causal=causal, scale=scale)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def shard(x: Tensor, layout: Layout, rank: int) -> Tensor:
    """The rows (tokens) of `x` that `rank` holds, in slot order."""
    return x[torch.tensor(list(layout.tokens(rank)), dtype=torch.long, device=x.device)]


def unshard(shards: Sequence[Tensor], layout: Layout) -> Tensor:
    """The whole sequence from what every rank holds."""
    order = torch.tensor([token for rank in range(layout.n) for token in layout.tokens(rank)], dtype=torch.long)
    whole = torch.cat(list(shards))
    return torch.empty_like(whole).index_copy_(0, order.to(whole.device), whole)
