"""Helpers for functions with a plain PyTorch and a fused Triton implementation."""

import functools
import importlib
import logging
from collections.abc import Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_compiled: dict[Hashable, Any] = {}


@functools.cache
def load_fused(name: str, work: str) -> ModuleType | None:
    """Import the module `NAME_triton` beside the module `name`; log and return None if triton cannot be imported.

    work: the subject of the log line, which plain PyTorch then computes.
    """
    try:
        return importlib.import_module(f"{name}_triton")
    except ImportError as error:
        logger.warning("%s in plain PyTorch, which is slower: triton cannot be imported (%s)", work, error)
        return None


def row_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of all dimensions but the last, with 0 for dimensions of size 1, whose strides are arbitrary.

    Triton compiles a new variant of a kernel if a stride begins or ceases to be 1 or a multiple of 16.
    """
    sizes, strides = x.shape, x.stride()
    return tuple([strides[i] if sizes[i] > 1 else 0 for i in range(len(strides) - 1)])


def launch(
    kernel: Any, grid: tuple[int, ...], arguments: Sequence[Tensor | float], constants: Mapping[str, int],
    specialization: Hashable = None, **options: int,
) -> None:  # fmt: skip
    """Launch a kernel on the device of its first argument, a tensor; skip Triton's argument inspection from then on.

    Triton derives the compiled variant from all arguments. With many of them this takes as long as 20 launches.

    kernel: a `triton.jit` function whose constants come last, in the order of `constants`.
    specialization: a key that differs whenever Triton would compile another variant for these arguments; by default
        `specialization_of` each of them.
    options: compiler options, e.g. num_warps.
    """
    if specialization is None:
        specialization = tuple([specialization_of(x) if isinstance(x, Tensor) else _of_number(x) for x in arguments])
    assert isinstance(arguments[0], Tensor)
    device = arguments[0].get_device()
    key = kernel, device, specialization, tuple(constants.values()), tuple(options.values())
    known = _compiled.get(key)
    # Triton launches on the current device, which may not be the tensors'. A CPU tensor's index, -1, has no effect.
    with torch.cuda.device(device):
        if known is not None:
            known[(*grid, *(1,) * (3 - len(grid)))](*arguments, *constants.values())
            return
        compiled = kernel[grid](*arguments, **constants, **options)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled


def specialization_of(argument: Tensor | float) -> Hashable:
    """Return the properties by which Triton selects a variant: of tensors the dtype and alignment, of integers being 1,
    a multiple of 16, or 64-bit."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return _of_number(argument)


@functools.lru_cache(maxsize=2**16)
def _of_number(x: float) -> int:
    return 1 if x == 1 else 2 * (x % 16 == 0) + 4 * (not -(2**31) <= x < 2**31)
