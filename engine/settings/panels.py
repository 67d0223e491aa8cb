"""The panels of `sojourn serve --help`: `Field` for a setting of each."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import Field


def _panel(title: str) -> Callable[..., Any]:
    return partial(Field, json_schema_extra={"panel": title})


SERVER, TOKEN, COMPUTE = _panel("Server"), _panel("Model and tokens"), _panel("Compute")
MEMORY, REQUEST, TELEMETRY = _panel("Memory"), _panel("Requests and scheduling"), _panel("Telemetry")
EXPERIMENTS = _panel("Experiments")
