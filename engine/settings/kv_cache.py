"""The settings of how keys and values are stored."""

from typing import Literal

from pydantic import BaseModel

from engine.settings.panels import MEMORY


class KVCacheSettings(BaseModel):
    kv_cache_dtype: Literal["auto", "fp8", "int8", "int4"] = MEMORY(
        "auto",
        description="format of keys and values; auto is dtype; fp8 and int8 hold two to four times the tokens, int4 "
        "three to six times; each changes the outputs a little",
    )
