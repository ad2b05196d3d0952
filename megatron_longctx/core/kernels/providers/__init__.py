"""Kernel providers. Importing this package registers every class with a `name` in its modules.

To add a provider, add a file here.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
