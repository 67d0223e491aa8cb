"""The settings of how keys and values are stored, and which of them are read."""

from typing import Literal

from pydantic import BaseModel, ValidationInfo, field_validator

from sojourn.engine.settings.panels import COMPUTE, MEMORY

DEFAULT_SINKS = 4  # what Xiao et al. (2023) need for all models that they measure


class KVCacheSettings(BaseModel):
    kv_cache_dtype: Literal["auto", "fp8", "int8", "int4"] = MEMORY(
        "auto",
        description="format of keys and values; auto is dtype; fp8 and int8 hold two to four times the tokens, int4 "
        "three to six times; each changes the outputs a little",
    )
    attention_window: int | None = COMPUTE(
        None,
        ge=1,
        description="last tokens that each token sees, for a model without windows; changes the outputs, and long "
        "requests hold no more blocks than the window needs",
    )
    attention_sinks: int | None = COMPUTE(
        None, ge=0, le=1024, description="with attention_window: first tokens that all tokens see; by default 4"
    )

    @field_validator("attention_sinks")
    @classmethod
    def _beside_a_window(cls, sinks: int | None, info: ValidationInfo) -> int | None:
        if sinks is not None and info.data.get("attention_window", 1) is None:
            raise ValueError("it needs attention_window: without one all tokens are seen anyway; set that, too")
        return sinks

    @property
    def window_and_sinks(self) -> tuple[int, int] | None:
        """Tokens of the window that is laid over a model's attention, and of the sinks; None: the model's own."""
        if self.attention_window is None:
            return None
        return self.attention_window, DEFAULT_SINKS if self.attention_sinks is None else self.attention_sinks

    @property
    def changes_outputs(self) -> list[str]:
        """The settings by which outputs differ from the model's own, as name=value."""
        changes = [] if self.kv_cache_dtype == "auto" else [f"kv_cache_dtype={self.kv_cache_dtype}"]
        if self.window_and_sinks is not None:
            changes += [f"attention_window={self.attention_window}", f"attention_sinks={self.window_and_sinks[1]}"]
        return changes
