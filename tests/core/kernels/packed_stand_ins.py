"""Stand-ins for FlashAttention's functions without a GPU: the same parameters and results."""

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_longctx.core.kernels.interface import BlockInputs, sum_dtype
from megatron_longctx.core.kernels.packed import PackedKernel, Segments
from megatron_longctx.core.kernels.providers.reference import ReferenceKernel
from megatron_longctx.core.plans import KernelCall, Segment
from megatron_longctx.core.plans.slices import FAR

Bounds = tuple[int, int]
"""(left, right) of a window; FAR for no bound."""
PLAIN = ReferenceKernel()


def _segments(q: Tensor, k: Tensor, starts: tuple[Tensor, Tensor] | None) -> Iterator[tuple[slice, slice]]:
    if starts is None:
        yield slice(0, q.shape[0]), slice(0, k.shape[0])
        return
    q_starts, k_starts = (each.tolist() for each in starts)
    assert (q_starts[0], k_starts[0], q_starts[-1], k_starts[-1]) == (0, 0, q.shape[0], k.shape[0])
    yield from zip(
        (slice(*each) for each in pairwise(q_starts)), (slice(*each) for each in pairwise(k_starts)), strict=True
    )


def _call(q: Tensor, k: Tensor, bounds: Bounds) -> KernelCall:
    return KernelCall((Segment(0, len(q), 0, len(k)),), *bounds)


def forward(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor] | None, bounds: Bounds, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out and lse `[b, h, s]` of `[b, s, h, d]`, or `[h, s]` of packed `[s, h, d]`; NaN without keys."""
    if starts is None:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    else:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
    out, lse = (
        q.new_full((*q.shape[:3], v.shape[-1]), torch.nan),
        q.new_full(q.shape[:3], torch.nan, dtype=sum_dtype(q.dtype)),
    )
    for rows, columns in _segments(q, k, starts):
        if rows.stop > rows.start and columns.stop > columns.start:
            call = _call(q[rows], k[columns], bounds)
            out[rows], lse[rows] = PLAIN.forward(q[rows], k[columns], v[columns], call, scale=scale)
    if starts is None:
        return out.transpose(0, 1), lse.permute(1, 2, 0).contiguous()
    return out[:, 0], lse[:, 0].mT.contiguous()


def backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    starts: tuple[Tensor, Tensor] | None, bounds: Bounds, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert lse.is_contiguous()
    if starts is None:
        grad_out, q, k, v, out = (x.transpose(0, 1) for x in (grad_out, q, k, v, out))
        lse = lse.permute(2, 0, 1)
    else:
        grad_out, q, k, v, out = (x.unsqueeze(1) for x in (grad_out, q, k, v, out))
        lse = lse.mT.unsqueeze(1)
    grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    for rows, columns in _segments(q, k, starts):
        if rows.stop > rows.start and columns.stop > columns.start:
            of = grad_out[rows], q[rows], k[columns], v[columns], out[rows], lse[rows]
            found = PLAIN.backward(*of, _call(q[rows], k[columns], bounds), scale=scale)
            for grad, where, part in zip(grads, (rows, columns, columns), found, strict=True):
                grad[where] = part
    return tuple(x.transpose(0, 1) if starts is None else x[:, 0] for x in grads)


class RowsKernel(PackedKernel):
    """A provider of packed segments that runs on CPU. It has no name, so it cannot be chosen."""

    def why_not(self, request: Any) -> None:
        return None

    def _forward_rows(self, inputs: BlockInputs, packed: Segments | None) -> tuple[Tensor, Tensor]:
        starts = None if packed is None else (packed.q_starts, packed.k_starts)
        bounds = inputs.call.left, inputs.call.right
        return forward(inputs.q, inputs.k, inputs.v, starts, bounds, inputs.scale)

    def _backward_rows(
        self, inputs: BlockInputs, packed: Segments | None, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        starts = None if packed is None else (packed.q_starts, packed.k_starts)
        bounds = inputs.call.left, inputs.call.right
        return backward(grad_out, inputs.q, inputs.k, inputs.v, out, lse, starts, bounds, inputs.scale)


def _starts(q_starts: Tensor | None, k_starts: Tensor | None, most: tuple[Any, Any]) -> tuple[Tensor, Tensor] | None:
    if q_starts is None or k_starts is None:
        return None
    assert q_starts.dtype == k_starts.dtype == torch.int32
    sizes = zip(q_starts.diff().tolist(), k_starts.diff().tolist(), strict=True)
    queries, keys = zip(*((s, t) for s, t in sizes if s and t), strict=True)
    assert most[0] == max(queries) and most[1] >= max(keys)
    return q_starts, k_starts


def fa4(seen: list[bool]) -> SimpleNamespace:
    """Return a `flash_attn.cute.interface`. seen: receives whether each backward is deterministic."""

    def bounds(causal: bool, left: int | None, right: int | None) -> Bounds:
        assert not causal or left is right is None
        return FAR if left is None else left, 0 if causal else FAR if right is None else right

    def _flash_attn_fwd(
        q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale,
        causal=False, window_size_left=None, window_size_right=None, return_lse,
    ):  # fmt: skip
        assert return_lse
        starts = _starts(cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
        return forward(q, k, v, starts, bounds(causal, window_size_left, window_size_right), softmax_scale)

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, *, softmax_scale, causal=False, window_size_left=None, window_size_right=None,
        cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic,
    ):  # fmt: skip
        seen.append(deterministic)
        starts = _starts(cu_seqlens_q, cu_seqlens_k, (max_seqlen_q, max_seqlen_k))
        window = bounds(causal, window_size_left, window_size_right)
        return backward(dout, q, k, v, out, lse, starts, window, softmax_scale)

    return SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd)


def aten_flash(seen: list[bool]) -> SimpleNamespace:
    """Return the FlashAttention-2 functions of `torch.ops.aten`."""

    def bounds(causal: bool, left: int, right: int, keys: int) -> Bounds:
        """Interpret bounds as FlashAttention-2 does: a missing bound beside another one becomes the most keys."""
        assert not causal or left == right == -1
        left, right = (-1 if bound >= keys else bound for bound in (left, right))
        if (left < 0) != (right < 0):
            left, right = (keys if bound < 0 else bound for bound in (left, right))
        return FAR if left < 0 else left, 0 if causal else FAR if right < 0 else right

    def _flash_attention_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
        window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        assert dropout_p == 0.0 and return_debug_mask is False
        starts = _starts(cum_seq_q, cum_seq_k, (max_q, max_k))
        window = bounds(is_causal, window_size_left, window_size_right, max_k)
        return *forward(query, key, value, starts, window, scale), None

    def _flash_attention_backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
        rng_state, unused, *, scale, window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        assert dropout_p == 0.0 and rng_state.dtype == unused.dtype == torch.uint64
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        seen.append(torch.are_deterministic_algorithms_enabled())
        starts = _starts(cum_seq_q, cum_seq_k, (max_q, max_k))
        window = bounds(is_causal, window_size_left, window_size_right, max_k)
        return backward(grad_out, query, key, value, out, logsumexp, starts, window, scale)

    return SimpleNamespace(
        _flash_attention_forward=_flash_attention_forward, _flash_attention_backward=_flash_attention_backward
    )
