"""Parallelism modes, one file each: a mode owns its layout, its plan, its options and its candidates for `auto`.

Adding one is adding a file here: every class in it with a `name` is found by it.
"""

from importlib import import_module
from pkgutil import iter_modules

from .mode import MODES, Choices, Mode, ModeOptions, check_messages, find_mode, outer_modes

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
