"""Parallelism modes, one file each. A mode has its layout, its plan, its options and its candidates for `auto`.

To add a mode, add a file here: every class in it with a `name` is registered.
"""

from importlib import import_module
from pkgutil import iter_modules

from .mode import MODES, Mode, ModeOptions, SearchContext, check_messages, find_mode, outer_modes

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
