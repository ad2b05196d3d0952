"""Launching a Triton kernel again without Triton's look at every argument, which takes as long as 20 of them are many.

Triton finds out from an argument's type, and from whether 16 divides it, which compiled kernel it needs. What is
launched thousands of times with the same kinds of arguments need not ask again.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Tensor | int], constants: Mapping[str, int], kind: Hashable,
    **options: int,
) -> None:  # fmt: skip
    """Launch on the current device and stream.

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
