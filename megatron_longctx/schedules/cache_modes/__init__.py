"""Modes of new queries over cached and new keys, one file each: a function of the file's name gives the plan.

They differ from modes of training in that queries and keys have layouts of their own, and in what travels. Adding one
is adding a file here.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules

from ..plan import Block, Plan
from ..visibility import Visibility

CacheMode = Callable[[Visibility, Sequence[Sequence[Block]]], Plan]
"""From what is seen, and every rank's keys as blocks in the order of their positions, to a plan."""

CACHE_MODES: dict[str, CacheMode] = {
    found.name: getattr(import_module(f"{__name__}.{found.name}"), found.name)
    for found in iter_modules(__path__)
    if not found.name.startswith("_")
}
