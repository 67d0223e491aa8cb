"""The settings of several models behind one front, and of models that sleep (docs/cold_start.md)."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationInfo, field_validator

from sojourn.engine.settings.named_paths import checked_names, named_pairs
from sojourn.engine.settings.panels import MEMORY, REQUEST, TOKEN

# Settings that are of one model, or that one core has for itself.
OF_ONE_MODEL = (
    "lora_adapters", "lora_runtime_loading", "usage_dir", "kv_disk_path", "kv_remote_url", "kv_role", "kv_events",
    "faults",
)  # fmt: skip


class ModelsSettings(BaseModel):
    """Which models one front serves, how much memory they get, and how long requests wait for one."""

    models: dict[str, Path] = TOKEN(
        {}, description="NAME=FOLDER of a further model, repeatable: loaded when a request names it as its model"
    )
    models_gib: float | None = MEMORY(
        None,
        gt=0,
        le=1_048_576,
        description="GiB that all models may plan together; idle ones sleep, or go, where another needs room",
    )
    model_idle_seconds: float | None = MEMORY(
        None, gt=0, le=31_536_000, description="idle time after which a model sleeps: it gives back its KV pool"
    )
    model_queue: int = REQUEST(
        64, ge=1, le=1_000_000, description="calls that may wait until one model is loaded or woken; more get 429"
    )
    model_wait_seconds: float = REQUEST(
        300, gt=0, le=86_400, description="time that a call waits until its model is loaded or woken, or 503"
    )

    @field_validator("models", mode="before")
    @classmethod
    def _are_pairs(cls, value: Any) -> Any:
        return named_pairs(value, "models")

    @field_validator("models")
    @classmethod
    def _have_names(cls, value: dict[str, Path]) -> dict[str, Path]:
        return checked_names(value, "a model")

    @field_validator("models_gib")
    @classmethod
    def _needs_models(cls, size: float | None, info: ValidationInfo) -> float | None:
        if size is not None and not info.data.get("models", True):
            raise ValueError("there is one model, and its plan has its own bound; set models, or kv_cache_gib")
        return size

    @field_validator(*OF_ONE_MODEL, check_fields=False)
    @classmethod
    def _is_of_one_model(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("models"):
            raise ValueError("it is of one model, and models names others; leave one of the two out")
        return value
