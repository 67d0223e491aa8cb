"""The engine's settings as verbs take them, checked before anything starts."""

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from engine.config import EngineConfig, complaint
from metrics.errors import InputError

if TYPE_CHECKING:
    from loadgen.scenario.scenario import Scenario


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """The engine's settings, checked. Raises InputError with the first fault."""
    try:
        return EngineConfig(**settings)
    except ValidationError as error:
        raise InputError(complaint(error)) from None


def check_engine_block(scenario: "Scenario", overrides: dict[str, Any] | None = None) -> None:
    """Raises InputError for a setting that `run` would refuse, even if no engine starts. The model may be missing."""
    engine_config({"model": "tiny-model"} | scenario.engine | (overrides or {}))
