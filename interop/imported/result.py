"""What a reader takes from a result file of another tool."""

import math
from itertools import pairwise
from typing import Any

import msgspec

from sojourn.metrics.errors import InputError
from sojourn.metrics.records import ClientRecord

Json = dict[str, Any]
LARGEST_NS = 2**62  # what a table holds, with room for differences
UNIX_S = (946_684_800, 4_102_444_800)  # the years 2000 to 2100
CLOCKS_DIFFER_NS = 20_000_000  # tools stamp one request by two clocks, and round


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
    notes: list[str] = []  # sentences: what a reader of the figures must know
    kept_share: float = 1.0  # of the requests that were made; below 1 the rows are a sample
    refused: str | None = None  # why this one of several benchmarks cannot be read: the others still can


def number(value: Any) -> float | int | None:
    """A finite number, also one that is written as a string, as 64-bit integers sometimes are; None for another."""
    if isinstance(value, str):
        try:
            value = int(value) if value.lstrip("-").isdigit() else float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def ns(seconds: Any) -> int | None:
    """Nanoseconds of seconds; None for what is no time."""
    value = number(seconds)
    return None if value is None else round(value * 1e9)


def count(value: Any) -> int | None:
    """A number of tokens; None for what is none."""
    found = number(value)
    return int(found) if found is not None and found >= 0 else None


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


def cut_by_the_tool(tool: str, number_cut: int, waiting_ns: list[int]) -> list[str]:
    """A sentence on requests that the tool cancelled itself; `waiting_ns`: how long each without a first token was
    in flight."""
    if not number_cut:
        return []
    longest = (
        f", {len(waiting_ns)} without a first token, for up to {max(waiting_ns) / 1e9:.3g} s" if waiting_ns else ""
    )
    return [
        f"{number_cut:,} requests were in flight when {tool} cut them{longest}: they are no failure of the server and "
        "are not judged, so the longest answers may be missing"
    ]


def checked(found: Imported) -> Imported:
    """The same, if its requests can be told apart and their times can be true. Raises InputError."""
    seen: set[str] = set()
    for row in found.rows:
        if row.request_id in seen:
            raise InputError(
                f"request_id {row.request_id!r} stands twice in the {found.tool} file: was it merged or written twice? "
                "Give the file of one run"
            )
        seen.add(row.request_id)
        _check_times(found, row)
    return found


def _check_times(found: Imported, row: ClientRecord) -> None:
    stamps = {
        "due": row.due_ns, "sent": row.sent_ns, "first token": row.first_token_ns,
        "first chunk": min(row.chunk_ns, default=None), "last chunk": max(row.chunk_ns, default=None),
        "last token": row.last_token_ns, "last byte": row.last_byte_ns,
    }  # fmt: skip
    known = {name: stamp for name, stamp in stamps.items() if stamp is not None}
    low, high = (each * 10**9 for each in UNIX_S) if found.is_unix_time else (-LARGEST_NS, LARGEST_NS)
    for name, stamp in known.items():
        if not low <= stamp <= high:
            what = "a time between the years 2000 and 2100" if found.is_unix_time else "a time that can be held"
            raise InputError(
                f"request {row.request_id!r} of the {found.tool} file: its {name} is {stamp / 1e9:.6g} s, which is not "
                f"{what}; the file is damaged, or in another unit than {found.tool} writes"
            )
    after = [(name, stamp) for name, stamp in known.items() if name != "due"]
    after += [("chunk", stamp) for stamp in row.chunk_ns] if row.chunk_ns != sorted(row.chunk_ns) else []
    for (before, earlier), (name, later) in pairwise(after):
        if later < earlier - CLOCKS_DIFFER_NS:
            raise InputError(
                f"request {row.request_id!r} of the {found.tool} file: its {name} is {(earlier - later) / 1e9:.3g} s "
                f"before its {before}; the file is damaged, or mixes units of time"
            )
