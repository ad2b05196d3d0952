"""`doctor --compile`: compiles the FlashAttention-4 kernels of a recipe into the cache on disk, also without a GPU."""

import os
import time
from collections.abc import Sequence
from itertools import product

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # FlashAttention-4 then compiles without calling

from ..config import Config
from ..config.progress import Progress, duration
from ..core.attention.function import KernelKind, call_example
from ..core.errors import refuse
from ..core.kernels import CallKind, KernelRequest
from ..core.kernels.packed import Segments
from ..core.kernels.providers import fa4
from ..core.plans.kernel_calls import KernelCall
from ..training.compose import compose_config

_HOPPER = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
"""The package's own settings, with which it compiles for another machine: those of an H100 or H200."""
_KEEPS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_DEVICE = torch.device("cuda")


class _Compiler(fa4.Fa4Kernel):
    """Is called with tensors that have no data, which cannot be copied to a device."""

    def prepare(self, call: KernelCall, rows: tuple[int, int], device: torch.device) -> Segments | None:
        if len(call.segments) == 1:
            return None
        starts = torch.zeros(len(call.segments) + 1, dtype=torch.int32, device=device)
        return Segments(starts, starts, call.most_queries, call.most_keys, None, None)


def compile_kernels(settings: Sequence[str]) -> None:
    """Compile what the recipe's attention calls, for the GPU of this host, or for an H100 or H200 if it has none.

    Refuse if `flash-attn-4` cannot be used, keeps nothing, or does not compute the recipe's attention.
    """
    config = compose_config(settings)
    if not torch.cuda.is_available():
        for name, value in _HOPPER.items():
            os.environ.setdefault(name, value)
    if os.environ.get(_KEEPS, "1") != "1":
        raise refuse(_KEEPS, os.environ[_KEEPS], "1, so that kernels are kept", "Unset it.")
    model, tp = config.model, config.parallelism.tensor_parallel_size
    heads = model.num_attention_heads // tp, max(1, model.num_kv_heads // tp)
    dims = model.kv_channels, model.v_head_dim or model.kv_channels
    request = KernelRequest("cuda", torch.bfloat16, dims[0], *heads, v_head_dim=dims[1])
    if problem := fa4.package_problem() or fa4.wrong_head_dims(request):
        given, expected = " ".join(settings) or "the default recipe", f"what FlashAttention-4 computes here; {problem}"
        raise refuse("--compile", given, expected, "Leave --compile out.")
    kernel, begin = _Compiler(deterministic=config.attention.deterministic), time.monotonic()
    kinds = [KernelKind(backward, kind, heads) for kind, backward in product(kinds_of(config), (False, True))]
    with Progress("compiling", len(kinds), "kinds of calls") as progress, FakeTensorMode():
        for kind in progress.each(kinds):
            call_example(kernel, kind, dims, torch.bfloat16, _DEVICE)
    kept = len(list(fa4.kept_in().rglob("*.o")))
    print(f"compiled or found in {duration(time.monotonic() - begin)}; {fa4.kept_in()} has {kept} kernels")


def kinds_of(config: Config) -> list[CallKind]:
    """Return the kinds of calls of any mode and any documents: dense and packed, full, causal and with windows."""
    return list(map(CallKind._make, product((False, True), {False, config.model.window is not None}, (True, False))))
