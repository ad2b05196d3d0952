"""Attention sinks: a logit per head that takes part in every softmax and has no value.

A sink is the partial result (0, sink) over no key, merged once at the end: no plan knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def merge_sink(out: Tensor, lse: Tensor, sink: Tensor, heads: range) -> tuple[Tensor, Tensor]:
    """`out` `[s, b, h, e]` and `lse` `[s, b, h]` of some heads, with their sinks `[all heads]`, as new tensors."""
    logits = sink[heads.start : heads.stop].to(lse.dtype)
    total = torch.logaddexp(lse, logits)
    share = torch.exp(lse - total).unsqueeze(-1)
    return (out * share).to(out.dtype), total.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def add_sink_(out: Tensor, lse: Tensor, sink: Tensor) -> None:
    """`merge_sink` in place: `out` `[..., h, e]` and `lse` `[..., h]` in the same dtype. Nothing waits for the host."""
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    out.mul_(torch.exp(lse - total).unsqueeze(-1))
    lse.copy_(total)


def sink_gradient(sink: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> Tensor:
    """The gradient of the sinks, of this rank's queries alone.

    The share of a sink in the softmax, `exp(sink - lse)`, takes that much from every output: its gradient is minus the
    sum over queries of share times `rowsum(grad_out * out)`.
    """
    share = torch.exp(sink.to(lse.dtype) - lse)
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(share * delta).sum((0, 1)).to(sink.dtype)


def with_sinks(kept: Sequence[tuple[Tensor, ...]], heads: Sequence[range | None], sink: Tensor) -> Iterator[Tensor]:
    """What a pass keeps, (q, out, lse) or keys, its outputs corrected. heads: of queries, by entry; None for keys."""
    for fields, some in zip(kept, heads, strict=True):
        yield from fields if some is None else (fields[0], *merge_sink(fields[1], fields[2], sink, some))
