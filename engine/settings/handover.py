"""The settings of prefill and decode servers (docs/disaggregation.md)."""

import ipaddress
import re
from typing import Any, Literal

from pydantic import BaseModel, ValidationInfo, field_validator

from sojourn.engine.settings.panels import MEMORY

LEASE_SECONDS = 30.0
LOOPBACK = "127.0.0.1"
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:]{2,45}")


class KVTransferSettings(BaseModel):
    """Which part of a request this server computes, and how KV blocks get from one server to the next."""

    kv_role: Literal["prefill", "decode", "both"] | None = MEMORY(
        None,
        description="prefill: computes prompts whose KV blocks a decode server reads; decode: reads them; by default "
        "the server computes whole requests, and refuses kv_transfer_params",
    )
    kv_transport: Literal["shm", "nixl"] | None = MEMORY(
        None,
        description="kv_role: how blocks are read; shm, the default, from shared memory on one host; nixl by NIXL over "
        "UCX, also from other hosts",
    )
    kv_transfer_host: str | None = MEMORY(
        None, description="kv_role: address of the side channel at which decode servers ask; by default 127.0.0.1"
    )
    kv_transfer_port: int | None = MEMORY(
        None, ge=0, le=65535, description="kv_role: port of the side channel; 0, the default, takes a free one"
    )
    kv_transfer_granularity: Literal["whole", "chunk"] | None = MEMORY(
        None,
        description="kv_role: when a decode server may read a prompt that both servers got at once; chunk, the "
        "default, the blocks of each step while the next ones are computed; whole once all are",
    )
    kv_lease_seconds: float | None = MEMORY(
        None,
        ge=0.5,
        le=3600,
        description=f"kv_role: time for which a prefill server holds the blocks of a prompt; by default "
        f"{LEASE_SECONDS:g}",
    )
    kv_transfer_failure: Literal["recompute", "error"] | None = MEMORY(
        None,
        description="kv_role: what a decode server does if blocks cannot be read: it computes the prompt, which is the "
        "default, or answers with an error",
    )
    kv_peers: str | None = MEMORY(
        None,
        description="kv_role: hosts from which a decode server reads, with commas between them; by default the "
        "loopback addresses",
    )

    @field_validator("kv_transfer_host")
    @classmethod
    def _is_a_host(cls, host: str | None) -> str | None:
        if host is not None and not _HOST.fullmatch(host):
            raise ValueError("give an address or a host name without scheme and port, such as 127.0.0.1")
        return host

    @field_validator("kv_peers")
    @classmethod
    def _are_peers(cls, hosts: str | None) -> str | None:
        for host in (hosts or "").split(",") if hosts is not None else ():
            if not _HOST.fullmatch(host.strip()):
                raise ValueError(f"{host.strip()!r} is no host; give addresses or names, such as 10.0.0.7,prefill-1")
        return hosts

    @field_validator(
        "kv_transport", "kv_transfer_host", "kv_transfer_port", "kv_transfer_granularity", "kv_lease_seconds",
        "kv_transfer_failure", "kv_peers",
    )  # fmt: skip
    @classmethod
    def _belongs_to_a_role(cls, value: Any, info: ValidationInfo) -> Any:
        role = info.data.get("kv_role", "both")
        if value is not None and role is None:
            raise ValueError("this server has no part in KV transfers; set kv_role, or leave this out")
        return value

    @field_validator("prefix_caching", check_fields=False)
    @classmethod
    def _blocks_need_keys(cls, caching: bool, info: ValidationInfo) -> bool:
        if not caching and info.data.get("kv_role") is not None:
            raise ValueError("kv_role finds blocks by their prefix; switch prefix_caching on, or leave kv_role out")
        return caching


def gives(role: str | None) -> bool:
    """Whether other servers read blocks that this one computed."""
    return role in ("prefill", "both")


def takes(role: str | None) -> bool:
    """Whether this server reads blocks that others computed."""
    return role in ("decode", "both")


def may_read_from(peers: str | None, host: str) -> bool:
    """Whether a decode server may read from a host that a request names."""
    if peers is not None:
        return host in [each.strip() for each in peers.split(",")]
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
