"""Causes: one function each, over the facts of a run. Every module of this folder is imported, and so registered."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
