"""cuDNN's fused attention through ATen (`aten._scaled_dot_product_cudnn_attention`).

It supports fp16 and bf16, fewer KV heads natively, full calls and causal squares, and returns lse `(b, h, s, 1)` in
fp32. cuDNN builds a plan for every new shape, which takes tens of milliseconds or more: use it for few distinct shapes,
and warm up before timing.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..interface import (
    AttentionKernel,
    BlockInputs,
    KernelRequest,
    heads_first,
    token_first,
    wrong_gpu,
    wrong_head_dim,
    wrong_value_dim,
)
from .flash import FlashKernel, no_seed

_LEAST_CUDNN = 90000


class CudnnKernel(AttentionKernel):
    """`aten._scaled_dot_product_cudnn_attention` and its backward; blocks of one query or one key go to `flash`."""

    name: ClassVar[str] = "cudnn"
    speed: ClassVar[dict[str, int]] = {"cuda": 30}

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        # ATen's own selection skips cuDNN for a single key and, in some versions on some GPUs, for a single query.
        self._flash = FlashKernel(deterministic=deterministic)

    def why_not(self, request: KernelRequest) -> str | None:
        return (
            wrong_gpu(request, least=(8, 0))
            or _wrong_cudnn()
            # Forward supports more on some GPUs; all of them support 128 in forward and backward.
            or wrong_head_dim(request, multiple=8, most=128)
            or wrong_value_dim(request)
            or _wrong_calls(request)
        )

    def _forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        if _is_single(inputs):
            return self._flash._forward(inputs)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *map(heads_first, inputs[:3]),
            None, True, 0.0,  # attn_bias, compute_log_sumexp, dropout_p
            inputs.call.causal, scale=inputs.scale,
        )  # fmt: skip
        if lse.ndim != 4:
            raise RuntimeError(
                f"cuDNN attention of torch {torch.__version__} returned lse {tuple(lse.shape)}, expected (b, h, s, 1); "
                "choose another kernel, e.g. 'flash'."
            )
        return token_first(out), lse.squeeze(-1).permute(2, 0, 1)

    def _backward(self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        if _is_single(inputs):
            return self._flash._backward(inputs, grad_out, out, lse)
        _, seed = no_seed(inputs.q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            # ATen looks up a cached plan by the layout of q, k and v alone (seen in torch 2.11; later sources add the
            # rest), so out, grad_out and lse always have one layout: it would read any other with the wrong strides.
            heads_first(grad_out.contiguous()),
            *map(heads_first, inputs[:3]),
            heads_first(out.contiguous()),
            lse.permute(1, 2, 0).contiguous().unsqueeze(-1),
            seed, seed,  # philox seed and offset
            None, None, None,  # attn_bias, cum_seq_q, cum_seq_k: dense, not packed
            inputs.q.shape[0], inputs.k.shape[0], 0.0, inputs.call.causal, scale=inputs.scale,
        )  # fmt: skip
        return token_first(dq), token_first(dk), token_first(dv)


def _is_single(inputs: BlockInputs) -> bool:
    return inputs.q.shape[0] == 1 or inputs.k.shape[0] == 1


def _wrong_cudnn() -> str | None:
    backend: Any = torch.backends.cudnn
    version = backend.version() if backend.is_available() else None
    if version is not None and version >= _LEAST_CUDNN:
        return None
    return f"cuDNN version {version} is not supported, only {_LEAST_CUDNN} (9.0.0) and later"


def _wrong_calls(request: KernelRequest) -> str | None:
    if request.windows:
        return "windows are not supported, only full and causal attention"
    if request.packed:
        return "documents and prompts are not supported: their shapes do not recur, and every new one costs tens of ms"
    if request.deterministic:
        # ATen cannot request a deterministic backward from cuDNN, and skips cuDNN in deterministic mode. On an H100
        # (torch 2.11, cuDNN 9.19, 4,096 tokens), dq differs from run to run, dk and dv do not.
        return "deterministic=True is not supported: ATen's cuDNN backward has no deterministic mode"
    return None
