"""One text for one value, whatever machine, folder and class it came from."""

import hashlib
import json
import re
from typing import Any

import msgspec

_LEASE = re.compile(r'(?<="lease_id": ")([^"]*-)[0-9a-f]{16}(?=")')  # drawn by the operating system
_FOLDER = re.compile(r"/tmp/[^\s'\"]*?(?=[\s'\",;:)]|$)")  # of a test


def canonical(value: Any) -> str:
    plain = msgspec.to_builtins(value, enc_hook=_plain, str_keys=True)
    text = json.dumps(plain, sort_keys=True, indent=1, default=str)
    return _FOLDER.sub("FOLDER", _LEASE.sub(r"\1RANDOM", text))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else repr(value)
