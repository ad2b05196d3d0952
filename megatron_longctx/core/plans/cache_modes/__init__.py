"""Modes for new queries over cached and new keys, one file each: the function with the file's name returns the plan.

They differ from training modes in that queries and keys have separate layouts, and in what travels. To add a mode, add
a file here.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules

from ..plan import Block, Plan
from ..visibility import Visibility

CacheMode = Callable[[Visibility, Sequence[Sequence[Block]]], Plan]
"""A function from a visibility and every rank's keys, as blocks in the order of their positions, to a plan."""

CACHE_MODES: dict[str, CacheMode] = {
    module.name: getattr(import_module(f"{__name__}.{module.name}"), module.name)
    for module in iter_modules(__path__)
    if not module.name.startswith("_")
}
