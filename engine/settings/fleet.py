"""The settings of a server that stands behind a router (docs/fleet.md)."""

import re
from typing import Literal

from pydantic import BaseModel, ValidationInfo, field_validator

from sojourn.engine.settings.panels import SERVER

BUFFER_BATCHES = 10_000
_ENDPOINT = re.compile(r"ipc://[^\s\0]{1,90}|tcp://(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):([0-9]{1,5})")


class FleetSettings(BaseModel):
    """Which events a router gets of the KV blocks that this server holds."""

    kv_events: str | None = SERVER(
        None,
        description="address at which routers subscribe to changes of the cached KV blocks, in vLLM's format over "
        "ZeroMQ, such as tcp://127.0.0.1:5557; port 0 takes a free one",
    )
    kv_events_replay: str | None = SERVER(
        None, description="kv_events: address at which a router asks for events that it missed"
    )
    kv_events_topic: str | None = SERVER(
        None, max_length=500, description="kv_events: topic of all events; by default an empty one"
    )
    kv_events_format: Literal["map", "array"] | None = SERVER(
        None,
        description="kv_events: an event is a map, as consumers of vLLM 0.24 and later expect, or an array, as those "
        "of older ones; by default map",
    )
    kv_events_buffer: int | None = SERVER(
        None,
        ge=1,
        le=10_000_000,
        description=f"kv_events_replay: batches of events that can be asked for again; by default {BUFFER_BATCHES:,}",
    )

    @field_validator("kv_events", "kv_events_replay")
    @classmethod
    def _is_an_endpoint(cls, endpoint: str | None, info: ValidationInfo) -> str | None:
        if endpoint is None:
            return None
        match = _ENDPOINT.fullmatch(endpoint)
        if match is None or int(match[2] or 0) > 65535:
            raise ValueError("give tcp://ADDRESS:PORT or ipc://PATH, such as tcp://127.0.0.1:5557")
        if info.field_name == "kv_events_replay" and endpoint == info.data.get("kv_events") and match[2] != "0":
            raise ValueError("kv_events has the same address; give another port")
        return endpoint

    @field_validator("kv_events_replay", "kv_events_topic", "kv_events_format")
    @classmethod
    def _belongs_to_events(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("kv_events", "") is None:
            raise ValueError("there are no KV events, as kv_events is not set; set it, or leave this out")
        return value

    @field_validator("kv_events_buffer")
    @classmethod
    def _belongs_to_replay(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("kv_events_replay", "") is None:
            raise ValueError("nobody can ask for it, as kv_events_replay is not set; set it, or leave this out")
        return value

    @field_validator("prefix_caching", check_fields=False)
    @classmethod
    def _events_need_prefixes(cls, caching: bool, info: ValidationInfo) -> bool:
        if not caching and info.data.get("kv_events") is not None:
            raise ValueError("KV events tell which prefixes are cached; switch prefix_caching on, or leave them out")
        return caching
