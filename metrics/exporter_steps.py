"""StepRecords → counters and histograms. One more family is a line in the catalogue and a line in a table here."""

from metrics.metric import NS_PER_SECOND
from metrics.records import COMPOSITIONS, StepRecord, composition
from metrics.series import Series, Spectra, Spread, Sums, Tallies

# Counters that are sums of a number field: metric and label values → field.
SUMS = {
    ("sojourn_token_padding_tokens_total",): "padding_tokens",
    ("sojourn_token_overrun_tokens_total",): "overrun_tokens",
    ("sojourn_token_budget_tokens_total",): "budget",
    ("sojourn_token_logit_rows_total",): "logit_rows",
    ("sojourn_compute_device_seconds_total",): "device_ns",
    ("sojourn_compute_device_gap_seconds_total",): "gap_ns",
    ("sojourn_compute_flops_total",): "flops",
    ("sojourn_compute_part_flops_total", "attention"): "flops_attention",
    ("sojourn_compute_part_flops_total", "mlp"): "flops_mlp",
    ("sojourn_compute_part_flops_total", "head"): "flops_head",
    ("sojourn_compute_moved_bytes_total",): "bytes",
    ("sojourn_memory_evicted_blocks_total",): "evicted_blocks",
    ("sojourn_memory_forgotten_prefix_blocks_total",): "forgotten_blocks",
}
# Counters whose label values are the keys of a map.
TALLIES = {
    "sojourn_request_refusals_total": "refusals",
}
# Histograms of list fields that are empty in most steps.
SAMPLES = {
    "sojourn_memory_reuse_gap_seconds": "reuse_gap_ns",
    "sojourn_memory_reuse_distance_blocks": "reuse_distance_blocks",
    "sojourn_memory_eviction_age_seconds": "evicted_age_ns",
    "sojourn_memory_eviction_idle_seconds": "evicted_idle_ns",
    "sojourn_token_entropy_nats": "entropy_millinats",
    "sojourn_token_kept_mass_ratio": "kept_mass_ppm",
}
# Counters that are sums of a number field, by composition of the step.
PHASES = {
    "sojourn_compute_phase_flops_total": "flops",
    "sojourn_compute_phase_moved_bytes_total": "bytes",
    "sojourn_compute_phase_device_seconds_total": "device_ns",
}

_DECODE = ("decode",)


class StepFold:
    """Folds engine steps in. A step that only decodes is not walked request by request."""

    def __init__(self, series: Series):
        numbers, histograms = series.numbers, series.histograms
        self._sums = Sums(series, SUMS)
        self._tallies = Tallies(series, TALLIES)
        self._samples = Spectra(series, SAMPLES)
        self._phases = {
            (made_of,): Sums(series, {(name, made_of): field for name, field in PHASES.items()})
            for made_of in COMPOSITIONS
        }
        self._limits: tuple[float, float] | None = None
        self._roofline = numbers["sojourn_compute_roofline_seconds_total"]
        self._stages = Spread(series, "sojourn_compute_stage_seconds_total")
        self._scheduled = numbers["sojourn_token_scheduled_tokens_total"]
        self._graphs = numbers["sojourn_compute_steps_total"]
        self._preemptions = numbers["sojourn_memory_preemptions_total"]
        self._given_up = numbers["sojourn_memory_preempted_tokens_total"]
        self._predicted = numbers["sojourn_compute_predicted_seconds_total"]
        self._residual = numbers["sojourn_compute_residual_seconds_total"]
        self._ratio = histograms["sojourn_compute_prediction_ratio"][()]
        self._tokens = histograms["sojourn_token_step_tokens"][()]
        self._wall = histograms["sojourn_compute_step_seconds"]

    def limit(self, flops_per_second: float, bytes_per_second: float) -> None:
        """The device's measured limits: from now on steps are held against them."""
        self._limits = (flops_per_second, bytes_per_second)

    def observe(self, step: StepRecord) -> None:
        self._sums.add(step)
        self._tallies.add(step)
        self._samples.observe_all(step)
        self._stages.add(step.stages)
        self._graphs[(step.graph,)] += 1
        kinds, tokens = step.kinds, sum(step.new_tokens)
        self._tokens.observe(tokens)
        if kinds.count("decode") == len(kinds):
            made_of = _DECODE
            self._scheduled[_DECODE] += tokens
        else:
            made_of = (composition(kinds),)
            for kind, new in zip(kinds, step.new_tokens, strict=True):
                self._scheduled[(kind,)] += new
        if kinds:
            self._phases[made_of].add(step)
            if self._limits is not None:
                needed_s = max(step.flops / self._limits[0], step.bytes / self._limits[1])
                self._roofline[made_of] += round(needed_s * NS_PER_SECOND)
            self._wall[made_of].observe(step.end_ns - step.begin_ns)
        if step.preempted_ids:
            self._observe_preemptions(step)
        if step.predicted_ns:
            self._observe_prediction(step.device_ns, step.predicted_ns)

    def settle(self) -> None:
        """Brings the series up to date, for a scrape."""
        self._sums.settle()
        self._stages.settle()
        for phase in self._phases.values():
            phase.settle()

    def _observe_preemptions(self, step: StepRecord) -> None:
        self._preemptions[()] += len(step.preempted_ids)
        for victim, cause, tokens in zip(step.preempted_ids, step.preempted_for, step.preempted_tokens, strict=False):
            self._given_up[("self" if cause == victim else "other",)] += tokens

    def _observe_prediction(self, device_ns: int, predicted_ns: int) -> None:
        residual_ns = device_ns - predicted_ns
        self._predicted[()] += predicted_ns
        self._residual[("slower" if residual_ns > 0 else "faster",)] += abs(residual_ns)
        self._ratio.observe(device_ns / predicted_ns)
