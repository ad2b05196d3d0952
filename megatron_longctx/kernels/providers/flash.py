"""ATen's FlashAttention-2 (`aten._flash_attention_forward`), part of every CUDA build of torch.

fp16 and bf16, fewer KV heads natively, packed segments, windows. About 60% of cuDNN's speed on Hopper.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_longctx.kernels.interface import BlockInputs, KernelRequest
from megatron_longctx.kernels.limits import (
    flash_backward_gap,
    on_rocm,
    too_old_gpu,
    wrong_device,
    wrong_dtype,
    wrong_head_dim,
    wrong_value_dim,
)
from megatron_longctx.kernels.packed import PackedKernel, Segments
from megatron_longctx.schedules.kernel_calls import KernelCall
from megatron_longctx.schedules.mask import FAR


class FlashKernel(PackedKernel):
    """`aten._flash_attention_forward` and its backward."""

    name: ClassVar[str] = "flash"
    speed: ClassVar[dict[str, int]] = {"cuda": 20}

    def why_not(self, request: KernelRequest) -> str | None:
        return (
            wrong_device(request, "cuda")
            or on_rocm()
            or too_old_gpu(least=(8, 0))
            or wrong_dtype(request, torch.bfloat16, torch.float16)
            or wrong_head_dim(request, multiple=8, most=256)
            or wrong_value_dim(request)
            or flash_backward_gap(request)
        )

    def prepare(self, call: KernelCall, rows: tuple[int, int], device: torch.device) -> Segments | None:
        """FlashAttention-2 takes no bound ahead, beside one behind, as one of `most_keys`; where queries are more than
        that, the first ones would see nothing, and their outputs be NaN."""
        found = super().prepare(call, rows, device)
        if call.right != FAR or call.left == FAR or call.most_queries <= call.most_keys:
            return found
        found = found or Segments.of(call, rows, device)
        return found._replace(most_keys=found.most_queries)

    def _forward_rows(self, inputs: BlockInputs, packed: Segments | None) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            inputs.q, inputs.k, inputs.v, *_lengths(inputs, packed), 0.0, inputs.call.causal, False,
            scale=inputs.scale, **_window(inputs.call),
        )  # fmt: skip
        return out, lse

    def _backward_rows(
        self, inputs: BlockInputs, packed: Segments | None, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        with _strictly(self.deterministic):
            found: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
                grad_out, inputs.q, inputs.k, inputs.v, out, lse, *_lengths(inputs, packed), 0.0, inputs.call.causal,
                *_no_seed(inputs.q.device), scale=inputs.scale, **_window(inputs.call),
            )  # fmt: skip
        return found


@functools.cache
def _no_seed(device: torch.device) -> tuple[Tensor, Tensor]:
    """Dropout's generator state, which the op's arguments require and nothing reads without dropout: a merged lse
    belongs to no single forward call, so there is none to pass on."""
    state = torch.zeros(2, dtype=torch.int64, device=device).view(torch.uint64)
    return state, torch.zeros((), dtype=torch.int64, device=device).view(torch.uint64)


def _window(call: KernelCall) -> dict[str, Any]:
    if call.causal or call.full:
        return {}
    bounds = {"window_size_left": call.left, "window_size_right": call.right}
    return {name: -1 if bound == FAR else bound for name, bound in bounds.items()}


def _lengths(inputs: BlockInputs, packed: Segments | None) -> tuple[Any, ...]:
    """(cumulative queries, cumulative keys, most queries, most keys)."""
    if packed is None:
        return None, None, inputs.q.shape[1], inputs.k.shape[1]
    return packed.q_starts, packed.k_starts, packed.most_queries, packed.most_keys


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
