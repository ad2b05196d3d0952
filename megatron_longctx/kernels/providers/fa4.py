"""FlashAttention-4 (`flash-attn-4` on PyPI, CuTe DSL): the fastest kernel on Hopper and Blackwell, and the widest.

Packed segments, windows, fewer queries than keys (ends aligned), unequal head dims, an external (out, lse) in backward,
deterministic when asked. Compiled once for each kind of call (3 to 6 s), not for each shape. Its inner functions are no
public interface, so the release whose signatures were read is pinned.
"""

import functools
import importlib
import importlib.metadata
import logging
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_longctx.kernels.interface import BlockInputs, CallKind, KernelRequest
from megatron_longctx.kernels.limits import on_rocm, too_old_gpu, wrong_device, wrong_dtype
from megatron_longctx.kernels.packed import PackedKernel, Segments
from megatron_longctx.schedules.calibration import cache_folder
from megatron_longctx.schedules.kernel_calls import KernelCall, fa4_takes
from megatron_longctx.schedules.mask import FAR

logger = logging.getLogger(__name__)

VERSION = "4.0.0b36"
_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE"


class Fa4Kernel(PackedKernel):
    """`flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd`."""

    name: ClassVar[str] = "fa4"
    speed: ClassVar[dict[str, int]] = {"cuda": 40}
    compiles: ClassVar[bool] = True

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__(deterministic=deterministic)
        self.takes = fa4_takes(deterministic)

    def why_not(self, request: KernelRequest) -> str | None:
        return (
            wrong_device(request, "cuda")
            or on_rocm()
            or too_old_gpu(least=(9, 0))
            or wrong_dtype(request, torch.bfloat16, torch.float16)
            or _wrong_head_dims(request)
            or package_problem()
        )

    def _forward_rows(self, inputs: BlockInputs, packed: Segments | None) -> tuple[Tensor, Tensor]:
        _announce("forward", inputs, packed)
        out, lse, *_ = _interface()._flash_attn_fwd(
            inputs.q, inputs.k, inputs.v, softmax_scale=inputs.scale, return_lse=True,
            **_lengths(packed), **_window(inputs.call),
        )  # fmt: skip
        return out, lse

    def _backward_rows(
        self, inputs: BlockInputs, packed: Segments | None, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        _announce("backward", inputs, packed)
        found: tuple[Tensor, ...] = _interface()._flash_attn_bwd(
            inputs.q, inputs.k, inputs.v, out, grad_out, lse, softmax_scale=inputs.scale,
            deterministic=self.deterministic, **_lengths(packed), **_window(inputs.call),
        )  # fmt: skip
        return found


_announced: set[tuple[object, ...]] = set()


def _announce(what: str, inputs: BlockInputs, packed: Segments | None) -> None:
    """Say, before the first call of a kind, why it takes seconds."""
    call, dims = inputs.call, (inputs.q.shape[-1], inputs.v.shape[-1])
    found = CallKind(packed is not None, call.left != FAR, call.right != FAR)
    kind = what, inputs.q.dtype, dims, found
    if kind not in _announced:
        _announced.add(kind)
        of = f"{found}, head dims {dims[0]} and {dims[1]}"
        logger.info("attention kernel fa4: %s (%s) is compiled, some seconds, or read from %s", what, of, _folder())


def _window(call: KernelCall) -> dict[str, Any]:
    if call.causal or call.full:
        return {"causal": call.causal}
    bounds = {"window_size_left": call.left, "window_size_right": call.right}
    return {name: None if bound == FAR else bound for name, bound in bounds.items()}


def _lengths(packed: Segments | None) -> dict[str, Any]:
    if packed is None:
        return {}
    return {
        "cu_seqlens_q": packed.q_starts,
        "cu_seqlens_k": packed.k_starts,
        "max_seqlen_q": packed.most_queries,
        "max_seqlen_k": packed.most_keys,
    }


def _wrong_head_dims(request: KernelRequest) -> str | None:
    """What the kernels of each generation compute rightly, which is less than what they accept.

    On an H200, with head dims 16, 48, 72, 80 and 112 the gradient of q was wrong, with no error; values wider than
    keys, 64 and 128, ended in one. Multiples of 32 were right.
    """
    dims = request.head_dim, request.value_dim
    said = f"head_dim={dims[0]}, v_head_dim={dims[1]}"
    if any(dim % 32 or dim < 32 for dim in dims):
        return f"{said} are not supported, only multiples of 32: with others its gradients are wrong"
    if dims[1] > dims[0]:
        return f"{said} are not supported, only values that are no wider than keys"
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    if dims[0] <= (256 if hopper else 128) or dims in ((192, 128), (256, 256)):
        return None
    return f"{said} are not supported, only up to {'256' if hopper else '128, (192, 128) and (256, 256)'}"


@functools.cache
def package_problem() -> str | None:
    """Why the package `flash-attn-4` cannot be used; None when it can. Imports it, which takes some seconds."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return f"the package flash-attn-4 ({VERSION}) is not installed: pip install 'megatron-longctx[gpu]'"
    if version != VERSION:
        return f"flash-attn-4 {version} is not supported, only {VERSION}: its inner functions change between releases"
    try:
        _interface()
    except Exception as error:  # a package that lacks one of its own fails in many ways, and none may stop `auto`
        return f"flash-attn-4 {version} is installed but cannot be imported ({type(error).__name__}: {error})"
    return None


@functools.cache
def _interface() -> ModuleType:
    # What is compiled stays on disk, so that the next process begins at once.
    os.environ.setdefault(f"{_CACHE}_ENABLED", "1")
    os.environ.setdefault(f"{_CACHE}_DIR", str(_folder()))
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)  # said of every kernel that is compiled
    return importlib.import_module("flash_attn.cute.interface")


def _folder() -> Path:
    return cache_folder() / "fa4"
