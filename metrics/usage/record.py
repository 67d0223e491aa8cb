"""The usage record of a call, and the lines of a usage file.

A file has one JSON object a line. `begin` is written before the call reaches the core, `progress` once a second for all
open calls together, `end` before the last byte of the answer. A second `end` follows once the device's time is known.
The last `end` of a call counts; a call without one was interrupted.
"""

from datetime import datetime
from decimal import Decimal

import msgspec

# answered: with 2xx. failed: after the core got it, or by a fault of the server. cancelled: its client left. refused:
# it never reached the core. interrupted: the server was killed meanwhile. open: the server still works on it.
STATUSES = ("answered", "failed", "cancelled", "refused", "interrupted", "open")


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One call of an endpoint. None: not known. Tokens are those of the server's own metrics."""

    call: str  # unique: the life of the server process, and a number. Two calls may have one request id
    request_id: str
    time: datetime  # UTC, when it arrived
    seconds: float | None = None  # from then to its end
    tenant: str = ""
    key_id: str | None = None  # names the API key; never the key
    model: str = ""
    adapter: str | None = None
    route: str = ""
    status: str = "open"  # one of STATUSES
    http_status: int | None = None  # 499 where the client left
    code: str | None = None  # of the error
    finish_reason: str | None = None
    prompt_tokens: int = 0  # of all prompts of the call, each once
    cached_tokens: int = 0  # of them, read from the prefix cache
    output_tokens: int = 0  # of all choices
    computed_tokens: int | None = None  # of prompt and output, with those that were computed again
    device_ms: float | None = None  # its share of the device's time: None without telemetry
    joules: float | None = None  # for that time; None without a power sensor
    queue_ms: float | None = None  # waiting for a place in the batch, or for KV blocks
    quota_ms: float | None = None
    moderation_ms: float | None = None
    price_of_tokens: Decimal | None = None  # None without a price list, or where it does not name the model
    price_of_device: Decimal | None = None
    currency: str | None = None


class FileHead(msgspec.Struct, frozen=True, tag="file", tag_field="line"):
    """The first line of a file."""

    life: str  # of the server process: the first part of the `call` of each of its records
    pid: int
    host: str
    version: str  # of Sojourn


class Begin(msgspec.Struct, frozen=True, tag="begin", tag_field="line"):
    record: UsageRecord


class End(msgspec.Struct, frozen=True, tag="end", tag_field="line"):
    record: UsageRecord


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="line"):
    """Calls that have new tokens since the last one: call → cached and output tokens so far."""

    tokens: dict[str, tuple[int, int]]


Line = FileHead | Begin | Progress | End
encode = msgspec.json.Encoder(decimal_format="string").encode
decode = msgspec.json.Decoder(Line).decode


def call_life(call: str) -> str:
    """The life of the server process in the name of a call."""
    return call.rpartition("-")[0]


def status_of(http_status: int, reached_core: bool) -> str:
    """How a call ended, of STATUSES."""
    if 200 <= http_status < 300:
        return "answered"
    if http_status == 499:
        return "cancelled"
    return "failed" if reached_core or http_status == 500 else "refused"
