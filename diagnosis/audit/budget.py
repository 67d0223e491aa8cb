"""A budget: the bounds that a run must keep, in a file that stands beside the code that it guards."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import yaml

from sojourn.diagnosis.audit.audits import ATTAINMENT, AUDITS, FAILED, Audited
from sojourn.diagnosis.verdict import Diagnosis
from sojourn.metrics.errors import InputError

Share = float
Bound = Literal["at most", "at least"]
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
QUANTILES = ("mean", "p50", "p90", "p95", "p99")


class Budget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All parts are optional. Latencies are bounds in milliseconds by quantile: `ttft_ms: {p90: 400}`."""

    attainment: Share = ATTAINMENT  # of the sent requests, at least
    failed: Share = FAILED  # of the sent requests, at most
    ttft_ms: dict[str, float] = {}
    tpot_ms: dict[str, float] = {}
    itl_ms: dict[str, float] = {}
    e2e_ms: dict[str, float] = {}
    goodput_rps: float | None = None  # requests per second that meet their objectives, at least
    output_tokens_per_s: float | None = None  # of good requests, at least
    audits: list[str] = []  # that must pass, beside what the bounds say


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One bound and what was measured; `kept` is None where nothing was."""

    name: str
    bound: str
    measured: str
    kept: bool | None


def read_budget(path: Path) -> Budget:
    """Raises InputError, with the names that are known, for what is no budget."""
    try:
        content = yaml.safe_load(path.read_text("utf-8")) or {}
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    try:
        budget = msgspec.convert(content, Budget)
    except msgspec.ValidationError as error:
        raise InputError(f"{path}: {error}; a budget has {', '.join(Budget.__struct_fields__)}") from None
    _check(path, budget)
    return budget


def _check(path: Path, budget: Budget) -> None:
    for name in ("attainment", "failed"):
        if not 0 <= getattr(budget, name) <= 1:
            raise InputError(f"{path}: {name} is a share of the requests, between 0 and 1")
    for name in LATENCIES:
        for quantile, bound in getattr(budget, name).items():
            if quantile not in QUANTILES or not bound > 0:
                raise InputError(f"{path}: {name} takes milliseconds above 0 by {', '.join(QUANTILES)}")
    known = [audit.key for audit in AUDITS]
    if unknown := [name for name in budget.audits if name not in known]:
        raise InputError(f"{path}: there is no audit {', '.join(unknown)}; known are {', '.join(known)}")


def judge(budget: Budget, diagnosis: Diagnosis, audits: list[Audited]) -> list[Line]:
    """Every bound of the budget. A figure that was not measured is neither kept nor broken."""
    by_key = {each.key: each for each in audits}
    lines = [_of_audit(by_key[key]) for key in ("objectives", "failures")]
    for name in LATENCIES:
        for quantile, bound in getattr(budget, name).items():
            value = _latency(diagnosis, name, quantile)
            lines.append(_line(f"{name.removesuffix('_ms').upper()} {quantile}", "at most", bound, value, "ms"))
    overall = next((each for each in diagnosis.goodput if each.klass == "all"), None)
    rates: Mapping[str, tuple[float | None, float | None, str]] = {
        "goodput": (budget.goodput_rps, overall and overall.goodput_rps, "requests/s"),
        "good output": (budget.output_tokens_per_s, overall and overall.goodput_tokens_per_s, "tokens/s"),
    }
    lines += [_line(name, "at least", bound, value, unit) for name, (bound, value, unit) in rates.items()
              if bound is not None]  # fmt: skip
    return lines + [_of_audit(by_key[key]) for key in budget.audits if key not in ("objectives", "failures")]


def _latency(diagnosis: Diagnosis, name: str, quantile: str) -> float | None:
    summaries: list[Any] = list(diagnosis.results.latencies) if diagnosis.results else []
    found = next((each for each in summaries if each.name == name), None)
    estimate = None if found is None else found.mean if quantile == "mean" else found.quantiles.get(quantile)
    return None if estimate is None else estimate.value


def _line(name: str, side: Bound, bound: float, value: float | None, unit: str) -> Line:
    measured = "not measured" if value is None else f"{value:,.4g} {unit}"
    kept = None if value is None else value <= bound if side == "at most" else value >= bound
    return Line(name=name, bound=f"{side} {bound:,.4g} {unit}", measured=measured, kept=kept)


def _of_audit(audit: Audited) -> Line:
    kept = None if audit.status == "not measurable" else audit.status == "pass"
    return Line(name=audit.key, bound="passes", measured=audit.says, kept=kept)
