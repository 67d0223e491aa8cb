"""A search's runs, its document (`sweep.json` or `capacity.json`), and its frontier of goodput against objectives."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from sojourn.loadgen.search.bisection import REQUESTS_PER_S, Trial
from sojourn.loadgen.search.frontier import MaxRate, RatePoint, max_rate
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.machine.host import STEAL_WARNS_PERCENT
from sojourn.metrics.machine.steal import steal_within
from sojourn.metrics.memory.prefix_share import cache_doubt
from sojourn.metrics.request.goodput import (
    class_goodput,
    judged,
    measured,
    tokens_per_s,
    unmeasured_objectives,
    window_ns,
)
from sojourn.metrics.request.objectives import EVERY_CLASS, OBJECTIVES, objectives_of, short
from sojourn.metrics.results.energy import run_energy
from sojourn.metrics.results.load import declared_window_s
from sojourn.metrics.run.devices import num_devices
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.metrics.statistics.dependent_samples import effective_samples, growing, t_quantile
from sojourn.metrics.statistics.intervals import wilson_bounds

SEARCH_FILES = ("sweep.json", "capacity.json")
SCALES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)  # of the objectives: what stricter and looser promises would give
LEVEL = 0.95
MEANS = ("goodput_rps", "goodput_tokens_per_s", "tokens_per_s", "due_rps")  # of a rate: over its points


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one rate. `goodput_by_scale` is the goodput had all objectives been so many times as long."""

    rate_rps: float
    repeat: int
    seed: int
    run: str  # folder, below the search's
    valid: bool
    invalid_reasons: list[str]
    sent: int
    completed: int
    good: int
    attainment: float
    effective: float  # independent requests that say as much
    growing: bool
    goodput_rps: float
    goodput_tokens_per_s: float | None  # None where the server reports no tokens
    tokens_per_s: float | None
    quantiles_ms: dict[str, dict[str, float | None]]
    goodput_by_scale: dict[str, float]
    warm_up: bool = False
    died: bool = False  # the server did: the first of `invalid_reasons` says how
    error: str = ""  # what most of the failed requests failed of
    begun_unix_ns: int | None = None
    due_rps: float | None = None  # that came about by chance; None in a search of an older version
    cache_doubt: str = ""  # of a prefix cache that knew more than these prompts share
    steal_percent: float | None = None  # CPU time that other machines took meanwhile; None without samples
    devices: int | None = None  # of the server; None where it does not report them
    joules_per_token: float | None = None  # of output; None without a power sensor
    unit: str = REQUESTS_PER_S  # or SESSIONS: then `rate_rps` is their number

    @property
    def notes(self) -> list[str]:
        """What to know of it at once, in sentences."""
        failed = self.sent - self.completed
        most = f", most often: {self.error}" if self.error else ""
        sentences = [f"{failed:,} of {self.sent:,} requests were not served{most}"] if failed else []
        if self.died:
            sentences = [f"{self.invalid_reasons[0]}; it counts as a miss"]
        elif not self.valid:
            sentences = [f"run {self.run} is not valid: {reason}" for reason in self.invalid_reasons]
        sentences += [self.cache_doubt] if self.cache_doubt else []
        if self.steal_percent is not None and self.steal_percent > STEAL_WARNS_PERCENT:
            sentences.append(
                f"other machines took {self.steal_percent:.1f}% of the CPU time; without them the server may bear more"
            )
        return [f"{self.rate_rps:g} {self.unit}: {each}" for each in sentences]

    @property
    def counts(self) -> bool:
        """Whether the point counts for its rate. A server that died met no objective, however the load was sent."""
        return self.valid or self.died

    def trial(self) -> Trial:
        return Trial(
            rate_rps=self.rate_rps, sent=self.sent, completed=self.completed, good=self.good, effective=self.effective,
            growing=self.growing, valid=self.counts, died=self.died, warm_up=self.warm_up,
            error=self.error if self.valid or not self.invalid_reasons else self.invalid_reasons[0],
        )  # fmt: skip


class Search(msgspec.Struct, kw_only=True):
    """The document of a search. `plan` identifies the search. `runs_begun` also counts the runs that were cut short."""

    kind: str
    plan: dict[str, Any]
    points: list[Point] = msgspec.field(default_factory=list)
    runs_begun: int = 0
    result: dict[str, Any] | None = None


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """All points of one rate that tell something. Attainment with its 95% interval, latencies the median over them."""

    rate_rps: float
    points: int
    invalid: int
    growing: bool
    sent: int
    uncounted: int  # sent in runs that are not valid
    died: str  # how the server did; "" where it lived
    effective: float
    attainment: float | None
    attainment_low: float | None
    attainment_high: float | None
    goodput_rps: float | None
    goodput_tokens_per_s: float | None
    tokens_per_s: float | None
    quantiles_ms: dict[str, dict[str, float | None]]
    goodput_by_scale: dict[str, float]
    due_rps: float | None = None  # that came about
    steal_percent: float | None = None  # of the run of it from which other machines took most CPU time
    unit: str = REQUESTS_PER_S


class Frontier(msgspec.Struct, frozen=True, kw_only=True):
    """The most goodput that any of the rates gave, with the objectives `scale` times as long."""

    scale: float
    objectives_ms: dict[str, float]  # of all classes, scaled; {} where only classes have their own
    goodput_rps: float
    rate_rps: float
    at_edge: bool  # the largest rate with a valid run: a larger one might give more


def read_search(file: Path) -> Search:
    """Raises RunDataError where the file is not what a search writes."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Search)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunDataError(f"{file} cannot be read: {error}; remove its folder to measure again") from None


def search_file(folder: Path) -> Path:
    """The document of the search in a folder; where it has none, the one that a sweep would write."""
    return next((folder / name for name in SEARCH_FILES if (folder / name).is_file()), folder / SEARCH_FILES[0])


def sweeps(runs: Path) -> list[Path]:
    """The searches right below a folder, newest first."""
    folders = {file.parent for name in SEARCH_FILES for file in (runs.glob(f"*/{name}") if runs.is_dir() else ())}
    return sorted(folders, key=lambda folder: (-search_file(folder).stat().st_mtime_ns, folder))


def objectives_ms(plan: Mapping[str, Any]) -> dict[str, float]:
    """The bounds of all classes that a search judges by."""
    known = plan.get("objectives_ms")
    return objectives_of(EVERY_CLASS, section(plan, "scenario").get("objectives")) if known is None else known


def point_of(
    run: RunDirectory,
    *,
    rate_rps: float,
    repeat: int,
    seed: int,
    warm_up: bool = False,
    died: bool = False,
    unit: str = REQUESTS_PER_S,
) -> Point:
    """Reads a finished run. The requests of its declared warm-up are left out."""
    meta = run.meta()
    objectives = meta.get("objectives") or []
    requests = measured(run.requests(), meta)
    declared_s = declared_window_s(meta)
    whole = class_goodput(requests, objectives, declared_s)[0]
    unmeasured = [
        f"{short(name)} could be measured of no request" for name in unmeasured_objectives(judged(requests, objectives))
    ]
    span = window_ns(requests)
    seconds = (span[1] - span[0]) / 1e9 if span else 0.0
    # What shows the queue: the time to the first token, or to the last where no request has one. A closed loop has no
    # queue that grows without end, but contexts that do.
    waited = requests["ttft_ms" if requests.ttft_ms.notna().any() else "e2e_ms"].astype("float64")
    steal = steal_within(run.table("system"), *span) if span else None
    errors = requests.error[requests.status != "ok"].dropna()
    energy = run_energy(run, requests)
    return Point(
        rate_rps=rate_rps, repeat=repeat, seed=seed, run=run.name, valid=bool(meta.get("valid")) and not unmeasured,
        invalid_reasons=[*(meta.get("invalid_reasons") or []), *unmeasured], sent=whole.sent, completed=whole.completed,
        good=whole.good, attainment=whole.attainment, effective=effective_samples(waited),
        growing=unit == REQUESTS_PER_S and growing(waited),
        goodput_rps=whole.goodput_rps, goodput_tokens_per_s=whole.goodput_tokens_per_s,
        tokens_per_s=tokens_per_s(requests.output_tokens, seconds),
        quantiles_ms=whole.quantiles_ms,
        goodput_by_scale={
            f"{scale:g}": class_goodput(requests, scaled(objectives, scale), declared_s)[0].goodput_rps
            for scale in SCALES
        }, warm_up=warm_up, died=died, error=str(errors.mode().iloc[0]) if len(errors) else "",
        begun_unix_ns=(meta.get("wall_anchor") or {}).get("unix_ns"), cache_doubt=cache_doubt(meta, requests),
        due_rps=whole.window.due_rps if whole.window.declared else None,
        steal_percent=steal.mean if steal is not None else None, devices=num_devices(meta),
        joules_per_token=energy.joules_per_token if energy is not None else None, unit=unit,
    )  # fmt: skip


def scaled(objectives: Sequence[dict[str, Any]], scale: float) -> list[dict[str, Any]]:
    """The objectives with every bound `scale` times as long."""
    return [
        entry | {name: entry[name] * scale for name in OBJECTIVES if entry.get(name) is not None}
        for entry in objectives
    ]  # fmt: skip


def by_rate(points: Sequence[Point]) -> list[Rate]:
    """One row per rate, lowest first. Invalid points are counted, and nothing else of them."""
    return [
        _rate(rate, [point for point in points if point.rate_rps == rate and not point.warm_up])
        for rate in sorted({point.rate_rps for point in points if not point.warm_up})
    ]


def _mean(values: list[float | None]) -> float | None:
    """None where one of them is not known."""
    return sum(values) / len(values) if values and None not in values else None


def _rate(rate_rps: float, points: list[Point]) -> Rate:
    counted = [point for point in points if point.counts]
    sent, good = sum(point.sent for point in counted), sum(point.good for point in counted)
    share = good / sent if sent else None
    effective = sum(point.effective for point in counted)
    quantile = t_quantile((1 + LEVEL) / 2, max(3.0, effective / 2))
    low, high = (None, None) if share is None else wilson_bounds(share, effective, quantile)
    return Rate(
        rate_rps=rate_rps, points=len(points), invalid=len(points) - len(counted), sent=sent,
        uncounted=sum(point.sent for point in points if not point.counts),
        died=next((point.invalid_reasons[0] for point in counted if point.died), ""), effective=effective,
        growing=any(point.growing for point in counted), attainment=share, attainment_low=low, attainment_high=high,
        **{name: _mean([getattr(point, name) for point in counted]) for name in MEANS},
        quantiles_ms=_middle_quantiles(counted),
        goodput_by_scale={
            name: sum(point.goodput_by_scale[name] for point in counted) / len(counted)
            for name in (counted[0].goodput_by_scale if counted else ())
        },
        steal_percent=max((point.steal_percent for point in counted if point.steal_percent is not None), default=None),
        unit=points[0].unit,
    )  # fmt: skip


def _middle_quantiles(points: list[Point]) -> dict[str, dict[str, float | None]]:
    """The median over points; None where a point could not tell."""

    def middle(latency: str, name: str) -> float | None:
        values = [point.quantiles_ms[latency].get(name) for point in points]
        return None if None in values else float(median(values))

    names = points[0].quantiles_ms if points else {}
    return {latency: {name: middle(latency, name) for name in quantiles} for latency, quantiles in names.items()}


def frontier(rates: Sequence[Rate], objectives_ms: dict[str, float]) -> list[Frontier]:
    """Goodput against the objectives: for each of SCALES the best of the rates. `objectives_ms` are those of all
    classes."""
    known = [rate for rate in rates if rate.goodput_by_scale]
    found = []
    for scale in SCALES if known else ():
        best = max(known, key=lambda rate: rate.goodput_by_scale[f"{scale:g}"])
        scaled_ms = {name: bound * scale for name, bound in objectives_ms.items()}
        found.append(Frontier(scale=scale, objectives_ms=scaled_ms, goodput_rps=best.goodput_by_scale[f"{scale:g}"],
                              rate_rps=best.rate_rps, at_edge=best is known[-1]))  # fmt: skip
    return found


def largest_rate(rates: Sequence[Rate]) -> MaxRate:
    """The largest rate that keeps 90%, by the intervals that stand beside the rates."""
    return max_rate([
        RatePoint(rate.rate_rps, 0.0, max(1.0, rate.effective), 0.0, 0.0) if rate.died else
        RatePoint(rate.rate_rps, rate.attainment, rate.effective, rate.attainment_low, rate.attainment_high,
                  rate.growing)
        for rate in rates
        if rate.died or rate.attainment is not None
    ])  # fmt: skip


def unit_of(rates: Sequence[Rate]) -> str:
    return rates[0].unit if rates else REQUESTS_PER_S


def rate_sentence(most: MaxRate, unit: str = REQUESTS_PER_S) -> str:
    """`about 5.8 requests/s meet 90%; 4 meets it and 8 fails it, with 95% confidence`."""
    reason = most.reason.replace("req/s", unit) if unit != REQUESTS_PER_S else most.reason
    if most.rate_rps is None or (most.at_edge and most.low_rps is None):
        return reason
    found = f"about {most.rate_rps:.3g} {unit} meet {most.share:.0%}"
    if most.resolved:
        return f"{found}; {most.low_rps:g} meets it and {most.high_rps:g} fails it, with 95% confidence"
    return f"{found}; {reason}"
