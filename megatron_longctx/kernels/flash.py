"""ATen's FlashAttention-2 (`aten._scaled_dot_product_flash_attention`), part of every CUDA build of torch.

fp16 and bf16, fewer KV heads natively, lse `(b, h, s)` fp32. About 60% of cuDNN's speed on Hopper.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from megatron_longctx.kernels.grouped_rows import as_heads, as_rows, worth_rows
from megatron_longctx.kernels.interface import AttentionKernel, Block, KernelRequest
from megatron_longctx.kernels.limits import (
    first_reason,
    flash_backward_gap,
    on_rocm,
    too_old_gpu,
    wrong_device,
    wrong_dtype,
    wrong_head_dim,
)
from megatron_longctx.kernels.views import heads_first, token_first


class FlashKernel(AttentionKernel):
    """`aten._scaled_dot_product_flash_attention` and its backward; forward of `varying` blocks of few queries over many
    keys computes the heads of a group as rows of one."""

    name: ClassVar[str] = "flash"

    def __init__(self, *, deterministic: bool = False, varying: bool = False) -> None:
        super().__init__(deterministic=deterministic, varying=varying)
        self._no_seed: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def why_not(self, request: KernelRequest) -> str | None:
        return first_reason(
            wrong_device(request, "cuda"),
            on_rocm(),
            too_old_gpu(request, least=(8, 0)),
            wrong_dtype(request, torch.bfloat16, torch.float16),
            wrong_head_dim(request, multiple=8, most=256),
            flash_backward_gap(request),
        )

    def _forward(self, block: Block) -> tuple[Tensor, Tensor]:
        if self.varying and not block.causal and self._rows_pay(block):
            queries, kv_heads = block.q.shape[0], block.k.shape[2]
            out, lse = self._attend(replace(block, q=as_rows(block.q, kv_heads)))
            return as_heads(out, queries), as_heads(lse, queries)
        return self._attend(block)

    def _rows_pay(self, block: Block) -> bool:
        queries, batch, heads, head_dim = block.q.shape
        keys, _, kv_heads, _ = block.k.shape
        return worth_rows(queries, batch * keys, (heads, kv_heads), head_dim)

    def _attend(self, block: Block) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            heads_first(block.q), heads_first(block.k), heads_first(block.v), 0.0, block.causal, scale=block.scale
        )
        return token_first(out), lse.permute(2, 0, 1)

    def _backward(self, block: Block, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with _strictly(self.deterministic):
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                heads_first(grad_out),
                heads_first(block.q),
                heads_first(block.k),
                heads_first(block.v),
                heads_first(out),
                lse.permute(1, 2, 0).contiguous(),  # the kernel reads it by pointer, as (b, h, s)
                None,  # cum_seq_q and cum_seq_k: dense, not packed
                None,
                block.q.shape[0],
                block.k.shape[0],
                0.0,
                block.causal,
                *self._seed(block.q.device),
                scale=block.scale,
            )
        return token_first(dq), token_first(dk), token_first(dv)

    def _seed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Dropout's generator state, which the op's arguments require and nothing reads without dropout.

        A merged lse belongs to no single forward call, so there is none to pass on; made once per device.
        """
        if device not in self._no_seed:
            state = torch.zeros(2, dtype=torch.int64, device=device).view(torch.uint64)
            offset = torch.zeros((), dtype=torch.int64, device=device).view(torch.uint64)
            self._no_seed[device] = (state, offset)
        return self._no_seed[device]


@contextmanager
def _strictly(deterministic: bool) -> Iterator[None]:
    """ATen asks torch's global switch, and under `warn_only` takes the other algorithm and warns."""
    if not deterministic:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
