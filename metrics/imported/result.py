"""What a reader takes from a result file of another tool."""

import math
from typing import Any

import msgspec

from metrics.errors import InputError
from metrics.records import ClientRecord

Json = dict[str, Any]


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark of a result file. Nothing in it is made up: what the file lacks stays null, and is in `unseen`."""

    tool: str  # "vllm bench serve", "GuideLLM", "AIPerf", "inference-perf"
    version: str | None
    name: str
    model: str | None
    rows: list[ClientRecord]
    unseen: list[str]  # sentences: what the file does not say
    arrivals: Json  # of the scenario, as far as the file says: process, rate_rps, in_flight
    base_url: str | None = None
    objectives: list[Json] = []
    is_unix_time: bool = False  # the stamps are of the wall clock; else of some monotonic clock


def ns(seconds: Any) -> int | None:
    """Nanoseconds of seconds; None for what is no time."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return None
    return round(seconds * 1e9)


def count(value: Any) -> int | None:
    """A number of tokens; None for what is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return int(value) if is_number else None


def inner(document: Any, *names: str) -> Any:
    """The value below names; None where one of them is missing."""
    for name in names:
        document = document.get(name) if isinstance(document, dict) else None
    return document


def word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def need_times(tool: str, row: int, **stamps: int | None) -> None:
    """Raises InputError where a request lacks a stamp without which it cannot be placed."""
    for name, stamp in stamps.items():
        if stamp is None:
            raise InputError(f"the {tool} file has a request without {name} (entry {row}); the file is damaged")
