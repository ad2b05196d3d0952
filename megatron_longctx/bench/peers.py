"""What this package is measured against: other context-parallel attention, on the same kernels where it takes them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..attention import ContextParallelAttention
from ..kernels.no_grad import first_order
from ..layout import Layout, build_layout
from .attention import Call, Case, Contender
from .packages import Found, packages

_OPEN = ExitStack()
"""torch's context_parallel stays entered: backward needs it as well."""


def peers(group: dist.ProcessGroup, kernel: str) -> Found:
    """All that can be imported here; every rank of `group` calls this."""
    found = [Contender("NCCL Ulysses", partial(_ulysses, group, kernel))]
    for rotation in ("allgather", "alltoall"):
        found.append(Contender(f"torch context_parallel, {rotation}", partial(_torch, group, rotation)))
    others = packages(group, kernel)
    return others._replace(contenders=found + others.contenders)


class _AllToAll(torch.autograd.Function):
    """`[s, b, heads, d]` of this rank's tokens to `[n s, b, heads / n, d]` of its heads, or back, over NCCL."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(x, group, to_heads)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _exchange(grads[0], ctx.group, not ctx.to_heads), None, None


def _exchange(x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    n = dist.get_world_size(group)
    s, b, h, d = x.shape
    if to_heads:
        sent = x.view(s, b, n, h // n, d).permute(2, 0, 1, 3, 4).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received.view(n * s, b, h // n, d)
    sent = x.contiguous().view(n, s // n, b, h, d)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.permute(1, 2, 0, 3, 4).reshape(s // n, b, n * h, d)


def _ulysses(group: dist.ProcessGroup, kernel: str, case: Case) -> tuple[Call, Layout]:
    n = dist.get_world_size(group)
    if case.num_kv_heads % n or case.length % n:
        raise ValueError(f"{case.num_kv_heads} key/value heads, {case.length} tokens: expected multiples of {n} ranks")
    attention = ContextParallelAttention(kernel=kernel)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (_AllToAll.apply(x, group, True) for x in (q, k, v))  # type: ignore[no-untyped-call]
        out: Tensor = _AllToAll.apply(attention(q, k, v, length=case.length), group, False)  # type: ignore[no-untyped-call]
        return out

    return call, build_layout("contiguous", n, case.length)


def _torch(group: dist.ProcessGroup, rotation: str, case: Case) -> tuple[Call, Layout]:
    """torch.distributed's own, load-balanced (zigzag). It has no grouped-query form: keys and values are repeated."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    n = dist.get_world_size(group)
    if case.length % (2 * n):
        raise ValueError(f"{case.length} tokens: expected a multiple of {2 * n}")
    _OPEN.close()
    set_rotate_method(rotation)
    mesh, something = DeviceMesh.from_group(group, "cuda"), torch.zeros(2 * n, device="cuda")  # none is an error there
    _OPEN.enter_context(context_parallel(mesh, buffers=[something], buffer_seq_dims=[0]))
    _OPEN.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    repeats = case.num_heads // case.num_kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k, v))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3)

    return call, build_layout("zigzag", n, case.length)
