"""The techniques around the heart, each in a folder of its own. The heart calls them through two protocols: their
planning halves in the loop, their computing halves in the runner.

A folder is imported by name, and only where the settings ask for it: without it everything else works.
"""

from importlib import import_module
from types import ModuleType

from sojourn.metrics.errors import ModelError

# As their computing halves are called.
NAMES = ("lora", "grammar", "tiers", "handover", "speculation", "group")


def load(name: str, module: str) -> ModuleType:
    """A module of a technique that settings or a request ask for. Raises ModelError where it cannot be had."""
    try:
        return import_module(f"{__name__}.{name}.{module}")
    except ImportError as error:
        raise ModelError(
            f"{name} is asked for, and this installation cannot load it ({error}); install it, or leave it out"
        ) from None
