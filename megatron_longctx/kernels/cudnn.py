"""cuDNN's fused attention through ATen (`aten._scaled_dot_product_cudnn_attention`): the fastest one on Hopper.

fp16 and bf16, fewer KV heads natively, lse `(b, h, s, 1)` fp32. cuDNN builds a plan for every new shape, which takes
tens of milliseconds or more: few distinct shapes, and a warm-up before timing.

Where shapes vary, only blocks of the few shapes of `planned` come here. Others go to `flash`, which needs no plan and
takes 1.5 to 2 times as long for large blocks. Measured on 4 H200s, 32 query heads of 128, 32 layers, 131,072 tokens in
all: the first token of 13,107 new ones took 0.54 s, and 1.4 to 1.9 s when cuDNN had not seen the shapes; of 6,554 new
ones 0.29 to 0.32 s with cuDNN and 0.44 s with `flash`; of 1,311 new ones, which leave cuDNN's processors idle, 0.21 s
with cuDNN and 0.11 s with `flash` where queries travel. Cut into planned shapes, 13,107 took 0.55 s (0.65 s
the first time), 6,554 0.30 to 0.50 s and 1,311 0.12 s.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_longctx.kernels.flash import FlashKernel
from megatron_longctx.kernels.interface import AttentionKernel, Block, KernelRequest
from megatron_longctx.kernels.limits import (
    first_reason,
    on_rocm,
    too_old_gpu,
    wrong_device,
    wrong_dtype,
    wrong_head_dim,
)
from megatron_longctx.kernels.planned import PlannedShapes, planned_shapes
from megatron_longctx.kernels.views import heads_first, token_first

_LEAST_CUDNN = 90000


class CudnnKernel(AttentionKernel):
    """`aten._scaled_dot_product_cudnn_attention` and its backward; blocks of one query or one key go to `flash`, and
    where shapes vary all that are not of the `planned` ones."""

    name: ClassVar[str] = "cudnn"

    def __init__(self, *, deterministic: bool = False, varying: bool = False) -> None:
        super().__init__(deterministic=deterministic, varying=varying)
        self._no_seed: dict[torch.device, Tensor] = {}
        # ATen's own selection passes cuDNN over for a single key and, in some versions on some GPUs, refuses a single
        # query; and decoding would build a new plan for every token, since the number of keys grows by one.
        self._unplanned = FlashKernel(deterministic=deterministic, varying=varying)

    def why_not(self, request: KernelRequest) -> str | None:
        return first_reason(
            wrong_device(request, "cuda"),
            on_rocm(),
            _no_cudnn(),
            too_old_gpu(request, least=(8, 0)),
            wrong_dtype(request, torch.bfloat16, torch.float16),
            # Forward goes further on some GPUs; 128 is what forward and backward take on all of them.
            wrong_head_dim(request, multiple=8, most=128),
            _not_deterministic(request),
        )

    def planned(self, num_heads: int, head_dim: int) -> PlannedShapes | None:
        return planned_shapes(num_heads, head_dim) if self.varying else None

    def _forward(self, block: Block) -> tuple[Tensor, Tensor]:
        if self.goes_unplanned(block):
            return self._unplanned._forward(block)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            heads_first(block.q),
            heads_first(block.k),
            heads_first(block.v),
            None,  # attn_bias
            True,  # compute_log_sumexp
            0.0,
            block.causal,
            scale=block.scale,
        )
        if lse.ndim != 4:
            raise RuntimeError(
                f"cuDNN attention of torch {torch.__version__} returned lse {tuple(lse.shape)}, expected (b, h, s, 1); "
                "choose another kernel, e.g. 'flash'."
            )
        return token_first(out), lse.squeeze(-1).permute(2, 0, 1)

    def _backward(self, block: Block, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.goes_unplanned(block):
            return self._unplanned._backward(block, grad_out, out, lse)
        no_seed = self._seed(block.q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            # ATen looks up a cached plan by the layout of q, k and v alone (seen in torch 2.11; later sources add the
            # rest), so out, grad_out and lse always come in one layout: any other is read with the wrong strides.
            heads_first(grad_out.contiguous()),
            heads_first(block.q),
            heads_first(block.k),
            heads_first(block.v),
            heads_first(out.contiguous()),
            lse.permute(1, 2, 0).contiguous().unsqueeze(-1),
            no_seed,  # philox seed and offset
            no_seed,
            None,  # attn_bias
            None,  # cum_seq_q and cum_seq_k: dense, not packed
            None,
            block.q.shape[0],
            block.k.shape[0],
            0.0,
            block.causal,
            scale=block.scale,
        )
        return token_first(dq), token_first(dk), token_first(dv)

    def goes_unplanned(self, block: Block) -> bool:
        """Whether a block goes to `flash`."""
        (s, b, h, d), t = block.q.shape, block.k.shape[0]
        shapes = self.planned(b * h, d)
        return s == 1 or t == 1 or (shapes is not None and not shapes.has(s, t, block.causal))

    def _seed(self, device: torch.device) -> Tensor:
        """Dropout's seed (and offset), which the op's arguments require and nothing reads without dropout.

        A merged lse belongs to no single forward call, so there is none to pass on; made once per device.
        """
        if device not in self._no_seed:
            self._no_seed[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._no_seed[device]


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
