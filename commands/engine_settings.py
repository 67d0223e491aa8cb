"""The engine's settings as verbs take them, checked before anything starts."""

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from commands.frame import Failure
from engine.config import EngineConfig, complaint

if TYPE_CHECKING:
    from loadgen.scenario.scenario import Scenario


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """The engine's settings, checked. Raises Failure with the first fault."""
    try:
        return EngineConfig(**settings)
    except ValidationError as error:
        raise Failure(complaint(error), code=2) from None


def check_engine_block(scenario: "Scenario", overrides: dict[str, Any] | None = None) -> None:
    """Raises Failure for a setting that `run` would refuse, also where nothing is started. The model may be missing."""
    engine_config({"model": "tiny-model"} | scenario.engine | (overrides or {}))
