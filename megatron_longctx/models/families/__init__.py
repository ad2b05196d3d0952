"""Families of published models, one file each, whose `FAMILY` says all of it. Adding one is adding a file here."""

from importlib import import_module
from pkgutil import iter_modules

from ..family import Family

FAMILIES: tuple[Family, ...] = tuple(
    import_module(f"{__name__}.{found.name}").FAMILY for found in iter_modules(__path__)
)
