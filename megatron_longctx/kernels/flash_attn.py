"""The `flash-attn` package (FlashAttention-2), where it is installed.

Its inner functions are not a public interface, so the adapter is pinned to the releases whose signatures were read
(2.7.0.post2, 2.7.4.post1 and 2.8.3.post2, which agree) and refuses all others.
"""

import functools
import importlib
import importlib.metadata
import re
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

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

_FROM, _BELOW = (2, 7), (2, 9)

# What every call says alike: no dropout, no window, no soft cap, no ALiBi.
_PLAIN: dict[str, Any] = {
    "dropout_p": 0.0,
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}


class FlashAttnKernel(AttentionKernel):
    """`flash_attn.flash_attn_interface._flash_attn_forward` and `_flash_attn_backward`."""

    name: ClassVar[str] = "flash_attn"

    def why_not(self, request: KernelRequest) -> str | None:
        return first_reason(
            wrong_device(request, "cuda"),
            on_rocm(),
            too_old_gpu(request, least=(8, 0)),
            wrong_dtype(request, torch.bfloat16, torch.float16),
            wrong_head_dim(request, multiple=8, most=256),
            flash_backward_gap(request),
            package_problem(),
        )

    def _forward(self, block: Block) -> tuple[Tensor, Tensor]:
        out, lse, _, _ = _interface()._flash_attn_forward(
            q=_batch_first(block.q),
            k=_batch_first(block.k),
            v=_batch_first(block.v),
            softmax_scale=block.scale,
            causal=block.causal,
            return_softmax=False,
            **_PLAIN,
        )
        return _batch_first(out), lse.permute(2, 0, 1)

    def _backward(self, block: Block, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The package writes into what it is given and returns none of it.
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (block.q, block.k, block.v))
        _interface()._flash_attn_backward(
            dout=_batch_first(grad_out),
            q=_batch_first(block.q),
            k=_batch_first(block.k),
            v=_batch_first(block.v),
            out=_batch_first(out),
            softmax_lse=lse.permute(1, 2, 0).contiguous(),  # read by pointer, as (b, h, s)
            dq=_batch_first(dq),
            dk=_batch_first(dk),
            dv=_batch_first(dv),
            softmax_scale=block.scale,
            causal=block.causal,
            deterministic=self.deterministic,
            rng_state=None,
            **_PLAIN,
        )
        return dq, dk, dv


@functools.cache
def package_problem() -> str | None:
    """Why the installed `flash-attn` package cannot be used; None when it can."""
    wanted = f">={_FROM[0]}.{_FROM[1]},<{_BELOW[0]}.{_BELOW[1]}"
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return f"the package flash-attn ({wanted}) is not installed"
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or not _FROM <= (int(numbers[1]), int(numbers[2])) < _BELOW:
        return f"flash-attn {version} is not supported, only {wanted}: its inner functions change between releases"
    try:
        _interface()
    except Exception as error:  # a wheel built for another torch fails in many ways, and none may stop `auto`
        return f"flash-attn {version} is installed but cannot be imported ({type(error).__name__}: {error})"
    return None


@functools.cache
def _interface() -> ModuleType:
    return importlib.import_module("flash_attn.flash_attn_interface")


def _batch_first(x: Tensor) -> Tensor:
    """`[s, b, h, d]` seen as `[b, s, h, d]`, and back."""
    return x.transpose(0, 1)
