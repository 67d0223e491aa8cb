"""What a class of requests may be promised: upper bounds of latencies, by name. Pure data; imports nothing of ours."""

from collections.abc import Mapping, Sequence
from typing import Any

OBJECTIVE_NAMES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "e2e_ms": "end-to-end latency",
}
OBJECTIVES = tuple(OBJECTIVE_NAMES)
EVERY_CLASS = "all"  # its objectives hold for every class that does not name its own


def objectives_of(klass: str, objectives: Sequence[Mapping[str, Any]] | None) -> dict[str, float]:
    """The objectives that hold for a class: its own, and those of "all" where it names none itself.

    `objectives` as in run.json: [{"klass": "chat", "ttft_ms": 500, "source": "…"}, …].
    """
    merged: dict[str, float] = {}
    for stated_for in (EVERY_CLASS, klass):
        for entry in objectives or ():
            if entry.get("klass", EVERY_CLASS) == stated_for:
                merged |= {name: float(entry[name]) for name in OBJECTIVES if entry.get(name) is not None}
    return merged


def short(objective: str) -> str:
    """`ttft_ms` → `ttft`: the word beside a bound that has its unit."""
    return objective.removesuffix("_ms")
