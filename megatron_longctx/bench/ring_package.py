"""The package ring-flash-attn on the kernels of this run: its schedules and communication, our kernel calls."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..layout import Layout
from .attention import Call, Case, Contender
from .flash_attn_interface import functions
from .whole_parts import batch_first, whole_parts

RING, FLASH = "ring_flash_attn", "flash_attn"

NOTE = (
    "Schedules and messages are the package's own. The kernels are those of this run, called in place of flash-attn's: "
    "gradients are copied into the package's buffers, and llama3's one call over more keys than queries is made as two "
    "(all seen, and causal) whose results are merged."
)

_MODULES = ("ring_flash_attn", "zigzag_ring_flash_attn", "llama3_flash_attn_varlen")


@contextmanager
def _stand_ins(folders: list[str], kernel: str) -> Iterator[None]:
    """Within, `flash_attn` has the functions of `flash_attn_interface`, and ring_flash_attn is a package without what
    its `__init__` imports (transformers, for one). After, `sys.modules` is as it was: others look for flash_attn."""

    def concerned() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] in (RING, FLASH)]

    package, flash, interface = ModuleType(RING), ModuleType(FLASH), ModuleType(f"{FLASH}.flash_attn_interface")
    package.__path__ = folders
    vars(interface).update(functions(kernel))
    before = {name: sys.modules.pop(name) for name in concerned()}
    try:
        sys.modules.update({module.__name__: module for module in (package, flash, interface)})
        yield
    finally:
        for name in concerned():
            del sys.modules[name]
        sys.modules.update(before)


def load(kernel: str) -> tuple[Any, Any, Any]:
    """The package's modules ring_flash_attn, zigzag_ring_flash_attn and llama3_flash_attn_varlen, calling the kernel
    named `kernel`. They are this caller's own: nobody who imports them gets these.

    Raises:
        ImportError: the package is not installed, or is not as it was in 0.1.8.
    """
    spec = importlib.util.find_spec(RING)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {RING!r}")
    with _stand_ins(list(spec.submodule_search_locations), kernel):
        ring, zigzag, llama3 = (importlib.import_module(f"{RING}.{name}") for name in _MODULES)
    return ring, zigzag, llama3


def ring_flash_attn(group: dist.ProcessGroup, kernel: str) -> list[Contender]:
    """Its contenders.

    Raises:
        ImportError: as `load`.
    """
    ring, zigzag, llama3 = load(kernel)
    return [
        Contender("ring-flash-attn, zigzag", partial(_ring, group, zigzag.zigzag_ring_flash_attn_func, "zigzag")),
        Contender("ring-flash-attn, ring", partial(_ring, group, ring.ring_flash_attn_func, "contiguous")),
        Contender("ring-flash-attn, llama3", partial(_llama3, group, llama3)),
    ]


def _ring(group: dist.ProcessGroup, attend: Callable[..., Any], layout: str, case: Case) -> tuple[Call, Layout]:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend(*map(batch_first, (q, k, v)), causal=True, group=group)
        return out.transpose(0, 1)

    return call, whole_parts(group, layout, case)


def _llama3(group: dist.ProcessGroup, package: Any, case: Case) -> tuple[Call, Layout]:
    """Keys and values are gathered some heads at a time; `[tokens, heads, d]` of one sequence in contiguous parts."""
    layout = whole_parts(group, "contiguous", case)
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    bounds = torch.tensor([0, case.length], dtype=torch.int32, device=device)
    starts_q, starts_k, longest_q, longest_k, needed = package.llama3_flash_attn_prepare_cu_seqlens(
        bounds, causal=True, rank=rank, world_size=n
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = package.llama3_flash_attn_varlen_func(
            *(x.squeeze(1) for x in (q, k, v)),
            starts_q,
            starts_k,
            longest_q,
            longest_k,
            heads_k_stride=math.gcd(case.num_kv_heads, 4),
            local_k_slice=needed,
            causal=True,
            group=group,
        )
        return out.unsqueeze(1)

    return call, layout
