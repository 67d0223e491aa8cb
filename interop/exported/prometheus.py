"""Records → Prometheus. Own arrays in the hot path; text is only made when someone scrapes.

Every number is folded from steps, a RequestRecord or a SystemRecord, or is one of the few events that no record
holds (refusals at the door, restarts, losses of telemetry). One thread owns an Exporter: the one that receives the
records and answers GET /metrics.
"""

import math
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from sojourn.interop.exported.prometheus_core import CoreFold
from sojourn.interop.exported.prometheus_pool import Pool, PoolGauges
from sojourn.interop.exported.prometheus_requests import RequestFold, histogram_of
from sojourn.interop.exported.prometheus_series import CONTENT_TYPE, Series
from sojourn.interop.exported.prometheus_steps import StepFold
from sojourn.interop.exported.prometheus_system import SystemFold
from sojourn.interop.exported.vllm_names import EngineFacts, VllmNames
from sojourn.metrics.catalog.catalog import CATALOG
from sojourn.metrics.catalog.metric import Metric
from sojourn.metrics.records import RequestRecord
from sojourn.metrics.request.objectives import EVERY_CLASS, SERVER_OBJECTIVES, objectives_of
from sojourn.metrics.steps import Steps
from sojourn.metrics.version import own_version

FOLDED_AT_ONCE, FOLDED_TOKENS = 128, 32_768  # requests, or the tokens that they have: a fold stays a few milliseconds
Objectives = Sequence[Mapping[str, Any]]  # as in run.json: [{"klass": "chat", "ttft_ms": 500, "source": "…"}, …]


class Exporter:
    """The state behind GET /metrics of one model.

    `objectives` are those of a scenario or of `run.json`: upper bounds of latency in milliseconds by class, where "all"
    stands for every class that does not name its own. A bound becomes an exact bucket of its histogram. Raises
    ValueError for an unknown objective or a bound that is not positive. `compat`="vllm" adds vLLM's names;
    `telemetry` is the server's setting of that name.
    """

    content_type = CONTENT_TYPE

    def __init__(
        self,
        model_name: str,
        objectives: Objectives | None = None,
        compat: str = "none",
        telemetry: str = "full",
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ):
        self.model_name = model_name
        self.objectives = _bounds_by_class(objectives or ())
        self._clock_ns = clock_ns
        self._compat = compat
        self._vllm: VllmNames | None = None
        self._ended: list[RequestRecord] = []  # and not folded in yet
        self._ended_tokens = 0
        metrics = [_with_objectives(metric, self.objectives) for metric in CATALOG]
        self._series = Series(metrics, {"model_name": model_name})
        self._steps = StepFold(self._series)
        self._requests = RequestFold(self._series, self.objectives)
        self.gauges = PoolGauges(self._series)
        self.system = SystemFold(self._series)
        self.core = CoreFold(self._series)
        self._series.numbers["sojourn_telemetry_enabled_info"][(telemetry,)] = 1
        self._series.numbers["sojourn_telemetry_build_info"][own_version(), platform.python_version()] = 1

    def observe_ready(self, facts: EngineFacts) -> None:
        """A core has loaded its model: its whole pool is free."""
        self.gauges.block_size = facts.block_size
        self.gauges.observe_state(Pool(facts.num_kv_blocks))
        if self._compat == "vllm" and self._vllm is None:  # a restarted core goes on
            self._vllm = VllmNames(self.model_name, facts)

    def observe_steps(self, steps: Steps) -> None:
        """Folds engine steps in. Those of a restarted core go on where the old core's ended."""
        self._steps.observe(steps)
        self.gauges.observe_steps(steps)
        if self._vllm is not None:
            self._vllm.observe_steps(steps)

    def observe_request(self, request: RequestRecord) -> None:
        """Takes one ended request. Many are folded in together."""
        self._ended.append(request)
        self._ended_tokens += len(request.token_ns)
        if len(self._ended) >= FOLDED_AT_ONCE or self._ended_tokens >= FOLDED_TOKENS:
            self._fold_requests()

    def observe_ceilings(self, peak_flops: Mapping[str, float], bytes_per_second: float, precision: str) -> None:
        """The measured limits of the device: FLOPs a second by precision, bytes a second, and the precision in which
        this engine multiplies."""
        peaks = self._series.numbers["sojourn_compute_ceiling_flops_per_second"]
        peaks.update(((measured,), peak) for measured, peak in peak_flops.items())
        self._series.numbers["sojourn_compute_ceiling_bytes_per_second"][()] = bytes_per_second
        if precision in peak_flops:
            self._steps.limit(peak_flops[precision], bytes_per_second)

    def observe_rejection(self, reason: str) -> None:
        """Counts a request refused at the door. `reason` is one of the server's few constants, never a user's text."""
        self._series.numbers["sojourn_request_rejected_total"][(reason,)] += 1

    def observe_moderation(self, flagged: Mapping[tuple[str, str, str], int], failed: Mapping[str, int]) -> None:
        """Takes over the totals of moderation: by kind, category and action, and by check."""
        self._series.numbers["sojourn_request_moderation_flagged_total"].update(flagged)
        totals = {(check,): number for check, number in failed.items()}
        self._series.numbers["sojourn_request_moderation_failed_total"].update(totals)

    def observe_limited(self, tier: str, reason: str) -> None:
        """Counts a call that a limit of its tier refused. Both labels come from a file of the operator and from us."""
        self._series.numbers["sojourn_request_limited_total"][tier, reason] += 1

    def observe_unauthorized(self, reason: str) -> None:
        """Counts a request whose key is missing, invalid or forbidden on its route."""
        self._series.numbers["sojourn_request_unauthorized_total"][(reason,)] += 1

    def observe_access_reload(self, result: str) -> None:
        """Counts a reading of the files of keys and tenants: ok or failed."""
        self._series.numbers["sojourn_request_access_reloads_total"][(result,)] += 1

    def observe_limit_storage_failure(self) -> None:
        """Counts a question to the storage of rate limits that had no answer."""
        self._series.numbers["sojourn_request_limit_storage_failures_total"][()] += 1

    def observe_connections(self, num_open: int, closed: Mapping[str, int]) -> None:
        """Takes over the totals of the server's connections; `closed` by reason."""
        self._series.numbers["sojourn_request_connections"][()] = num_open
        numbers = self._series.numbers["sojourn_request_closed_connections_total"]
        numbers.update(((reason,), count) for reason, count in closed.items())

    def observe_prices(self, totals: Mapping[tuple[str, str, str], Decimal]) -> None:
        """Takes over the totals of the usage records, by tenant, currency and basis."""
        numbers = self._series.numbers["sojourn_request_price_total"]
        summed: dict[tuple[str, str, str], float] = defaultdict(float)
        for (tenant, currency, basis), total in totals.items():
            summed[self._requests.tenant(tenant), currency, basis] += float(total)
        numbers.update(summed)

    def observe_adapters(self, max_loras: int, running: Collection[str], waiting: Collection[str]) -> None:
        """Names of the LoRA adapters that requests use now, and of those that others wait for: for vLLM's names."""
        if self._vllm is not None:
            self._vllm.observe_adapters(max_loras, running, waiting)

    def observe_core_restart(self) -> None:
        """Counts a new core process; what the old one held is gone, so the gauges forget it."""
        self._series.numbers["sojourn_telemetry_core_restarts_total"][()] += 1
        self.gauges.observe_state(None)

    def observe_recorder(self, dropped: int, failed: int) -> None:
        """Takes over the recorder's own totals (`Recorder.dropped`, `Recorder.failed`), summed over all recorders."""
        self._series.numbers["sojourn_telemetry_dropped_records_total"][()] = dropped
        self._series.numbers["sojourn_telemetry_failed_records_total"][()] = failed

    def observe_tracer(self, decisions: Mapping[str, int], exports: Mapping[str, int]) -> None:
        """Takes over the totals of a Tracer, by the values of their label."""
        for name, totals in (("traces", decisions), ("trace_exports", exports)):
            samples = self._series.numbers[f"sojourn_telemetry_{name}_total"]
            samples.update(((label,), total) for label, total in totals.items())

    def render(self) -> bytes:
        """The page for GET /metrics, of `content_type`."""
        begin_ns = self._clock_ns()
        self._fold_requests()
        self.gauges.refresh()
        page = self._series.page()
        if self._vllm is not None:
            page += self._vllm.page(self.gauges)
        self._series.numbers["sojourn_telemetry_render_seconds_total"][()] += self._clock_ns() - begin_ns
        return page.encode()

    def _fold_requests(self) -> None:
        ended, self._ended, self._ended_tokens = self._ended, [], 0
        self._requests.observe_all(ended)
        if self._vllm is not None:
            for request in ended:
                self._vllm.observe_request(request)


def _bounds_by_class(objectives: Objectives) -> dict[str, dict[str, float]]:
    """Class → objective → milliseconds, those of "all" merged in. Raises ValueError for what cannot be meant."""
    stated: dict[str, dict[str, float]] = {}
    for entry in objectives:
        klass = entry.get("klass", EVERY_CLASS)
        for objective, bound in entry.items():
            if objective in ("klass", "source") or bound is None:
                continue
            if objective not in SERVER_OBJECTIVES:
                known = ", ".join(SERVER_OBJECTIVES)
                raise ValueError(f"objectives of {klass!r}: {objective!r} is unknown; give {known}")
            if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf:
                raise ValueError(f"objectives of {klass!r}: {objective} is {bound!r}; give milliseconds above 0")
            stated[klass] = objectives_of(klass, objectives)
    return stated


def _with_objectives(metric: Metric, objectives: dict[str, dict[str, float]]) -> Metric:
    """The metric with the objectives that concern it among its bucket bounds."""
    own = {
        bound / 1000
        for bounds in objectives.values()
        for objective, bound in bounds.items()
        if histogram_of(objective) == metric.name
    }
    return replace(metric, buckets=tuple(sorted({*metric.buckets, *own}))) if own else metric
