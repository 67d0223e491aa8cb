"""API keys: how they are made, stored and recognised.

A key is `sk-<id>-<secret>`. The secret has 256 random bits, so one SHA-256 without salt or stretching suffices: nobody
can guess it, and no two keys share a digest. A slow hash would let strangers occupy the server. The id is public: it
finds the entry, and the digests are then compared in constant time, against a digest of nothing for an unknown id.
"""

import hashlib
import hmac
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

_KEY = re.compile(r"sk-([0-9a-f]{12})-[A-Za-z0-9_-]{43}")
_NOBODY = hashlib.sha256(secrets.token_bytes(32)).hexdigest()

Scope = Literal["api", "metrics", "admin"]
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]{1,128}$")]


class KeyEntry(BaseModel):
    """One key as the file has it: never the key itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[0-9a-f]{12}$", description="public part of the key")
    tenant: TenantName
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="hexadecimal digest of the whole key")
    scope: Scope = Field(
        "api",
        description="api: no /metrics, /debug and loading of adapters; metrics: /metrics alone; admin: all",
    )
    created: str = Field("", description="day, for people")


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def create_key(tenant: str, scope: Scope = "api") -> tuple[str, KeyEntry]:
    """A new key, and what the file stores of it. Raises ValidationError for a bad tenant's name."""
    key_id = secrets.token_hex(6)
    key = f"sk-{key_id}-{secrets.token_urlsafe(32)}"
    created = time.strftime("%Y-%m-%d", time.gmtime())
    return key, KeyEntry(id=key_id, tenant=tenant, sha256=digest(key), scope=scope, created=created)


def append_key(path: Path, entry: KeyEntry) -> None:
    """Adds one line to the file: a crash leaves all older keys as they are. Raises OSError."""
    is_cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")  # an editor left out the last line's end
    fields = ", ".join(f'{name}: "{value}"' for name, value in entry.model_dump().items())
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("\n" * is_cut + f"- {{{fields}}}\n")
        file.flush()
        os.fsync(file.fileno())


def find_key(presented: str, entries: Mapping[str, KeyEntry]) -> KeyEntry | None:
    """The entry of a key that somebody presents."""
    form = _KEY.fullmatch(presented)
    entry = entries.get(form.group(1)) if form is not None else None
    stored = entry.sha256 if entry is not None else _NOBODY
    is_equal = hmac.compare_digest(digest(presented), stored)
    return entry if is_equal else None


def presented_keys(headers: list[tuple[bytes, bytes]]) -> set[str]:
    """The keys in the headers `Authorization: Bearer` and `x-api-key`; "" for what is no bearer token."""
    found = set()
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"authorization":
            scheme, _, token = text.partition(" ")
            found.add(token.strip() if scheme.lower() == "bearer" else "")
        elif name == b"x-api-key":
            found.add(text)
    return found
