"""The Triton twins of functions in plain PyTorch."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

logger = logging.getLogger(__name__)


@functools.cache
def fused(name: str, work: str) -> ModuleType | None:
    """The module `NAME_triton` beside the module `name`; None, which is said once, where triton cannot be imported.
    work: what plain PyTorch then does."""
    try:
        return importlib.import_module(f"{name}_triton")
    except ImportError as error:
        logger.warning("%s in plain PyTorch, which is slower: triton cannot be imported (%s)", work, error)
        return None
