"""Whether the server's classes are those that the probe was written for. It asks before it touches anything."""

import inspect
from collections.abc import Callable
from typing import Any


def misfit(owner: Any, method: str, parameters: tuple[str, ...]) -> str | None:
    """Why a method cannot be recorded, as a sentence; None if it has parameters of these names, in this order."""
    found: Callable[..., Any] | None = getattr(owner, method, None)
    name = f"{getattr(owner, '__name__', type(owner).__name__)}.{method}"
    if not callable(found):
        return f"{name} does not exist"
    try:
        known = [each for each in inspect.signature(found).parameters if each != "self"]
    except (TypeError, ValueError):
        return f"{name} shows no signature"
    if known[: len(parameters)] != list(parameters):
        return f"{name} takes ({', '.join(known)}), and the probe knows ({', '.join(parameters)})"
    return None
