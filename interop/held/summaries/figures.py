"""The words of a summary's figures, their units, and the proof of units by the file's own consistency."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import BenchmarkFigures, Figure, Setting
from sojourn.interop.imported.result import number
from sojourn.metrics.errors import InputError

# Our names → unit. A latency is always in ms here, whatever the file has.
UNITS = {
    "ttft_ms": "ms", "tpot_ms": "ms", "itl_ms": "ms", "e2e_ms": "ms", "e2e_per_token_ms": "ms", "queue_ms": "ms",
    "load_ms": "ms", "prefill_ms": "ms", "decode_ms": "ms", "response_ms": "ms", "send_lag_ms": "ms", "duration_s": "s",
    "requests_per_s": "requests/s", "offered_requests_per_s": "requests/s", "good_requests_per_s": "requests/s",
    "output_tokens_per_s": "tokens/s", "input_tokens_per_s": "tokens/s", "total_tokens_per_s": "tokens/s",
    "output_tokens_per_s_per_gpu": "tokens/s", "total_tokens_per_s_per_gpu": "tokens/s",
    "tokens_per_s_per_user": "tokens/s",
    "requests": "requests", "succeeded": "requests", "failed": "requests", "incomplete": "requests",
    "good_requests": "requests", "dropped": "requests",
    "in_flight": "requests", "running": "requests", "waiting": "requests", "input_tokens": "tokens",
    "output_tokens": "tokens", "preemptions": "requests", "kv_use": "share", "hit_rate": "share",
    "accepted_tokens_per_step": "tokens",
}  # fmt: skip
WORDS = {
    "avg": "mean", "average": "mean", "mean": "mean", "med": "median", "median": "median", "std": "std",
    "stddev": "std", "std_dev": "std", "min": "min", "max": "max", "p50": "median", "p100": "max",
}  # fmt: skip
PERCENTILE = re.compile(r"p?\(?(\d+(?:\.\d+)?)\)?%?")
IN_MS = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "μs": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3, "min": 6e4,
         "milliseconds": 1.0, "m": 6e4, "h": 3.6e6}  # fmt: skip
# By which figures that belong together may differ. Units differ by 1000; spread of lengths is no reason for a factor of
# 30, and one for a note above 3. What is equal by definition may differ by rounding only.
UNIT_FACTOR, NOTED_FACTOR, SPREAD, EXACT = 30.0, 3.0, 1.6, 1.05
DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m(?!s))?(?:([\d.]+)(ns|us|µs|μs|ms|s))?")
NO_PROOF = "nothing in the file proves its units: they are those that the tool writes"


def statistic_of(word: str) -> str | None:
    """mean, median, p90, p99.9, …; None for what is none."""
    word = word.strip().lower()
    if word in WORDS:
        return WORDS[word]
    found = PERCENTILE.fullmatch(word)
    if found is None or not 0 < float(found[1]) <= 100:
        return None
    return WORDS.get(f"p{float(found[1]):g}", f"p{float(found[1]):g}")


def figures_of(
    clocks: Mapping[str, str], told: Mapping[tuple[str, str], tuple[Any, float, str]], default_clock: str = "client"
) -> list[Figure]:
    """`told`: (name, statistic) → value as the file has it, factor to our unit, the file's own name. What is no number
    is left out."""
    found = []
    for (name, statistic), (value, factor, theirs) in told.items():
        stated = number(value)
        if stated is not None and math.isfinite(stated * factor):
            found.append(Figure(
                name=name, statistic=statistic, value=float(stated * factor), unit=UNITS[name],
                clock=clocks.get(name, default_clock), theirs=theirs,
            ))  # fmt: skip
    return found


def milliseconds(text: str) -> float | None:
    """Of Go's and Rust's form of a duration: 1m2.5s, 130.19ms."""
    found = DURATION.fullmatch(text)
    if found is None or not text:
        return None
    hours, minutes, rest, unit = found.groups()
    return (int(hours or 0) * 3600 + int(minutes or 0) * 60) * 1e3 + float(rest or 0) * IN_MS.get(unit or "s", 1e3)


def told_of(columns: Mapping[str, Sequence[float]], theirs: str) -> dict[tuple[str, str], tuple[Any, float, str]]:
    """What values of single requests come to, by our names: mean, median, p90, p99 and largest."""
    found: dict[tuple[str, str], tuple[Any, float, str]] = {}
    for name, values in columns.items():
        if not values:
            continue
        stated = {"mean": fmean(values), "median": median(values), "max": max(values)}
        ordered = sorted(values)
        for share in (90, 99):
            if len(ordered) >= 2000 / (100 - share) / 10:
                stated[f"p{share}"] = ordered[math.ceil(len(ordered) * share / 100) - 1]
        found |= {(name, statistic): (value, 1.0, theirs) for statistic, value in stated.items()}
    return found


def note_of_cut(given: Given) -> list[str]:
    """A table of cells cannot tell that its last number lacks digits."""
    return [] if given.text.endswith("\n") else ["the file does not end with a line end: its last cell may be cut off"]


def load_of(**settings: Any) -> dict[str, Setting]:
    """Without what the file does not say."""
    return {name: value for name, value in settings.items() if isinstance(value, str | int | float) and value != ""}


def prove(found: BenchmarkFigures, *, by_name: bool = True) -> list[str]:
    """Notes on how the figures fit together. Raises InputError where they cannot all be true: a unit is wrong, or the
    file was edited. `by_name`: the file names its units; else they must be proved."""
    if not found.figures:
        raise InputError(f"the {found.tool} file holds no figure")
    if (
        bad := next((each for each in found.figures if each.value < 0 and each.name != "send_lag_ms"), None)
    ) is not None:
        raise InputError(f"{bad.theirs} is {bad.value:g}, which cannot be; the file is damaged")
    absolute = list(_absolute(found))
    checks = [*_relative(found), *_totals(found), *absolute]
    for each in checks:
        if not each.within(NOTED_FACTOR if each.is_exact else UNIT_FACTOR):
            raise InputError(
                f"the figures contradict each other: {each.sentence}; a unit is not what its name says, or the file "
                "was changed"
            )
    if not by_name and not absolute:
        raise InputError(f"the {found.tool} file does not name its units, and nothing in it proves them")
    notes = [f"figures that should agree differ: {each.sentence}" for each in checks
             if not each.within(EXACT if each.is_exact else each.noted)]  # fmt: skip
    return notes if checks else [NO_PROOF]


class Check(NamedTuple):
    """Two sides that belong together."""

    says: str
    left: float
    right: float
    is_exact: bool = False  # equal by definition; else about equal
    noted: float = NOTED_FACTOR  # by which they may differ without a note

    def within(self, factor: float) -> bool:
        return self.right > 0 and 1 / factor <= self.left / self.right <= factor

    @property
    def sentence(self) -> str:
        return f"{self.says}: {self.left:.4g} against {self.right:.4g}"


def _relative(found: BenchmarkFigures) -> Iterator[Check]:
    """Latencies among each other."""
    tokens = _tokens_per_request(found)
    for statistic in ("mean", "median"):
        ttft, tpot, e2e = (found.value(name, statistic) for name in ("ttft_ms", "tpot_ms", "e2e_ms"))
        if ttft is not None and tpot and e2e and tokens and tokens > 1:
            yield Check(f"{statistic} TTFT + TPOT x (tokens - 1) is E2E", ttft + tpot * (tokens - 1), e2e)
            if e2e > EXACT * ttft and statistic == "mean":
                yield Check("TPOT x (tokens - 1) is E2E - TTFT", tpot * (tokens - 1), e2e - ttft, noted=SPREAD)
            break
    e2e, per_token = found.value("e2e_ms"), found.value("e2e_per_token_ms")
    if e2e and per_token and tokens:
        yield Check("time per token x tokens is E2E", per_token * tokens, e2e)
    for statistic in ("mean", "median"):
        ttft, e2e = found.value("ttft_ms", statistic), found.value("e2e_ms", statistic)
        if ttft and e2e and ttft > EXACT * e2e:
            yield Check(f"{statistic} TTFT is within E2E", ttft * NOTED_FACTOR, e2e, True)


def _totals(found: BenchmarkFigures) -> Iterator[Check]:
    duration = found.value("duration_s", "total")
    for rate, total, says in (
        ("requests_per_s", "succeeded", "requests/s x duration is the requests"),
        ("output_tokens_per_s", "output_tokens", "tokens/s x duration is the output tokens"),
    ):
        per_s, whole = found.value(rate, "rate"), found.value(total, "total")
        if duration and per_s and whole:
            yield Check(says, per_s * duration, whole, True)


def _absolute(found: BenchmarkFigures) -> Iterator[Check]:
    """Latencies against time that passed: only these show a unit that all latencies share."""
    duration = found.value("duration_s", "total")
    limit, per_s = number(found.load.get("max_concurrency")), found.value("requests_per_s", "rate")
    sent = found.value("succeeded", "total") or 0.0
    e2e = found.value("e2e_ms") or found.value("e2e_ms", "median")
    if limit and per_s and e2e and sent >= 4 * limit and str(found.load.get("request_rate", "inf")) == "inf":
        yield Check("requests/s x E2E is the concurrency", per_s * e2e / 1e3, float(limit))
    in_flight = found.value("in_flight")
    if in_flight and per_s and e2e and sent >= 10:
        yield Check("requests/s x E2E is the mean in flight", per_s * e2e / 1e3, in_flight)
    user, tpot = found.value("tokens_per_s_per_user", "median"), found.value("tpot_ms", "median")
    if user and tpot:
        yield Check("tokens/s of a user x TPOT is 1", user * tpot / 1e3, 1.0)
    longest = found.value("e2e_ms", "p99") or found.value("e2e_ms", "median")
    if duration and longest and longest / 1e3 > 1.2 * duration:
        yield Check("E2E is within the duration", longest / 1e3 * NOTED_FACTOR, duration, True)


def _tokens_per_request(found: BenchmarkFigures) -> float | None:
    mean = found.value("output_tokens")
    total, requests = found.value("output_tokens", "total"), found.value("succeeded", "total")
    return mean or (total / requests if total and requests else None)
