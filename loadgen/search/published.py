"""Published figures of other tools on the axes of a curve: rows of InferenceX, Benchmark Reports of llm-d, and other
summaries of benchmarks whose number of GPUs is given."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from sojourn.interop.held.held import BenchmarkFigures, Held
from sojourn.interop.held.registry import read_held
from sojourn.loadgen.search.curve import LESSER_QUANTILE, NOT_JUDGED, PUBLISHED, Curve
from sojourn.metrics.errors import InputError
from sojourn.metrics.results.tradeoff import CurvePoint

STATISTICS = {LESSER_QUANTILE: "median"}  # of a curve's quantile
NOT_OURS = "published figures: no run of them was judged"
AXES = "output tokens per second, and a TPOT"


def published_curve(file: Path, quantile: str, gpus: int | None = None) -> Curve:
    """One curve for a file, a point for each of its rows, in order of their load. Its TPOT is the median where the file
    has no other. Raises InputError for a file without such figures."""
    try:
        held = read_held(file.read_bytes(), file.name)
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    rows = [each for each in held if each.figures is not None]
    devices = gpus or _devices(rows)
    chosen = quantile if all(_tpot_ms(each.figures, quantile) for each in rows) else LESSER_QUANTILE
    points = [found for each in rows if (found := _point(each.figures, chosen, devices)) is not None]
    if not points:
        raise InputError(f"{file.name} has no row with {AXES}; give a sweep, or a result with those")
    name = f"{_label(rows)} ({file.name})"
    return Curve(
        name=file.name, label=name, quantile=chosen, points=sorted(points, key=lambda point: point.rate_rps),
        left_out=[f"{len(rows) - len(points)} of {len(rows)} rows lack {AXES}"] if len(points) < len(rows) else [],
        slo_ms=None, crossing=None,
        goodput=msgspec.structs.replace(NOT_JUDGED, sentence=NOT_OURS),
        devices=devices, usd_per_hour=None, joules_per_token={},
        rates=[], source=PUBLISHED,
    )  # fmt: skip


def _tpot_ms(figures: BenchmarkFigures, quantile: str) -> float | None:
    return figures.value("tpot_ms", STATISTICS.get(quantile, quantile))


def _point(figures: BenchmarkFigures, quantile: str, devices: int | None) -> CurvePoint | None:
    """The mean stands in for a median that the file does not have."""
    tpot_ms = _tpot_ms(figures, quantile) or figures.value("tpot_ms")
    tokens_per_s = figures.value("output_tokens_per_s", "rate")
    per_gpu = figures.value("output_tokens_per_s_per_gpu", "rate")
    if tokens_per_s is None and per_gpu is not None and devices:
        tokens_per_s = per_gpu * devices
    if not tpot_ms or not tokens_per_s:
        return None
    slots, rate = figures.load.get("max_concurrency"), figures.load.get("request_rate")
    load, unit = (slots, "in flight") if isinstance(slots, int | float) else (rate, "requests/s")
    return CurvePoint(
        rate_rps=float(load) if isinstance(load, int | float) else 0.0, tpot_ms=tpot_ms, tokens_per_s=tokens_per_s,
        unit=unit, median_tpot_ms=_tpot_ms(figures, LESSER_QUANTILE),
    )  # fmt: skip


def _devices(rows: Sequence[Held]) -> int | None:
    """GPUs of the rows, where all have the same."""
    stated = {each.settings.get("gpus") or each.settings.get("tensor_parallel_size") for each in rows}
    only = stated.pop() if len(stated) == 1 else None
    return int(only) if isinstance(only, int | float) and only >= 1 else None


def _label(rows: Sequence[Held]) -> str:
    first = rows[0]
    told = (first.settings.get(name) for name in ("model", "hardware", "quantization"))
    return " ".join(str(each) for each in (first.figures.tool, *told) if each) if first.figures is not None else ""
