"""Context-parallel attention for Megatron-Core, for training and serving LLMs on 64K to millions of tokens.

A parallelism mode is a plan, and a plan is data: see `docs/architecture.md` for the wings and their law. The three
names below need torch and numpy alone; `docs/api.rst` describes them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.attention import ContextParallelAttention as ContextParallelAttention
    from .core.layout import Layout as Layout
    from .core.plans import Mask as Mask

__version__ = "0.1.0"
__all__ = ["ContextParallelAttention", "Layout", "Mask"]

_ON_FIRST_USE = {"ContextParallelAttention": "core.attention", "Layout": "core.layout", "Mask": "core.plans"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use: commands that need no attention start without torch."""
    if name not in _ON_FIRST_USE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ON_FIRST_USE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
