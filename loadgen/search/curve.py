"""A search over rates as a curve of throughput against time per output token (TPOT), several side by side, and as a
file."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sojourn.loadgen.search.frontier import REQUIRED_SHARE
from sojourn.loadgen.search.points import (
    Point,
    Rate,
    Search,
    by_rate,
    largest_rate,
    objectives_ms,
    rate_sentence,
    read_search,
    search_file,
    unit_of,
)
from sojourn.metrics.prediction import Interval, settings_text
from sojourn.metrics.results.tradeoff import Crossing, CurvePoint, Range, at_rate, crossing, frontier, tokens_per_usd
from sojourn.metrics.run.directory import section

PLAN_FILE = "plan.json"  # what `sojourn plan` leaves in a run
MEASURED, PUBLISHED, SIMULATED, REPLAYED = "measured", "published", "simulated", "replayed"  # sources of a curve
USUAL_QUANTILE, LESSER_QUANTILE = "p90", "p50"  # goodput requires 90% of the requests; p50 needs fewer of them
NONE_RECOMMENDED: Mapping[str, list[Any]] = {}
LIKE = ("scenario", "objectives_ms", "hardware", "versions")  # of two sweeps whose curves show the settings alone


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """The largest rate at which 90% of the requests meet every objective, and where it lies on the curve."""

    rate_rps: float | None
    low_rps: float | None  # meets it, with 95% confidence
    high_rps: float | None  # fails it, with 95% confidence
    at_edge: bool  # of the sweep: a larger rate may meet it, too
    tokens_per_s: float | None
    tpot_ms: float | None
    sentence: str
    missed: list[str]  # objectives that the p90 of the next rate breaks


WHY_NOT_JUDGED = "is not known: the runs of the sweep are judged by its own objectives"
NOT_JUDGED = Goodput(
    rate_rps=None, low_rps=None, high_rps=None, at_edge=False, tokens_per_s=None, tpot_ms=None, sentence="", missed=[]
)  # fmt: skip
UNJUDGED_RATE = dict.fromkeys(
    ("attainment", "attainment_low", "attainment_high", "goodput_rps", "goodput_tokens_per_s")
)  # fmt: skip


class Recommended(msgspec.Struct, frozen=True, kw_only=True):
    """The limit of the best settings that `sojourn plan` found by replays: a prediction."""

    run: str
    settings: dict[str, Any]
    rate_rps: float
    tpot_ms: Interval
    tokens_per_s: float
    slo_tpot_ms: float | None  # that it was planned for: another one than the sweep's gives another limit
    doubts: list[str]  # why its replays are not trusted

    @property
    def label(self) -> str:
        return settings_text(self.settings) or "the recorded settings"


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration. Without a price, devices or power their figures are None."""

    name: str  # folder of the sweep
    label: str
    quantile: str  # of TPOT over the requests of a rate
    points: list[CurvePoint]
    left_out: list[str]  # sentences: rates without a point
    slo_ms: float | None
    crossing: Crossing | None
    goodput: Goodput
    devices: int | None
    usd_per_hour: float | None
    joules_per_token: dict[float, float]  # by rate
    rates: list[Rate]
    recommended: list[Recommended] = []
    source: str = MEASURED
    required_share: float = REQUIRED_SHARE  # of the requests, that must meet every objective

    @property
    def frontier(self) -> list[CurvePoint]:
        return frontier(self.points)

    @property
    def tokens_per_usd(self) -> float | None:
        return tokens_per_usd(self.goodput.tokens_per_s, self.usd_per_hour)

    @property
    def tokens_per_joule(self) -> float | None:
        """At the largest measured rate up to the goodput: between rates power is not known."""
        below = [rate for rate in self.joules_per_token if rate <= (self.goodput.rate_rps or 0.0)]
        return 1 / self.joules_per_token[max(below)] if below else None


def read_curves(folders: Sequence[Path], quantile: str | None = None, **options: Any) -> list[Curve]:
    """The curves of sweeps, with what `plan` recommends for their runs: each plan once. Raises RunDataError."""
    named = dict(zip(sweep_names(folders), folders, strict=True))
    searches = {name: read_search(search_file(folder)) for name, folder in named.items()}
    quantile = quantile or usable_quantile(by_rate(search.points) for search in searches.values())
    recommended: dict[str, list[Recommended]] = {}
    read: set[Path] = set()
    for name, folder in named.items():
        plans = [file for file in plans_beside(folder) if file not in read]
        read.update(plans)
        recommended[name] = [each for file in plans if (each := read_plan(file, quantile)) is not None]
    return curves(searches, quantile=quantile, recommended=recommended, **options)


def sweep_names(folders: Sequence[Path]) -> list[str]:
    """The name of each folder, with its path where two have the same."""
    names = [folder.resolve().name for folder in folders]
    return [name if names.count(name) == 1 else str(folder) for name, folder in zip(names, folders, strict=True)]


def curves(
    searches: Mapping[str, Search], *, quantile: str | None = None, slo_ms: float | None = None,
    usd_per_hour: float | None = None, devices: int | None = None,
    recommended: Mapping[str, list[Recommended]] = NONE_RECOMMENDED,
) -> list[Curve]:  # fmt: skip
    """A curve for each sweep by its name. `slo_ms` and `usd_per_hour` replace those of the scenarios, `devices` is of
    servers that do not report them. By another `slo_ms` than the sweep's own no run is judged: goodput is not known."""
    rates = {name: by_rate(search.points) for name, search in searches.items()}
    chosen = quantile or usable_quantile(rates.values())
    names = labels({name: search.plan for name, search in searches.items()})
    return [
        _curve(
            name,
            names[name],
            search,
            rates[name],
            quantile=chosen,
            slo_ms=slo_ms,
            usd_per_hour=usd_per_hour,
            devices=devices,
            recommended=recommended.get(name, []),
        )
        for name, search in searches.items()
    ]


def usable_quantile(sweeps: Iterable[Sequence[Rate]]) -> str:
    """The one that goodput requires, unless runs are so short that some sweep has fewer than two points of it."""
    enough = all(
        sum(rate.quantiles_ms.get("tpot_ms", {}).get(USUAL_QUANTILE) is not None for rate in rates)
        >= min(2, sum(rate.attainment is not None for rate in rates))
        for rates in sweeps
    )
    return USUAL_QUANTILE if enough else LESSER_QUANTILE


def labels(plans: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Sweep → the settings in which it differs from the others; its name where they say nothing, or the same."""
    settings = {name: section(section(plan, "scenario"), "engine") | section(section(plan, "target"), "engine")
                for name, plan in plans.items()}  # fmt: skip
    keys = sorted({key for each in settings.values() for key in each})
    differing = [key for key in keys if len({msgspec.json.encode(each.get(key)) for each in settings.values()}) > 1]
    found = {name: settings_text({key: each[key] for key in differing if key in each}) or name
             for name, each in settings.items()}  # fmt: skip
    shared = [label for label in found.values() if list(found.values()).count(label) > 1]
    return {name: f"{name}: {label}" if label in shared else label for name, label in found.items()}


def differences(searches: Sequence[Search]) -> list[str]:
    """What else differs than settings: then the curves do not show the settings alone."""
    plans = [_comparable(search.plan) for search in searches]
    return [name for name in LIKE if any(plan.get(name) != plans[0].get(name) for plan in plans)]


def plans_beside(folder: Path) -> list[Path]:
    """What `sojourn plan` left in the runs of a sweep, and in the runs beside it of the same scenario."""
    scenario = section(section(_json(search_file(folder)), "plan"), "scenario")
    found = sorted(folder.resolve().glob(f"*/{PLAN_FILE}"))
    for file in sorted(folder.resolve().parent.glob(f"*/{PLAN_FILE}")):
        other = section(_json(file.with_name("run.json")), "scenario")
        if other and other.get("name") == scenario.get("name"):
            found.append(file)
    return found


def read_plan(file: Path, quantile: str = USUAL_QUANTILE) -> Recommended | None:
    """None where no rate kept the objectives, or the file is not a plan. `quantile`: of TPOT, as of the curve."""
    document = _json(file)
    limit = section(document, "best_limit")
    prediction = section(limit, "prediction")
    try:
        return Recommended(
            run=str(document["run"]), settings=dict(document["settings"]), rate_rps=float(limit["rate_rps"]),
            tpot_ms=msgspec.convert(prediction["tpot_ms"][quantile], Interval),
            tokens_per_s=float(prediction["output_tokens_per_s"]),
            doubts=[str(each) for each in document["doubts"]],
            slo_tpot_ms=min((each["tpot_ms"] for each in document["objectives"] if each.get("tpot_ms")), default=None),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError):
        return None


def curve_rows(found: Sequence[Curve]) -> list[dict[str, Any]]:
    """One row for each point of each curve, the same columns for all sources; None where a figure is not known."""
    rows = []
    for curve in found:
        best, by_rps = curve.frontier, {rate.rate_rps: rate for rate in curve.rates}
        for point in curve.points:
            rate, joules = by_rps.get(point.rate_rps), curve.joules_per_token.get(point.rate_rps)
            low_ms, high_ms = point.tpot_range_ms or (None, None)
            low, high = point.tokens_range_per_s or (None, None)
            rows.append({
                "configuration": curve.label, "sweep": curve.name, "source": curve.source, "devices": curve.devices,
                "rate_rps": point.rate_rps, "rate_unit": point.unit, "tpot_quantile": curve.quantile,
                "tpot_ms": point.tpot_ms, "tpot_p50_ms": point.median_tpot_ms,
                "tpot_least_ms": low_ms, "tpot_most_ms": high_ms,
                "output_tokens_per_s": point.tokens_per_s, "output_tokens_least_per_s": low,
                "output_tokens_most_per_s": high, "tokens_per_s_per_user": point.user_tokens_per_s,
                "median_tokens_per_s_per_user": point.interactivity,
                "output_tokens_per_s_per_device": point.tokens_per_s / curve.devices if curve.devices else None,
                "attainment": point.attainment,
                "attainment_low": getattr(rate, "attainment_low", None),
                "attainment_high": getattr(rate, "attainment_high", None),
                "goodput_rps": getattr(rate, "goodput_rps", None),
                "good_output_tokens_per_s": getattr(rate, "goodput_tokens_per_s", None), "on_frontier": point in best,
                "output_tokens_per_usd": tokens_per_usd(point.tokens_per_s, curve.usd_per_hour),
                "output_tokens_per_joule": 1 / joules if joules else None,
            })  # fmt: skip
    return rows


def curve_csv(found: Sequence[Curve]) -> str:
    rows, text = curve_rows(found), io.StringIO()
    if rows:
        writer = csv.DictWriter(text, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def curve_json(found: Sequence[Curve]) -> str:
    document = [msgspec.to_builtins(curve, str_keys=True) | {"points": curve_rows([curve])} for curve in found]
    for each in document:
        del each["rates"], each["joules_per_token"]  # the rows hold them
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def _curve(
    name: str, label: str, search: Search, rates: list[Rate], *, quantile: str, slo_ms: float | None,
    usd_per_hour: float | None, devices: int | None, recommended: list[Recommended],
) -> Curve:  # fmt: skip
    plan = search.plan
    own_ms = objectives_ms(plan).get("tpot_ms")
    slo_ms = slo_ms or own_ms
    price = section(section(plan, "scenario"), "measure").get("usd_per_hour") if usd_per_hour is None else usd_per_hour
    counted = {rate.rate_rps: [point for point in search.points if _counts(point, rate)] for rate in rates}
    points = [
        found for rate in rates if (found := _curve_point(rate, counted[rate.rate_rps], quantile)) is not None
    ]  # fmt: skip
    drawn = {point.rate_rps for point in points}
    reported = {point.devices for point in search.points if point.counts} - {None}
    left_out = [_why_left_out(rate, quantile) for rate in rates if rate.rate_rps not in drawn]
    goodput = _goodput(rates, points, objectives_ms(plan))
    if slo_ms != own_ms:
        goodput, rates, points = _not_judged(slo_ms, rates, points)
    return Curve(
        name=name, label=label, quantile=quantile, points=points, slo_ms=slo_ms, rates=rates, usd_per_hour=price,
        left_out=left_out,
        crossing=crossing(points, slo_ms) if slo_ms is not None else None, goodput=goodput,
        devices=reported.pop() if len(reported) == 1 else devices, recommended=recommended,
        joules_per_token=_joules_per_token(counted),
    )  # fmt: skip


def _joules_per_token(counted: Mapping[float, Sequence[Point]]) -> dict[float, float]:
    """The mean of each rate whose runs all measured it."""
    joules = {rps: [each.joules_per_token for each in runs] for rps, runs in counted.items()}
    return {rps: sum(map(float, each)) / len(each) for rps, each in joules.items() if each and all(each)}


def _not_judged(
    slo_ms: float | None, rates: Sequence[Rate], points: Sequence[CurvePoint]
) -> tuple[Goodput, list[Rate], list[CurvePoint]]:
    """Without what the sweep's own objectives said: its runs are not judged by this SLO."""
    return (
        msgspec.structs.replace(NOT_JUDGED, sentence=f"goodput at a TPOT of {slo_ms:g} ms {WHY_NOT_JUDGED}"),
        [msgspec.structs.replace(rate, **UNJUDGED_RATE) for rate in rates],
        [msgspec.structs.replace(point, attainment=None) for point in points],
    )


def _counts(point: Point, rate: Rate) -> bool:
    return point.rate_rps == rate.rate_rps and point.counts and not point.warm_up


def _curve_point(rate: Rate, runs: Sequence[Point], quantile: str) -> CurvePoint | None:
    tpot_ms = rate.quantiles_ms.get("tpot_ms", {}).get(quantile)
    if not tpot_ms or not rate.tokens_per_s:
        return None
    return CurvePoint(
        rate_rps=rate.rate_rps,
        tpot_ms=tpot_ms,
        median_tpot_ms=rate.quantiles_ms["tpot_ms"].get(LESSER_QUANTILE),
        tokens_per_s=rate.tokens_per_s,
        attainment=rate.attainment,
        tpot_range_ms=_range([run.quantiles_ms["tpot_ms"][quantile] for run in runs]),
        tokens_range_per_s=_range([run.tokens_per_s for run in runs]),
        unit=rate.unit,
    )


def _range(values: Sequence[float | None]) -> Range | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if len(known) > 1 else None


def _why_left_out(rate: Rate, quantile: str) -> str:
    at = f"{rate.rate_rps:g} {rate.unit}:"
    if rate.attainment is None:
        return f"{at} no valid run"
    if not rate.tokens_per_s:
        return f"{at} the server reports no output tokens"
    return f"{at} too few served requests per run for a TPOT {quantile}"


def _goodput(rates: Sequence[Rate], points: Sequence[CurvePoint], bounds_ms: Mapping[str, float]) -> Goodput:
    most = largest_rate(rates)
    place = None if most.rate_rps is None else at_rate(points, most.rate_rps)
    tpot_ms, tokens_per_s = place or (None, None)
    above = [rate for rate in rates if rate.attainment is not None and rate.rate_rps > (most.rate_rps or 0.0)]
    p90s = {name: each.get(USUAL_QUANTILE) for name, each in (above[0].quantiles_ms if above else {}).items()}
    return Goodput(
        rate_rps=most.rate_rps, low_rps=most.low_rps, high_rps=most.high_rps, at_edge=most.at_edge,
        tokens_per_s=tokens_per_s, tpot_ms=tpot_ms, sentence=rate_sentence(most, unit_of(rates)),
        missed=[name for name, bound in bounds_ms.items() if (p90s.get(name) or 0.0) > bound],
    )  # fmt: skip


def _comparable(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What two sweeps have to share: without the engine's settings and the rates."""
    scenario = {key: value for key, value in section(plan, "scenario").items() if key not in ("engine", "description")}
    scenario["arrivals"] = {key: value for key, value in section(scenario, "arrivals").items() if key != "rate_rps"}
    return dict(plan) | {"scenario": scenario, "objectives_ms": objectives_ms(plan)}


def _json(file: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.MsgspecError):
        return {}
    return found if isinstance(found, dict) else {}
