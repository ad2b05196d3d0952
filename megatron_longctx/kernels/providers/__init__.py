"""Kernel providers, one file each or a few that share one: every class with a `name` is found by it.

Adding one is adding a file here.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
