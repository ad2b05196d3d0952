"""ATen's FlashAttention-2 (`aten._flash_attention_forward`), part of every CUDA build of torch.

It supports fp16 and bf16, fewer KV heads natively, packed segments and windows. It has about 60% of cuDNN's speed on
Hopper.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...plans.kernel_calls import KernelCall
from ...plans.slices import FAR
from ..interface import BlockInputs, KernelRequest, wrong_gpu, wrong_head_dim, wrong_value_dim
from ..packed import PackedKernel, Segments, window_arguments


class FlashKernel(PackedKernel):
    """`aten._flash_attention_forward` and its backward."""

    name: ClassVar[str] = "flash"
    speed: ClassVar[dict[str, int]] = {"cuda": 20}

    def why_not(self, request: KernelRequest) -> str | None:
        return (
            wrong_gpu(request, least=(8, 0))
            or wrong_head_dim(request, multiple=8, most=256)
            or wrong_value_dim(request)
            or _backward_gap(request)
        )

    def prepare(self, call: KernelCall, rows: tuple[int, int], device: torch.device) -> Segments | None:
        """Return the call's segments, with `most_keys` raised where FlashAttention-2 would misread the window.

        It replaces a missing right bound beside a left one by `most_keys`. If there are more queries than that, the
        first ones would see nothing, and their outputs would be NaN.
        """
        segments = super().prepare(call, rows, device)
        if call.right != FAR or call.left == FAR or call.most_queries <= call.most_keys:
            return segments
        segments = segments or Segments.of(call, rows, device)
        return segments._replace(most_keys=segments.most_queries)

    def _forward_rows(self, inputs: BlockInputs, packed: Segments | None) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            inputs.q, inputs.k, inputs.v, *_lengths(inputs, packed), 0.0, inputs.call.causal, False,
            scale=inputs.scale, **window_arguments(inputs.call, unbounded=-1),
        )  # fmt: skip
        return out, lse

    def _backward_rows(
        self, inputs: BlockInputs, packed: Segments | None, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        with _deterministic_algorithms(self.deterministic):
            grads: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
                grad_out, inputs.q, inputs.k, inputs.v, out, lse, *_lengths(inputs, packed), 0.0, inputs.call.causal,
                *no_seed(inputs.q.device), scale=inputs.scale, **window_arguments(inputs.call, unbounded=-1),
            )  # fmt: skip
        return grads


@functools.cache
def no_seed(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a state of dropout's generator, which the op requires and does not read without dropout.

    There is no real one to pass on: a merged lse belongs to no single forward call.
    """
    state = torch.zeros(2, dtype=torch.int64, device=device).view(torch.uint64)
    return state, torch.zeros((), dtype=torch.int64, device=device).view(torch.uint64)


def _lengths(inputs: BlockInputs, packed: Segments | None) -> tuple[Any, ...]:
    """Return (cumulative queries, cumulative keys, most queries, most keys)."""
    if packed is None:
        return None, None, inputs.q.shape[1], inputs.k.shape[1]
    return packed.q_starts, packed.k_starts, packed.most_queries, packed.most_keys


@contextmanager
def _deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Set torch's global switch, which ATen reads; under `warn_only` it would take the other algorithm and warn."""
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _backward_gap(request: KernelRequest) -> str | None:
    """Refuse head dims in (192, 224] on GPUs whose shared memory is too small for FlashAttention-2's backward."""
    if not 192 < request.head_dim <= 224:
        return None
    actual = torch.cuda.get_device_capability()
    if not ((8, 6) <= actual <= (8, 9) or actual >= (12, 0)):
        return None
    return f"head_dim={request.head_dim} has no backward on compute capability {actual[0]}.{actual[1]}, only up to 192"
