"""All causes, one file each, under its key. A file that is added here is a cause; no other place lists it."""

from importlib import import_module
from pkgutil import iter_modules

from sojourn.diagnosis.cause import Cause

CAUSES: dict[str, Cause] = {
    module.name: import_module(f"{__name__}.{module.name}").CAUSE for module in iter_modules(__path__)
}
