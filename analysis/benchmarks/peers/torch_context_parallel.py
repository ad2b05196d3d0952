"""torch.distributed's `context_parallel`, load-balanced (zigzag), on cuDNN's kernels."""

from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron_longctx.core.layout import zigzag

from ..cases import Case
from ..measure import Contender, Prepared

NOTE = "on cuDNN's kernels; it has no grouped-query form, so that keys and values are repeated."

_OPEN = ExitStack()
"""Stays open until a case ends: backward needs the contexts as well."""


def contenders(group: dist.ProcessGroup, kernel: str) -> list[Contender]:
    return [
        Contender(f"torch context_parallel, {rotation}", partial(_torch, group, rotation), release=_OPEN.close)
        for rotation in ("allgather", "alltoall")
    ]


def _torch(group: dist.ProcessGroup, rotation: str, case: Case) -> Prepared:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    n = dist.get_world_size(group)
    if len(case.documents) > 1 or not case.causal or case.window:
        raise ValueError(f"mask {case.name}: expected causal")
    if case.length % (2 * n):
        raise ValueError(f"{case.length} tokens: expected a multiple of {2 * n}")
    set_rotate_method(rotation)
    mesh, buffer = DeviceMesh.from_group(group, "cuda"), torch.zeros(2 * n, device="cuda")  # it needs some buffer
    _OPEN.enter_context(context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]))
    _OPEN.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
    repeats = case.num_heads // case.num_kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(repeats, dim=2) if repeats > 1 else x for x in (k, v))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.permute(2, 0, 1, 3)

    return Prepared(call, list(zigzag(n, case.length).tokens(dist.get_rank(group))))
