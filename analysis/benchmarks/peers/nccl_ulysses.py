"""Ulysses as other packages write it: NCCL all-to-alls around one kernel call of this package."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.core.attention import ContextParallelAttention

from ..cases import Case
from ..measure import Contender, Prepared

NOTE = "tokens for heads and back by all_to_all_single, around this package's kernel."


def contenders(group: dist.ProcessGroup, kernel: str) -> list[Contender]:
    return [Contender("NCCL Ulysses", partial(_prepare, group, kernel))]


def _prepare(group: dist.ProcessGroup, kernel: str, case: Case) -> Prepared:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if case.num_kv_heads % n or case.length % n:
        raise ValueError(f"{case.num_kv_heads} key/value heads, {case.length} tokens: expected multiples of {n} ranks")
    attention, tokens = ContextParallelAttention(kernel=kernel), case.length // n

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_AllToAll.apply(x, group, True) for x in (q, k, v))  # type: ignore[no-untyped-call]
        out: Tensor = _AllToAll.apply(attention(q, k, v, mask=case.mask), group, False)  # type: ignore[no-untyped-call]
        return out

    return Prepared(call, range(rank * tokens, (rank + 1) * tokens))


class _AllToAll(torch.autograd.Function):
    """Maps `[s, b, heads, d]` of this rank's tokens to `[n s, b, heads / n, d]` of its heads, or back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.group, not ctx.to_heads), None, None


def _exchange(x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    n = dist.get_world_size(group)
    s, b, h, d = x.shape
    if to_heads:
        sent = x.view(s, b, n, h // n, d).permute(2, 0, 1, 3, 4).contiguous()
    else:
        sent = x.contiguous().view(n, s // n, b, h, d)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    if to_heads:
        return received.view(n * s, b, h // n, d)
    return received.permute(1, 2, 0, 3, 4).reshape(s // n, b, n * h, d)
