"""What a class of requests may be promised: upper bounds of latencies, by name. Pure data."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sojourn.metrics.request.presets import preset_of

OBJECTIVE_NAMES = {
    "ttft_ms": "time to first token",
    "ttfa_ms": "time to first answer token",
    "tpot_ms": "time per output token",
    "e2e_ms": "end-to-end latency",
}
OBJECTIVES = tuple(OBJECTIVE_NAMES)
CLIENT_OBJECTIVES = ("ttfa_ms",)  # that no server's metrics and no replay know: a client reads them
SERVER_OBJECTIVES = tuple(name for name in OBJECTIVES if name not in CLIENT_OBJECTIVES)
# How the source of an objective ends that nobody asked for: of `bench-serve`, and of the other verbs.
STANDS_IN = "stands in because no --goodput was given"
STANDS_IN_FOR_SLO = "stands in because no --slo was given"
NO_SLO = f"MLPerf Inference, Llama 3.1 8B, server scenario: {STANDS_IN_FOR_SLO}"
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


def requested_objectives(objectives: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
    """Without those that only stand in where nobody named any: `bench-serve` without `--goodput`,
    a load of options without `--slo`."""
    return [
        entry for entry in objectives or () if not str(entry.get("source", "")).endswith((STANDS_IN, STANDS_IN_FOR_SLO))
    ]


def short(objective: str) -> str:
    """`ttft_ms` → `ttft`: the word beside a bound that has its unit."""
    return objective.removesuffix("_ms")


BOUND = re.compile(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)(ms|s)?")


WHAT_SERVERS_TELL = "what a server tells"
A_REPLAY = "a replay"


def refuse_client_objectives(names: Iterable[str], what: str) -> None:
    """Raises ValueError where bounds are of latencies that `what`, such as WHAT_SERVERS_TELL, does not know."""
    if unknown := [name for name in names if name in CLIENT_OBJECTIVES]:
        raise ValueError(
            f"{' and '.join(map(short, unknown))} ({OBJECTIVE_NAMES[unknown[0]]}) is no part of {what}; give "
            f"{_listed(SERVER_OBJECTIVES)}, or measure it with sojourn load"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(short, names[:-1])) + f" or {short(names[-1])}"


def parse_bounds(text: str, judged_by: str = "") -> dict[str, float]:
    """`ttft:500 tpot:50 e2e:20s`, in ms unless a unit is named, as vLLM's `--goodput` has it, → {"ttft_ms": 500.0, …};
    `e2el` is e2e, and `=` is `:`. `preset:NAME` stands for published bounds; bounds beside it replace its own.

    `judged_by` names what has no latencies of clients, as in `refuse_client_objectives`.

    Raises ValueError with a sentence.
    """
    bounds: dict[str, float] = {}
    published: dict[str, float] = {}
    for word in text.replace(",", " ").split():
        if (preset := preset_of(word)) is not None:
            if published:
                raise ValueError(f"{text!r} names two presets; keep one of the two")
            published = preset.bounds
            continue
        name, _, value = word.replace("=", ":").partition(":")
        key = {"e2el": "e2e"}.get(name.lower(), name.lower()) + "_ms"
        if key not in OBJECTIVES:
            raise ValueError(
                f"{word!r} names no latency; give {_listed(OBJECTIVES)}, such as ttft:500 tpot:50, or preset:NAME"
            )
        found = BOUND.fullmatch(value.lower())
        bound = float(found[1]) * (1000 if found[2] == "s" else 1) if found is not None else 0.0
        if not 0 < bound < float("inf"):
            raise ValueError(
                f"{word!r} has no bound; give milliseconds above 0, or a time in s, such as {short(key)}:500 or "
                f"{short(key)}:0.5s"
            )
        if key in bounds:
            raise ValueError(f"{text!r} bounds {short(key)} twice; keep one of the two")
        bounds[key] = bound
    bounds = published | bounds
    if not bounds:
        raise ValueError("no objective is given; name at least one, such as ttft:500 tpot:50")
    if judged_by:
        refuse_client_objectives(bounds, judged_by)
    return bounds


def source_of(text: str, otherwise: str) -> str:
    """Where bounds of this text come from: the source of its preset, else `otherwise`. The text was parsed before."""
    presets = [found for word in text.replace(",", " ").split() if (found := preset_of(word)) is not None]
    changed = len(text.replace(",", " ").split()) > 1
    return f"{presets[0].source}{'; some bounds replaced' if changed else ''}" if presets else otherwise
