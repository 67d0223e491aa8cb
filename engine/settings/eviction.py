"""The settings of the eviction of cached prefixes (docs/kv_cache.md)."""

from typing import Literal

from pydantic import BaseModel, ValidationInfo, field_validator

from sojourn.engine.memory.eviction import EVICTION_POLICIES
from sojourn.engine.settings.panels import MEMORY


class EvictionSettings(BaseModel):
    """Which cached block without readers makes room first."""

    eviction_policy: Literal[*EVICTION_POLICIES] = MEMORY(
        "lru", description="which cached block without readers makes room first; the outputs stay the same"
    )
    eviction_ttl_seconds: float | None = MEMORY(
        None,
        gt=0,
        le=31_536_000,
        validate_default=True,
        description="eviction_policy=ttl: idle time after which a cached block is freed, whether room is needed or not",
    )

    @field_validator("eviction_ttl_seconds")
    @classmethod
    def _belongs_to_ttl(cls, seconds: float | None, info: ValidationInfo) -> float | None:
        policy = info.data.get("eviction_policy")
        if policy is not None and (seconds is not None) != (policy == "ttl"):
            raise ValueError("eviction_policy=ttl and eviction_ttl_seconds go together; set both or neither")
        return seconds
