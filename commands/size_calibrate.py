"""`sojourn size --calibrate`: a run, a result of a benchmark, a log or a page, as one measured point."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.metrics.errors import InputError, ReplayError, RunDataError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sojourn.engine.config import EngineConfig
    from sojourn.interop.held.held import BenchmarkFigures, Held
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.replay.device.estimate import Deployment, DeviceEstimate
    from sojourn.replay.sizing.calibrated import MeasuredPoint
    from sojourn.replay.sizing.corrected import Correction
    from sojourn.replay.sizing.load import SizedLoad


SERVED = 0.9  # of a stated rate: below that a cap on the requests at a time held it back


def correction_of(
    given: str, estimate: "DeviceEstimate", load: "SizedLoad", settings: "Mapping[str, Any]"
) -> "Correction":
    """Raises InputError, RunDataError, ReplayError: a point of another model, degree or device corrects nothing."""
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.replay.device.catalogue import catalogue
    from sojourn.replay.device.recorded_steps import RECORDED, of_model, recorded_deployment
    from sojourn.replay.device.simulate import server_config
    from sojourn.replay.sizing.calibrated import correction_by_point, correction_by_steps

    path, config = Path(given), server_config(estimate, **settings)
    if path.is_dir():
        run = RunDirectory.open(path)
        of_model(run, estimate.deployment)
        recorded = recorded_deployment(run.meta()).device
        if recorded != RECORDED and estimate.deployment.device in catalogue():
            _refuse_other(run.name, "device", recorded, estimate.deployment.device)
        if len(_steps(run)):
            return correction_by_steps(run, estimate)
        return correction_by_point(point_of_run(run), estimate, config, load)
    return _by_evidence(path, estimate, config, load)


def _by_evidence(
    path: Path, estimate: "DeviceEstimate", config: "EngineConfig", load: "SizedLoad"
) -> "Correction":  # fmt: skip
    from sojourn.interop.held.registry import read_file
    from sojourn.replay.sizing.calibrated import correction_by_point

    held = read_file(path)
    for each in held:
        _refuse_other_server(each, estimate.deployment)
    point = next((found for each in held if (found := point_of(each)) is not None), None) or point_of_rows(held)
    if point is None:
        raise InputError(
            f"{path} has no time per output token with a request rate or a concurrency; give a run, a summary of a "
            "benchmark, a page of /metrics or a log of the server under load"
        )
    return correction_by_point(point, estimate, config, load)


def _refuse_other_server(held: "Held", deployment: "Deployment") -> None:
    """As far as the evidence states its model, its degree and its device by names that are known."""
    from sojourn.metrics.compute.model_catalog import known_name, title_of
    from sojourn.replay.device.catalogue import catalogue, device_recorded_as

    stated = {name: held.settings.get(name) for name in ("model", "tensor_parallel_size", "hardware")}
    name, degree = known_name(str(stated["model"] or "")), stated["tensor_parallel_size"]
    hardware = str(stated["hardware"] or "")
    device = device_recorded_as(hardware)
    if device is None:  # a family, as InferenceX names it: h100
        family = [each for each in catalogue() if hardware and each.startswith(f"{hardware.lower()}_")]
        device = None if not family or deployment.device in family else family[0]
    own = title_of(deployment.model)
    if known_name(own) is not None:
        _refuse_other(held.name, "model", name, own)
    if isinstance(degree, int) and not isinstance(degree, bool):
        _refuse_other(held.name, "tensor parallel degree", degree, deployment.tensor_parallel)
    if deployment.device in catalogue():  # a user gives a device of his own another name
        _refuse_other(held.name, "device", device, deployment.device)


def _refuse_other(source: str, what: str, stated: Any, asked: Any) -> None:
    if stated is not None and stated != asked:
        raise ReplayError(
            f"{Path(source).name} was measured with another {what}, {stated}, and corrects no times of {asked}; give a "
            "measured point of this deployment"
        )


def _steps(run: "RunDirectory") -> Any:
    try:
        return run.table("steps")
    except RunDataError:
        return ()


def point_of_run(run: "RunDirectory") -> "MeasuredPoint":
    """Of a run without the server's steps: what its clients saw."""
    from sojourn.metrics.request.goodput import measured
    from sojourn.metrics.results.load import is_closed
    from sojourn.replay.sizing.calibrated import MeasuredPoint

    rows = measured(run.requests(), run.meta())
    rows = rows[(rows.status == "ok") & rows.tpot_ms.notna()]
    if not len(rows):
        raise RunDataError(f"{run.path} has no served request with a time per output token")
    begin, end = float(rows.due_ns.min()), float(rows.last_byte_ns.max())
    closed = is_closed(run.meta())
    return MeasuredPoint(
        source=run.name,
        tpot_ms=float(rows.tpot_ms.mean()),
        rate_rps=None if closed else len(rows) / max(1e-9, (float(rows.due_ns.max()) - begin) / 1e9),
        concurrency=float(rows.e2e_ms.sum()) * 1e6 / max(1.0, end - begin) if closed else None,
        prompt_tokens=_mean(rows.prompt_tokens),
        output_tokens=_mean(rows.output_tokens),
    )


def point_of(held: "Held") -> "MeasuredPoint | None":
    """Of a summary, or of a page with means; None where its figures do not make a point."""
    from sojourn.replay.sizing.calibrated import MeasuredPoint

    found = held.figures
    if found is None:
        return None
    tpot = next((value for name in ("tpot_ms", "itl_ms") for statistic in ("mean", "median")
                 if (value := found.value(name, statistic))), None)  # fmt: skip
    if tpot is None:
        return None
    rate, concurrency = _load(found)
    if concurrency is None and rate is None:
        return None
    return MeasuredPoint(
        source=f"{found.tool}, {Path(held.name).name}" + (f", {found.label}" if found.label else ""),
        tpot_ms=tpot,
        rate_rps=rate,
        concurrency=concurrency,
        prompt_tokens=_tokens(found, "input_tokens", "prompt_tokens"),
        output_tokens=_tokens(found, "output_tokens"),
    )


def _load(found: "BenchmarkFigures") -> tuple[float | None, float | None]:
    """The rate that was sent, or the requests at a time: what the load states, else what came of it. Under a cap a
    rate that was not served is none: the cap held it back."""
    rate, served = _number(found.load.get("request_rate")), _number(found.value("requests_per_s", "rate"))
    capped = _number(found.load.get("max_concurrency")) is not None
    if rate is not None and not (capped and served is not None and served < SERVED * rate):
        return rate, None
    stated = (found.load.get("max_concurrency"), found.value("in_flight", "mean"), found.value("running", "mean"))
    if (at_a_time := next((number for each in stated if (number := _number(each))), None)) is not None:
        return None, at_a_time
    return served, None


def _tokens(found: "BenchmarkFigures", *names: str) -> float | None:
    """The mean of a request."""
    requests = found.value("succeeded", "total")
    for name in names:
        if mean := found.value(name, "mean"):
            return mean
        if requests and (total := found.value(name, "total")):
            return total / requests
    return None


def point_of_rows(held: "Sequence[Held]") -> "MeasuredPoint | None":
    """Of a log, or of several pages: tokens per second and running requests over its span."""
    from sojourn.interop.sources.pressure import RUNNING, WAITING
    from sojourn.replay.sizing.calibrated import MeasuredPoint
    from sojourn.triage.series import groups, judged

    for group in groups(held):
        server = judged(group, {})
        view = None if server is None else server.view
        running = None if view is None else view.gauges.get(RUNNING)
        if view is None or running is None or running.mean <= 0:
            continue
        tokens = sum(value for name, value in view.totals.items() if name.startswith("sojourn_token_generated_tokens"))
        source = ", ".join(dict.fromkeys(Path(each.name).name for each in group))
        if not tokens or view.seconds <= 0:
            continue
        known = view.latencies.get("sojourn_request_tpot_seconds")
        waiting = view.gauges.get(WAITING)
        at_a_time = running.mean + (0.0 if waiting is None else waiting.mean)
        return MeasuredPoint(
            source=source, of_residence=known is None,
            tpot_ms=1e3 * (at_a_time * view.seconds / tokens if known is None else known.mean),
            tokens_per_s=tokens / view.seconds,
        )  # fmt: skip
    return None


def _number(value: Any) -> float | None:
    """Above 0 and finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number > 0 else None


def _mean(values: Any) -> float | None:
    known = values.dropna().astype("float64")
    return float(known.mean()) if len(known) else None
