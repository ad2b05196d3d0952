"""Attention by plain matrix products: the reference for tests, and the provider that always works.

It takes any float dtype. bf16 and fp16 are computed in fp32 and rounded once at the end; fp64 stays fp64, lse included.
"""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from ...plans.kernel_calls import KernelSupport
from ...plans.slices import FAR
from ..interface import (
    AttentionKernel,
    BlockInputs,
    KernelRequest,
    heads_first,
    sum_dtype,
    token_first,
    wrong_device,
    wrong_dtype,
)

# Elements of one chunk's score matrix: 64 MiB in fp32, so long blocks stream instead of allocating s*t scores.
_CHUNK_ELEMENTS = 1 << 24


class ReferenceKernel(AttentionKernel):
    """Dense softmax attention, streamed over chunks of queries."""

    name: ClassVar[str] = "reference"
    speed: ClassVar[dict[str, int]] = {"cuda": 10, "cpu": 10}
    takes: KernelSupport = KernelSupport(windows=True, bands=True)

    def why_not(self, request: KernelRequest) -> str | None:
        dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16
        return wrong_device(request, "cpu", "cuda") or wrong_dtype(request, *dtypes)

    def _forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        q, k, v = _grouped(inputs.q, inputs.k.shape[2]), _keys(inputs.k), _keys(inputs.v)
        out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1])
        for rows, cols in _chunks(inputs, q):
            scores = _scores(q[..., rows, :], k[..., cols, :], inputs, rows, cols)
            lse[..., rows] = torch.logsumexp(scores, dim=-1)
            probs = torch.exp(scores - lse[..., rows, None])
            out[..., rows, :] = _matmul(probs, v[..., cols, :])
        return _ungrouped(out).to(inputs.q.dtype), _ungrouped(lse.unsqueeze(-1)).squeeze(-1)

    def _backward(
        self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups = inputs.k.shape[2]
        q, k, v = _grouped(inputs.q, groups), _keys(inputs.k), _keys(inputs.v)
        do, lse_grouped = _grouped(grad_out, groups), _grouped(lse.unsqueeze(-1), groups)
        delta = (do * _grouped(out, groups)).sum(dim=-1, keepdim=True)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, cols in _chunks(inputs, q):
            scores = _scores(q[..., rows, :], k[..., cols, :], inputs, rows, cols)
            probs = torch.exp(scores - lse_grouped[..., rows, :])
            dprobs = _matmul(do[..., rows, :], v[..., cols, :].mT)
            dscores = probs * (dprobs - delta[..., rows, :]) * inputs.scale
            dq[..., rows, :] = _matmul(dscores, k[..., cols, :])
            dk[..., cols, :] += _sum_over_queries(dscores, q[..., rows, :])
            dv[..., cols, :] += _sum_over_queries(probs, do[..., rows, :])
        dk, dv = token_first(dk).contiguous(), token_first(dv).contiguous()
        dtype = inputs.q.dtype
        return _ungrouped(dq).to(dtype), dk.to(dtype), dv.to(dtype)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Convert `[s, b, h, d]` to `[b, g, h/g, s, d]` in the computing dtype: query heads beside their KV head."""
    return x.reshape(*x.shape[:2], groups, -1, x.shape[-1]).permute(1, 2, 3, 0, 4).to(sum_dtype(x.dtype)).contiguous()


def _ungrouped(x: Tensor) -> Tensor:
    """Convert back to `[s, b, h, d]`, in the computing dtype."""
    return x.permute(3, 0, 1, 2, 4).flatten(2, 3)


def _keys(x: Tensor) -> Tensor:
    """Convert `[t, b, g, d]` to `[b, g, t, d]` in the computing dtype."""
    return heads_first(x).to(sum_dtype(x.dtype)).contiguous()


def _chunks(inputs: BlockInputs, q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield (query rows, key columns) of each chunk, without columns that none of its queries sees."""
    queries, keys, call = q.shape[3], inputs.k.shape[0], inputs.call
    step = max(1, _CHUNK_ELEMENTS // (q.shape[0] * q.shape[1] * q.shape[2] * keys))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        first = 0 if call.left == FAR else max(0, start + keys - queries - call.left)
        last = keys if call.right == FAR else min(keys, stop + keys - queries + call.right)
        yield slice(start, stop), slice(first, max(first, last))


def _matmul(rows: Tensor, matrix: Tensor) -> Tensor:
    """Multiply `[b, g, r, c, x] @ [b, g, x, y]`, with the r query heads folded into rows to avoid copying `matrix`."""
    return torch.matmul(rows.flatten(2, 3), matrix).view(*rows.shape[:4], matrix.shape[-1])


def _sum_over_queries(weights: Tensor, rows: Tensor) -> Tensor:
    """Combine `[b, g, r, c, t]` and `[b, g, r, c, d]` to `[b, g, t, d]`: a sum over queries and a group's heads."""
    return torch.matmul(weights.flatten(2, 3).mT, rows.flatten(2, 3))


def _scores(q: Tensor, k: Tensor, inputs: BlockInputs, rows: slice, cols: slice) -> Tensor:
    """Return scaled scores `[b, g, r, c, t]` of some queries and keys, -inf where the call hides a key."""
    scores = _matmul(q, k.mT) * inputs.scale
    hidden = hidden_keys(inputs, rows, cols)
    return scores if hidden is None else scores.masked_fill_(hidden, -torch.inf)


def hidden_keys(inputs: BlockInputs, rows: slice, cols: slice) -> Tensor | None:
    """Return which keys some queries do not see, bool `[c, t]`; None if they see all."""
    call = inputs.call
    if call.full:
        return None
    ends = inputs.k.shape[0] - inputs.q.shape[0]
    query = torch.arange(rows.start, rows.stop, device=inputs.q.device)[:, None]
    key = torch.arange(cols.start, cols.stop, device=inputs.q.device)[None, :]
    behind = key - query - ends
    return (behind > call.right) | (behind < -call.left)
