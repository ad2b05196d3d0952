"""FlashAttention-4 (`flash-attn-4` on PyPI, CuTe DSL): the fastest and most general kernel on Hopper and Blackwell.

It supports packed segments, windows, fewer queries than keys (ends aligned), unequal head dims, an external (out, lse)
in backward, and deterministic results. It compiles once for each kind of call (3 to 6 s), not for each shape. Its inner
functions are not a public interface, so one release, whose signatures we have read, is pinned.
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

from ...cache import cache_folder
from ...plans.kernel_calls import fa4_takes
from ...plans.slices import FAR
from ..interface import BlockInputs, CallKind, KernelRequest, wrong_gpu
from ..packed import PackedKernel, Segments, window_arguments

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
        return wrong_gpu(request, least=(9, 0)) or wrong_head_dims(request) or package_problem()

    def _forward_rows(self, inputs: BlockInputs, packed: Segments | None) -> tuple[Tensor, Tensor]:
        _log_compilation("forward", inputs, packed)
        out, lse, *_ = _interface()._flash_attn_fwd(
            inputs.q, inputs.k, inputs.v, softmax_scale=inputs.scale, return_lse=True, **_arguments(inputs, packed)
        )
        return out, lse

    def _backward_rows(
        self, inputs: BlockInputs, packed: Segments | None, grad_out: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        _log_compilation("backward", inputs, packed)
        grads: tuple[Tensor, ...] = _interface()._flash_attn_bwd(
            inputs.q, inputs.k, inputs.v, out, grad_out, lse, softmax_scale=inputs.scale,
            deterministic=self.deterministic, **_arguments(inputs, packed),
        )  # fmt: skip
        return grads


_logged: set[tuple[object, ...]] = set()


def _log_compilation(direction: str, inputs: BlockInputs, packed: Segments | None) -> None:
    """Log, before the first call of a kind, why it takes seconds."""
    call, dims = inputs.call, (inputs.q.shape[-1], inputs.v.shape[-1])
    kind = CallKind(packed is not None, call.left != FAR, call.right != FAR)
    key = direction, inputs.q.dtype, dims, kind
    if key not in _logged:
        _logged.add(key)
        what = f"{direction} ({kind}, head dims {dims[0]} and {dims[1]})"
        logger.info("attention kernel fa4: %s is compiled, some seconds, or read from %s", what, kept_in())


def _arguments(inputs: BlockInputs, packed: Segments | None) -> dict[str, Any]:
    arguments: dict[str, Any] = {"causal": inputs.call.causal, **window_arguments(inputs.call, unbounded=None)}
    if packed is not None:
        arguments |= {
            "cu_seqlens_q": packed.q_starts,
            "cu_seqlens_k": packed.k_starts,
            "max_seqlen_q": packed.most_queries,
            "max_seqlen_k": packed.most_keys,
        }
    return arguments


def wrong_head_dims(request: KernelRequest) -> str | None:
    """Refuse head dims for which kernels of this GPU's generation, or of Hopper without one, are wrong.

    On an H200, the gradient of q was wrong without an error for head dims 16, 48, 72, 80 and 112. Values wider than
    keys (64 and 128) raised an error. Multiples of 32 were right.
    """
    dims = request.head_dim, request.value_dim
    given = f"head_dim={dims[0]}, v_head_dim={dims[1]}"
    if any(dim % 32 or dim < 32 for dim in dims):
        return f"{given} are not supported, only multiples of 32: with others its gradients are wrong"
    if dims[1] > dims[0]:
        return f"{given} are not supported, only values that are no wider than keys"
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
    if dims[0] <= (256 if hopper else 128) or dims in ((192, 128), (256, 256)):
        return None
    return f"{given} are not supported, only up to {'256' if hopper else '128, (192, 128) and (256, 256)'}"


def kept_in() -> Path:
    """Return the folder of compiled kernels."""
    return Path(os.environ.get(f"{_CACHE}_DIR") or cache_folder() / "fa4")


@functools.cache
def package_problem() -> str | None:
    """Return why the package `flash-attn-4` cannot be used, or None. Imports it, which takes some seconds."""
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return f"the package flash-attn-4 ({VERSION}) is not installed: pip install 'megatron-longctx[gpu]'"
    if version != VERSION:
        return f"flash-attn-4 {version} is not supported, only {VERSION}: its inner functions change between releases"
    try:
        _interface()
    except Exception as error:  # a package with missing parts fails in many ways, and none may stop `auto`
        return f"flash-attn-4 {version} is installed but cannot be imported ({type(error).__name__}: {error})"
    return None


@functools.cache
def _interface() -> ModuleType:
    os.environ.setdefault(f"{_CACHE}_ENABLED", "1")  # compiled kernels stay on disk, for the next process
    os.environ.setdefault(f"{_CACHE}_DIR", str(kept_in()))
    warnings.filterwarnings("ignore", "Argument aux_data", UserWarning)  # raised for every kernel that is compiled
    module = importlib.import_module("flash_attn.cute.interface")
    cache: Any = importlib.import_module("flash_attn.cute.cache_utils")
    if os.environ[f"{_CACHE}_ENABLED"] == "1":  # Megatron may have imported it before, without these settings
        cache.CUTE_DSL_CACHE_ENABLED, cache.CUTE_DSL_CACHE_DIR = True, os.environ[f"{_CACHE}_DIR"]
        for name, each in [pair for pair in vars(module).items() if hasattr(pair[1], "compile_cache")]:
            each.compile_cache = cache.get_jit_cache(name)
    return module
