"""Records → Prometheus. Own arrays in the hot path; Prometheus' families are built only when someone scrapes.

Every number is folded from a StepRecord or a RequestRecord, or is one of the few events that no record holds (refusals
at the door, restarts, losses of the recorder). Durations are kept as integer nanoseconds, so that sums are exact, and
become seconds at the scrape. One thread owns an Exporter: the one that receives the records and answers GET /metrics.
"""

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.utils import floatToGoString

from metrics.catalog import CATALOG, GOOD, Metric
from metrics.ledger import SERVER_ACCOUNTS, Account, closes
from metrics.objectives import EVERY_CLASS, OBJECTIVES, objectives_of
from metrics.records import STAGES, RequestRecord, StepRecord

NS_PER_SECOND = 1_000_000_000
Objectives = Sequence[Mapping[str, Any]]  # as in run.json: [{"klass": "chat", "ttft_ms": 500, "source": "…"}, …]


class Histogram:
    """Counts between inclusive upper bounds, and the exact sum; the last count is of what lies above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: list[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: np.ndarray) -> None:
        """Many at once: integer values of shape [n]."""
        places = np.searchsorted(self.bounds, values, side="left")
        for place, count in zip(*np.unique(places, return_counts=True), strict=True):
            self.counts[place] += int(count)
        self.total += int(values.sum())


class Exporter:
    """The state behind GET /metrics of one model. Also a prometheus_client Collector (`collect`).

    `objectives` are those of a scenario or of `run.json`: upper bounds of latency in milliseconds by class, where "all"
    stands for every class that does not name its own. A bound becomes an exact bucket of its histogram. Raises
    ValueError for an unknown objective or a bound that is not positive.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(
        self,
        model_name: str,
        objectives: Objectives | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ):
        self.model_name = model_name
        self._objectives = _bounds_by_class(objectives or ())
        self._clock_ns = clock_ns
        self._metrics = {metric.name: _with_objectives(metric, self._objectives) for metric in CATALOG}
        # counters and gauges: name → label values → number
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {}
        for name, metric in self._metrics.items():
            if metric.kind == "histogram":
                bounds = [_stored(metric, bound) for bound in metric.buckets]
                self._histograms[name] = {values: Histogram(bounds) for values in metric.values}
            else:
                self._values[name] = defaultdict(int, dict.fromkeys(metric.values, 0))
        for klass, bounds in self._objectives.items():
            for objective in (*bounds, GOOD):
                for outcome in ("met", "missed"):
                    self._values["sojourn_request_objective_total"][klass, objective, outcome] = 0
        self._forget_pool()

    def observe_step(self, step: StepRecord) -> None:
        """Folds one engine step in. Steps of a restarted core go on where the old core's ended."""
        values, histograms = self._values, self._histograms
        wall_ns = step.end_ns - step.begin_ns
        scheduled = values["sojourn_token_scheduled_tokens_total"]
        for kind, new in zip(step.kinds, step.new_tokens, strict=True):
            scheduled[(kind,)] += new
        stages = values["sojourn_compute_stage_seconds_total"]
        for stage, duration in zip(STAGES, step.stages, strict=True):
            stages[(stage,)] += duration
        refusals = values["sojourn_request_refusals_total"]
        for reason, count in step.refusals.items():
            refusals[(reason,)] += count
        values["sojourn_token_padding_tokens_total"][()] += step.padding_tokens
        values["sojourn_token_overrun_tokens_total"][()] += step.overrun_tokens
        values["sojourn_token_budget_tokens_total"][()] += step.budget
        values["sojourn_compute_device_seconds_total"][()] += step.device_ns
        values["sojourn_compute_device_gap_seconds_total"][()] += step.gap_ns
        values["sojourn_compute_flops_total"][()] += step.flops
        values["sojourn_compute_moved_bytes_total"][()] += step.bytes
        values["sojourn_compute_steps_total"][(step.graph,)] += 1
        values["sojourn_memory_evicted_blocks_total"][()] += step.evicted_blocks
        values["sojourn_memory_preemptions_total"][()] += len(step.preempted_ids)
        histograms["sojourn_token_step_tokens"][()].observe(sum(step.new_tokens))
        if step.kinds:
            histograms["sojourn_compute_step_seconds"][(_composition(step.kinds),)].observe(wall_ns)
        if step.predicted_ns:
            self._observe_prediction(step.device_ns, step.predicted_ns)
        values["sojourn_request_running"][()] = len(step.request_ids)
        values["sojourn_request_waiting"][()] = step.waiting
        self._set_pool(step.blocks_free, step.blocks_active, step.blocks_reusable, step.blocks_pinned)

    def observe_idle(
        self, blocks_free: int, blocks_active: int, blocks_reusable: int, blocks_pinned: int, waiting: int = 0
    ) -> None:
        """Brings the gauges up to date when no step runs, so that they do not show the last busy moment for ever."""
        self._values["sojourn_request_running"][()] = 0
        self._values["sojourn_request_waiting"][()] = waiting
        self._set_pool(blocks_free, blocks_active, blocks_reusable, blocks_pinned)

    def observe_request(self, request: RequestRecord) -> None:
        """Folds one ended request in."""
        values, histograms = self._values, self._histograms
        outcome = "error" if request.error is not None else request.finish_reason or "error"
        values["sojourn_request_finished_total"][(outcome,)] += 1
        values["sojourn_token_prompt_tokens_total"][()] += request.prompt_tokens
        values["sojourn_token_computed_tokens_total"][()] += request.computed_tokens
        values["sojourn_token_generated_tokens_total"][()] += request.output_tokens
        values["sojourn_token_drafted_tokens_total"][()] += request.drafted_tokens
        values["sojourn_token_accepted_tokens_total"][()] += request.accepted_tokens
        values["sojourn_memory_recomputed_tokens_total"][()] += request.recomputed_tokens
        if request.first_step is not None:  # one that never ran has asked the prefix cache for nothing
            prefix = values["sojourn_memory_prefix_tokens_total"]
            prefix[("hit",)] += request.cached_tokens
            prefix[("miss",)] += request.prompt_tokens - request.cached_tokens
        histograms["sojourn_request_prompt_length_tokens"][()].observe(request.prompt_tokens)
        histograms["sojourn_request_output_length_tokens"][()].observe(request.output_tokens)
        self._observe_ledger(request)
        latencies_ns = self._observe_latencies(request, outcome)
        if self._objectives:
            self._judge(request.klass, latencies_ns, served=outcome in ("stop", "length"))

    def observe_rejection(self, reason: str) -> None:
        """Counts a request refused at the door. `reason` is one of the server's few constants, never a user's text."""
        self._values["sojourn_request_rejected_total"][(reason,)] += 1

    def observe_core_restart(self) -> None:
        """Counts a new core process; what the old one held is gone, so the gauges forget it."""
        self._values["sojourn_telemetry_core_restarts_total"][()] += 1
        self._values["sojourn_request_running"][()] = 0
        self._values["sojourn_request_waiting"][()] = 0
        self._forget_pool()

    def observe_recorder(self, dropped: int, failed: int) -> None:
        """Takes over the recorder's own totals (`Recorder.dropped`, `Recorder.failed`), summed over all recorders."""
        self._values["sojourn_telemetry_dropped_records_total"][()] = dropped
        self._values["sojourn_telemetry_failed_records_total"][()] = failed

    def render(self) -> bytes:
        """The page for GET /metrics, of `content_type`."""
        begin_ns = self._clock_ns()
        page = generate_latest(self)
        self._values["sojourn_telemetry_render_seconds_total"][()] += self._clock_ns() - begin_ns
        return page

    def collect(self) -> Iterator[Family]:
        """One Prometheus family a metric of the catalogue; those without a series yet are declared all the same."""
        for name, metric in self._metrics.items():
            if metric.kind == "histogram":
                yield self._histogram_family(metric)
            else:
                family_type = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
                family = family_type(name, metric.help, labels=("model_name", *metric.labels))
                for labels, value in self._values[name].items():
                    family.add_metric((self.model_name, *labels), _exported(metric, value))
                yield family

    def _histogram_family(self, metric: Metric) -> HistogramMetricFamily:
        family = HistogramMetricFamily(metric.name, metric.help, labels=("model_name", *metric.labels))
        bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
        for labels, histogram in self._histograms[metric.name].items():
            cumulated = np.cumsum(histogram.counts).tolist()
            buckets = list(zip(bounds, cumulated, strict=True))
            family.add_metric((self.model_name, *labels), buckets, _exported(metric, histogram.total))
        return family

    def _observe_prediction(self, device_ns: int, predicted_ns: int) -> None:
        residual_ns = device_ns - predicted_ns
        direction = "slower" if residual_ns > 0 else "faster"
        self._values["sojourn_compute_predicted_seconds_total"][()] += predicted_ns
        self._values["sojourn_compute_residual_seconds_total"][(direction,)] += abs(residual_ns)
        self._histograms["sojourn_compute_prediction_ratio"][()].observe(device_ns / predicted_ns)

    def _observe_ledger(self, request: RequestRecord) -> None:
        whole = self._values["sojourn_request_ledger_seconds_total"]
        to_first = self._values["sojourn_request_ttft_ledger_seconds_total"]
        for info in SERVER_ACCOUNTS:
            whole[info.lifecycle, info.name] += request.ledger[info.account]
            to_first[info.lifecycle, info.name] += request.ttft[info.account]
        if request.written_ns is not None:
            latency_ns = request.written_ns - request.arrived_ns
            unaccounted_ns = latency_ns - sum(request.ledger[info.account] for info in SERVER_ACCOUNTS)
            self._values["sojourn_request_unaccounted_seconds_total"][()] += abs(unaccounted_ns)
            self._values["sojourn_request_unclosed_total"][()] += not closes(unaccounted_ns, latency_ns)
        for name, account in _ACCOUNT_HISTOGRAMS:
            self._histograms[name][()].observe(request.ledger[account])
        if request.preemptions:
            self._histograms["sojourn_memory_preempted_seconds"][()].observe(request.ledger[Account.MEMORY_PREEMPTED])

    def _observe_latencies(self, request: RequestRecord, outcome: str) -> dict[str, float]:
        """Books what the request has of TTFT, ITL, TPOT and end to end; returns what has objectives, in ns."""
        latencies_ns: dict[str, float] = {}
        if request.first_written_ns is not None:
            latencies_ns["ttft_ms"] = request.first_written_ns - request.arrived_ns
        if len(request.token_ns) > 1:
            gaps_ns = np.diff(np.asarray(request.token_ns, dtype=np.int64))
            latencies_ns["tpot_ms"] = (request.token_ns[-1] - request.token_ns[0]) / len(gaps_ns)
            self._histograms["sojourn_request_itl_seconds"][()].observe_all(gaps_ns)
        if request.written_ns is not None and outcome in ("stop", "length"):
            latencies_ns["e2e_ms"] = request.written_ns - request.arrived_ns
        for objective, latency_ns in latencies_ns.items():
            self._histograms[_histogram_of(objective)][()].observe(latency_ns)
        return latencies_ns

    def _judge(self, klass: str, latencies_ns: dict[str, float], served: bool) -> None:
        """Met or missed, for each objective of the request's class and for all of them together."""
        klass = klass if klass in self._objectives else EVERY_CLASS
        judged = self._values["sojourn_request_objective_total"]
        good = served
        for objective, bound_ms in self._objectives.get(klass, {}).items():
            # As in goodput.judged: one token has no gap that could be too long; what else never came has missed.
            never = 0 if objective == "tpot_ms" else math.inf
            met = served and latencies_ns.get(objective, never) <= bound_ms * 1e6
            good = good and met
            judged[klass, objective, "met" if met else "missed"] += 1
        if klass in self._objectives:
            judged[klass, GOOD, "met" if good else "missed"] += 1

    def _set_pool(self, free: int, active: int, reusable: int, pinned: int) -> None:
        blocks = self._values["sojourn_memory_kv_blocks"]
        blocks[("free",)] = free
        blocks[("active",)] = active
        blocks[("reusable",)] = reusable
        blocks[("pinned",)] = pinned
        size = free + active + reusable + pinned
        self._values["sojourn_memory_kv_usage_ratio"][()] = (active + pinned) / size if size else 0.0

    def _forget_pool(self) -> None:
        """No value is better than a wrong one: the pool is unknown until a core tells of it."""
        self._values["sojourn_memory_kv_blocks"].clear()
        self._values["sojourn_memory_kv_usage_ratio"].clear()


_ACCOUNT_HISTOGRAMS = (
    ("sojourn_request_queue_seconds", Account.REQUEST_QUEUE),
    ("sojourn_memory_blocked_seconds", Account.MEMORY_BLOCKED),
    ("sojourn_token_encode_seconds", Account.TOKEN_ENCODE),
    ("sojourn_token_sample_seconds", Account.TOKEN_SAMPLE),
    ("sojourn_token_decode_seconds", Account.TOKEN_DECODE),
)


def _composition(kinds: list[str]) -> str:
    """What a step was made of. Rebuilding KV is prompt work; verifying drafts is decoding."""
    decodes = sum(kind in ("decode", "verify") for kind in kinds)
    if decodes == len(kinds):
        return "decode"
    return "mixed" if decodes else "prefill"


def _histogram_of(objective: str) -> str:
    return f"sojourn_request_{objective.removesuffix('_ms')}_seconds"


def _bounds_by_class(objectives: Objectives) -> dict[str, dict[str, float]]:
    """Class → objective → milliseconds, those of "all" merged in. Raises ValueError for what cannot be meant."""
    stated: dict[str, dict[str, float]] = {}
    for entry in objectives:
        klass = entry.get("klass", EVERY_CLASS)
        for objective, bound in entry.items():
            if objective in ("klass", "source") or bound is None:
                continue
            if objective not in OBJECTIVES:
                raise ValueError(f"objectives of {klass!r}: {objective!r} is unknown; give {', '.join(OBJECTIVES)}")
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
        if _histogram_of(objective) == metric.name
    }
    return replace(metric, buckets=tuple(sorted({*metric.buckets, *own}))) if own else metric


def _stored(metric: Metric, value: float) -> float:
    """A value in the metric's unit as it is kept here: seconds as nanoseconds."""
    return round(value * NS_PER_SECOND) if metric.unit == "seconds" else value


def _exported(metric: Metric, value: float) -> float:
    return value / NS_PER_SECOND if metric.unit == "seconds" else value
