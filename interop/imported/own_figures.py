"""A file's requests against the file's own summary: a wrong unit or lost start times show there."""

from sojourn.interop.imported.result import Json, count, number
from sojourn.metrics.errors import InputError
from sojourn.metrics.records import ClientRecord

FACTOR = 3
UNITS = {1e3: "milliseconds", 1e6: "microseconds", 1e9: "nanoseconds"}


def check_own_figures(document: Json, rows: list[ClientRecord]) -> list[str]:
    """Sentences on totals that differ. Raises InputError where the times of the requests cannot be true."""
    served = [row for row in rows if row.status == "ok"]
    ttfts = [row.first_token_ns - row.sent_ns for row in served if row.first_token_ns is not None]
    gaps = [b - a for row in served for a, b in zip(row.chunk_ns, row.chunk_ns[1:], strict=False)]
    for name, found in (("mean_ttft_ms", ttfts), ("mean_itl_ms", gaps)):
        if found:
            _same(name, number(document.get(name)), sum(found) / len(found) / 1e6, "ms")
    ends = [row.last_byte_ns for row in rows if row.last_byte_ns is not None]
    if rows and len(served) == len(rows) == len(ends):
        span = (max(ends) - min(row.sent_ns for row in rows)) / 1e9
        _same("duration", number(document.get("duration")), span, "s")
    return _different_totals(document, served)


def _different_totals(document: Json, served: list[ClientRecord]) -> list[str]:
    notes = []
    totals = {"completed": len(served), "total_output_tokens": sum(row.output_tokens or 0 for row in served)}
    for name, shown in totals.items():
        told = count(document.get(name))
        is_counted = name == "completed" and count(document.get("failed")) is None  # already told as failures
        if told is not None and told != shown and not is_counted:
            notes.append(f"the file says {name} {told:,}, and its requests show {shown:,}: trust neither before a look")
    return notes


def _same(name: str, told: float | None, shown: float, unit: str) -> None:
    if told is None or told <= 0 or (shown > 0 and 1 / FACTOR <= shown / told <= FACTOR):
        return
    units = (says for power, says in UNITS.items() if power / FACTOR <= shown / told <= power * FACTOR)
    why = next((f"the times seem to be in {says}, and not in seconds" for says in units), "the times cannot be true")
    raise InputError(f"the file says {name} {told:g}, and its requests show {shown:.4g} {unit}: {why}; write it again")
