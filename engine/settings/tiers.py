"""The settings of KV tiers below the device (docs/kv_cache.md)."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationInfo, field_validator

from sojourn.engine.settings.panels import MEMORY

STAGING_GIB = 1.0  # host memory of a disk tier without kv_host_gib
DISK_GIB = 16.0  # of a disk tier without kv_disk_gib


class KVTierSettings(BaseModel):
    """Where KV blocks go that the device has no room for, and when they are stored."""

    kv_host_gib: float | None = MEMORY(
        None,
        gt=0,
        le=1_048_576,
        description="GiB of host memory that keep KV blocks below the device; beside another tier 1 by default",
    )
    kv_disk_path: Path | None = MEMORY(
        None, description="folder that keeps KV blocks in files, also over restarts; one server at a time uses it"
    )
    kv_disk_gib: float | None = MEMORY(
        None, gt=0, le=1_048_576, description="GiB of those files for one model; by default 16"
    )
    kv_remote_url: str | None = MEMORY(
        None, description="LMCache's cache server that keeps KV blocks for several engines, as lm://host:port"
    )
    kv_store_policy: Literal["fill", "reuse", "evict"] | None = MEMORY(
        None,
        description="when a block goes to the tiers: when it is full, when a second request reads it, or when the "
        "device evicts it; by default fill",
    )

    @field_validator("kv_disk_gib")
    @classmethod
    def _belongs_to_a_disk(cls, size: float | None, info: ValidationInfo) -> float | None:
        if size is not None and info.data.get("kv_disk_path", "") is None:
            raise ValueError("there is no disk tier, as kv_disk_path is not set; set it, or leave this out")
        return size

    @field_validator("kv_remote_url")
    @classmethod
    def _is_a_cache_server(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"lm://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]):[0-9]{1,5}", url):
            raise ValueError("give the address of LMCache's cache server, such as lm://127.0.0.1:8100")
        return url

    @field_validator("kv_store_policy")
    @classmethod
    def _belongs_to_tiers(cls, policy: str | None, info: ValidationInfo) -> str | None:
        if policy is not None and not has_tiers(info.data):
            raise ValueError("there is no KV tier; set kv_host_gib, kv_disk_path or kv_remote_url, or leave this out")
        return policy

    @field_validator("prefix_caching", check_fields=False)
    @classmethod
    def _tiers_need_prefixes(cls, caching: bool, info: ValidationInfo) -> bool:
        if not caching and has_tiers(info.data):
            raise ValueError("KV tiers hold blocks by their prefix; switch prefix_caching on, or leave the tiers out")
        return caching


def has_tiers(settings: Mapping[str, Any]) -> bool:
    """Whether the settings name a tier below the device, or need host memory as the way to other servers."""
    names = ("kv_host_gib", "kv_disk_path", "kv_remote_url", "kv_role")
    return any(settings.get(name) is not None for name in names)


def stores_on(settings: Mapping[str, Any]) -> str | None:
    """When a block goes to the tiers, without those that other servers want; None: never."""
    only_for_others = all(settings.get(name) is None for name in ("kv_host_gib", "kv_disk_path", "kv_remote_url"))
    return settings.get("kv_store_policy") or (None if only_for_others else "fill")
