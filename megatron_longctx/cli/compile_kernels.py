"""`doctor --compile`: compiles the FlashAttention-4 kernels of a recipe into the cache on disk, also without a GPU."""

import os
import time
from collections.abc import Sequence
from itertools import product

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # FlashAttention-4 then compiles without calling

from ..config import Config
from ..config.progress import Progress, duration
from ..core.cache import cache_folder
from ..core.errors import refuse
from ..core.kernels import CallKind
from ..core.kernels.packed import Segments
from ..core.kernels.providers import fa4
from ..core.plans.kernel_calls import KernelCall
from ..training.compose import compose_config

_HOPPER = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
"""The package's own settings, with which it compiles for another machine: those of an H100 or H200."""
_DEVICE = "cuda"


class _Compiler(fa4.Fa4Kernel):
    """Is called with tensors that have no data."""

    def prepare(self, call: KernelCall, rows: tuple[int, int], device: torch.device) -> Segments | None:
        if len(call.segments) == 1:
            return None
        starts = torch.zeros(len(call.segments) + 1, dtype=torch.int32, device=device)
        return Segments(starts, starts, call.most_queries, call.most_keys, None, None)


def compile_kernels(settings: Sequence[str]) -> None:
    """Compile what the recipe's attention calls, for the GPU of this host, or for an H100 or H200 if it has none.

    Refuse `--compile` without the package `flash-attn-4`.
    """
    config = compose_config(settings)
    if not torch.cuda.is_available():
        for name, value in _HOPPER.items():
            os.environ.setdefault(name, value)
    if problem := fa4.package_problem():
        raise refuse("--compile", "on", f"FlashAttention-4: {problem}", "Install it, or leave --compile out.")
    kinds, begin = kinds_of(config), time.monotonic()
    with Progress("compiling", 2 * len(kinds), "kinds of calls") as progress:
        for kind, backward in progress.each(list(product(kinds, (False, True)))):
            try:
                _compile(config, kind, backward)
            except AssertionError as error:  # with which the package refuses what it cannot compile
                expected = f"a recipe whose attention FlashAttention-4 computes ({error})"
                raise refuse("--compile", " ".join(settings), expected, "Leave --compile out.") from error
    kept = len(list((cache_folder() / "fa4").rglob("*.o")))
    print(f"compiled or found in {duration(time.monotonic() - begin)}; {cache_folder() / 'fa4'} has {kept} kernels")


def kinds_of(config: Config) -> list[CallKind]:
    """Return the kinds of calls of any mode and any documents: dense and packed, full, causal and with windows."""
    return list(map(CallKind._make, product((False, True), {False, config.model.window is not None}, (True, False))))


def _compile(config: Config, kind: CallKind, backward: bool) -> None:
    model, tp = config.model, config.parallelism.tensor_parallel_size
    kernel, call = _Compiler(deterministic=config.attention.deterministic), kind.example
    heads, kv_heads, (_, rows) = model.num_attention_heads // tp, max(1, model.num_kv_heads // tp), call.q_span
    d, e = model.kv_channels, model.v_head_dim or model.kv_channels
    with FakeTensorMode():
        q, k, v, out = (
            torch.empty(rows, 1, count, size, dtype=torch.bfloat16, device=_DEVICE)
            for count, size in ((heads, d), (kv_heads, d), (kv_heads, e), (heads, e))
        )
        if backward:
            lse = torch.empty(1, heads, rows, device=_DEVICE).permute(2, 0, 1)
            kernel.backward(out, q, k, v, out, lse, call, scale=d**-0.5)
        else:
            kernel.forward(q, k, v, call, scale=d**-0.5)
