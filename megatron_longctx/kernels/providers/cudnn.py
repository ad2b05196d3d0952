"""cuDNN's fused attention through ATen (`aten._scaled_dot_product_cudnn_attention`).

fp16 and bf16, fewer KV heads natively, lse `(b, h, s, 1)` fp32; full calls and causal squares. cuDNN builds a plan for
every new shape, which takes tens of milliseconds or more: for few distinct shapes, and with a warm-up before timing.
"""

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_longctx.kernels.interface import AttentionKernel, BlockInputs, KernelRequest, heads_first, token_first
from megatron_longctx.kernels.limits import (
    no_windows,
    on_rocm,
    too_old_gpu,
    wrong_device,
    wrong_dtype,
    wrong_head_dim,
    wrong_value_dim,
)
from megatron_longctx.kernels.providers.flash import FlashKernel

_LEAST_CUDNN = 90000


class CudnnKernel(AttentionKernel):
    """`aten._scaled_dot_product_cudnn_attention` and its backward; blocks of one query or one key go to `flash`."""

    name: ClassVar[str] = "cudnn"
    speed: ClassVar[dict[str, int]] = {"cuda": 30}

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        # ATen's own selection passes cuDNN over for a single key and, in some versions on some GPUs, refuses a single
        # query.
        self._of_one = FlashKernel(deterministic=deterministic)

    def why_not(self, request: KernelRequest) -> str | None:
        return (
            wrong_device(request, "cuda")
            or on_rocm()
            or _no_cudnn()
            or too_old_gpu(least=(8, 0))
            or wrong_dtype(request, torch.bfloat16, torch.float16)
            # Forward goes further on some GPUs; 128 is what forward and backward take on all of them.
            or wrong_head_dim(request, multiple=8, most=128)
            or wrong_value_dim(request)
            or no_windows(request)
            or _unlike_shapes(request)
            or _not_deterministic(request)
        )

    def _forward(self, inputs: BlockInputs) -> tuple[Tensor, Tensor]:
        if _of_one(inputs):
            return self._of_one._forward(inputs)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            heads_first(inputs.q),
            heads_first(inputs.k),
            heads_first(inputs.v),
            None,  # attn_bias
            True,  # compute_log_sumexp
            0.0,
            inputs.call.causal,
            scale=inputs.scale,
        )
        if lse.ndim != 4:
            raise RuntimeError(
                f"cuDNN attention of torch {torch.__version__} returned lse {tuple(lse.shape)}, expected (b, h, s, 1); "
                "choose another kernel, e.g. 'flash'."
            )
        return token_first(out), lse.squeeze(-1).permute(2, 0, 1)

    def _backward(self, inputs: BlockInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        if _of_one(inputs):
            return self._of_one._backward(inputs, grad_out, out, lse)
        no_seed = _no_seed(inputs.q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            # ATen looks up a cached plan by the layout of q, k and v alone (seen in torch 2.11; later sources add the
            # rest), so out, grad_out and lse always come in one layout: any other is read with the wrong strides.
            heads_first(grad_out.contiguous()),
            heads_first(inputs.q),
            heads_first(inputs.k),
            heads_first(inputs.v),
            heads_first(out.contiguous()),
            lse.permute(1, 2, 0).contiguous().unsqueeze(-1),
            no_seed,  # philox seed and offset
            no_seed,
            None,  # attn_bias
            None,  # cum_seq_q and cum_seq_k: dense, not packed
            None,
            inputs.q.shape[0],
            inputs.k.shape[0],
            0.0,
            inputs.call.causal,
            scale=inputs.scale,
        )
        return token_first(dq), token_first(dk), token_first(dv)


@functools.cache
def _no_seed(device: torch.device) -> Tensor:
    """Dropout's seed (and offset), which the op's arguments require and nothing reads without dropout: a merged lse
    belongs to no single forward call, so there is none to pass on."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _of_one(inputs: BlockInputs) -> bool:
    return inputs.q.shape[0] == 1 or inputs.k.shape[0] == 1


def _unlike_shapes(request: KernelRequest) -> str | None:
    if not request.packed:
        return None
    return "documents and prompts are not supported, whose shapes do not come again: every new one takes it tens of ms"


def _no_cudnn() -> str | None:
    backend: Any = torch.backends.cudnn
    version = backend.version() if backend.is_available() else None
    if version is not None and version >= _LEAST_CUDNN:
        return None
    return f"cuDNN version {version} is not supported, only {_LEAST_CUDNN} (9.0.0) and later"


def _not_deterministic(request: KernelRequest) -> str | None:
    """ATen has no way to ask cuDNN for a deterministic backward, and itself passes cuDNN over in deterministic mode.

    Seen on an H100 (torch 2.11, cuDNN 9.19, 4,096 tokens): dq differs from run to run, dk and dv do not.
    """
    if not request.deterministic:
        return None
    return "deterministic=True is not supported: ATen's cuDNN backward has no deterministic mode"
