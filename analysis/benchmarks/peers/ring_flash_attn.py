"""The package ring-flash-attn: its schedules and communication, with this package's kernels."""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_longctx.core import layout

from ..cases import Case
from ..measure import Contender, Prepared
from . import check_parts
from .flash_attn import functions

RING, FLASH = "ring_flash_attn", "flash_attn"
NOTE = (
    "schedules and messages are the package's own. The kernels are this run's, called in place of flash-attn's: "
    "gradients are copied into the package's buffers."
)
_MODULES = ("ring_flash_attn", "zigzag_ring_flash_attn", "llama3_flash_attn_varlen")


@contextmanager
def _stand_ins(folders: list[str], kernel: str) -> Iterator[None]:
    """Replace `flash_attn` by the functions of this folder, and ring_flash_attn by a package with an empty `__init__`.

    The real `__init__` imports transformers, among others. Afterwards, `sys.modules` is unchanged, since others look
    for flash_attn.
    """

    def replaced() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] in (RING, FLASH)]

    package, flash, interface = ModuleType(RING), ModuleType(FLASH), ModuleType(f"{FLASH}.flash_attn_interface")
    package.__path__ = folders
    vars(interface).update(functions(kernel))
    before = {name: sys.modules.pop(name) for name in replaced()}
    try:
        sys.modules.update({module.__name__: module for module in (package, flash, interface)})
        yield
    finally:
        for name in replaced():
            del sys.modules[name]
        sys.modules.update(before)


def load(kernel: str) -> tuple[Any, Any, Any]:
    """Return private copies of ring_flash_attn, zigzag_ring_flash_attn and llama3_flash_attn_varlen on our kernel.

    Raises:
        ImportError: the package is not installed, or differs from 0.1.8.
    """
    spec = importlib.util.find_spec(RING)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {RING!r}")
    with _stand_ins(list(spec.submodule_search_locations), kernel):
        ring, zigzag, llama3 = (importlib.import_module(f"{RING}.{name}") for name in _MODULES)
    return ring, zigzag, llama3


def contenders(group: dist.ProcessGroup, kernel: str) -> list[Contender]:
    ring, zigzag, llama3 = load(kernel)
    return [
        Contender("ring-flash-attn, zigzag", partial(_ring, group, zigzag.zigzag_ring_flash_attn_func, True)),
        Contender("ring-flash-attn, ring", partial(_ring, group, ring.ring_flash_attn_func, False)),
        Contender("ring-flash-attn, llama3", partial(_llama3, group, llama3)),
    ]


def _ring(group: dist.ProcessGroup, attend: Callable[..., Any], zigzag: bool, case: Case) -> Prepared:
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    if len(case.documents) > 1 or case.window or (zigzag and not case.causal):
        raise ValueError(f"mask {case.name}: expected causal{'' if zigzag else ' or full'}")
    check_parts(case, 2 * n if zigzag else n)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        out: Tensor = attend(q, k, v, causal=case.causal, group=group)
        return out.transpose(0, 1)

    order = layout.zigzag if zigzag else layout.contiguous
    return Prepared(call, list(order(n, case.length).tokens(rank)))


def _llama3(group: dist.ProcessGroup, package: Any, case: Case) -> Prepared:
    """Prepare the function that gathers keys and values a few heads at a time, over contiguous parts of the pack."""
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    check_parts(case, 1)
    if case.window and not case.causal:
        raise ValueError(f"mask {case.name}: expected causal windows")
    if case.length % n:
        raise ValueError(f"{case.length} tokens: expected a multiple of {n}")
    bounds = torch.tensor(list(accumulate(case.documents, initial=0)), dtype=torch.int32)  # on the host: `functions`
    starts_q, starts_k, longest_q, longest_k, needed = package.llama3_flash_attn_prepare_cu_seqlens(
        bounds, causal=case.causal, rank=rank, world_size=n
    )
    window = -1 if case.window is None else case.window

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = package.llama3_flash_attn_varlen_func(
            *(x.squeeze(1) for x in (q, k, v)),
            starts_q,
            starts_k,
            longest_q,
            longest_k,
            heads_k_stride=math.gcd(case.num_kv_heads, 4),
            local_k_slice=needed,
            causal=case.causal,
            window_size=(window, 0 if case.causal and case.window else window),
            group=group,
        )
        return out.unsqueeze(1)

    return Prepared(call, list(layout.contiguous(n, case.length).tokens(rank)))
