"""Values of a `quantization_config`, checked."""

import re
from collections.abc import Iterable
from typing import Any

from sojourn.engine.token.models.settings import count, shown
from sojourn.metrics.errors import ModelError


def word(config: dict[str, Any], key: str, known: Iterable[str], default: str | None = None) -> str:
    """One of the known words."""
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, str) or value not in (known := tuple(known)):
        raise ModelError(f"quantization_config has {key}={shown(value)}; supported are {', '.join(known)}")
    return value


def bits_of(config: dict[str, Any], supported: tuple[int, ...], key: str = "bits") -> int:
    bits = count(config, key)
    if bits not in supported:
        sizes = ", ".join(map(str, supported))
        raise ModelError(f"quantization_config has {key}={bits}; supported for this format are {sizes}")
    return bits


def group_of(config: dict[str, Any], key: str = "group_size") -> int | None:
    """Inputs that share a scale; None for -1: all inputs of an output."""
    return None if config.get(key) == -1 else count(config, key)


def skips(names: list[str], module: str) -> bool:
    """Whether a list of modules that stay as they are names this one: as a whole, or by a part of its path."""
    return any(name == module or name in module.split(".") or f".{name}." in f".{module}." for name in names)


def matches(targets: list[str], module: str) -> bool:
    """Whether a target of compressed-tensors means this module: its name, `re:` and an expression, or its class."""
    return any(_matches(str(target), module) for target in targets)


def _matches(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target in (module, "Linear")
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error as error:
        raise ModelError(
            f"quantization_config has the target {shown(target)}, which is no expression: {error}"
        ) from None
