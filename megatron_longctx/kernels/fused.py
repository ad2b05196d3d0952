"""What functions in plain PyTorch and their Triton twins share: finding the twin, sizes and strides as its kernels take
them, and launching these again."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_MOST_ROWS = 2048
"""Of one program, at most."""
_compiled: dict[Hashable, Any] = {}


@functools.cache
def fused(name: str, work: str) -> ModuleType | None:
    """The module `NAME_triton` beside the module `name`; None, which is said once, where triton cannot be imported.
    work: what plain PyTorch then does."""
    try:
        return importlib.import_module(f"{name}_triton")
    except ImportError as error:
        logger.warning("%s in plain PyTorch, which is slower: triton cannot be imported (%s)", work, error)
        return None


def row_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of all dimensions but the last; 0 for those of size 1, whose only index is 0.

    Triton compiles a kernel anew where a stride begins or ceases to be 1 or a multiple of 16, and a dimension of size 1
    may have any stride.
    """
    sizes, strides = x.shape, x.stride()
    return tuple([strides[i] if sizes[i] > 1 else 0 for i in range(len(strides) - 1)])


def few_rows(x: Tensor) -> bool:
    """Whether the rows of `[s, b, h, d]` are counted in 32 bits: those that the last program has too many as well."""
    return x.shape[:3].numel() <= 2**31 - _MOST_ROWS


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Tensor | int], constants: Mapping[str, int], kind: Hashable,
    **options: int,
) -> None:  # fmt: skip
    """Launch on the current device and stream, from the second time on without Triton's look at every argument, which
    takes as long as 20 of them are many: it finds out from an argument's type, and from whether 16 divides it, which
    compiled kernel it needs.

    Args:
        kernel: of `triton.jit`; its constants come after its other arguments.
        kind: differs wherever Triton would compile for these arguments another kernel than before.
        options: of the compiler, e.g. num_warps.
    """
    key = kernel, torch.cuda.current_device() if torch.cuda.is_available() else -1, kind, tuple(constants.values())
    known = _compiled.get(key)
    if known is not None:
        known[(*grid, *(1,) * (3 - len(grid)))](*arguments, *constants.values())
        return
    compiled = kernel[grid](*arguments, **constants, **options)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled


def kind_of(argument: Tensor | int) -> Hashable:
    """What Triton tells apart: of integers 1, multiples of 16, and those that take 64 bits; of tensors their dtype, and
    whether their address is a multiple of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return 1 if argument == 1 else 2 * (argument % 16 == 0) + 4 * (not -(2**31) <= argument < 2**31)
