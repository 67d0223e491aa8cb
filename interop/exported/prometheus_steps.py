"""Engine steps → counters and histograms. One more family is a line in the catalogue and a line in a table here."""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from sojourn.interop.exported.prometheus_series import Series, Tallies
from sojourn.metrics.catalog.metric import NS_PER_SECOND
from sojourn.metrics.records import ACTIVITIES, COMPOSITIONS, KINDS, STAGES
from sojourn.metrics.steps import Steps

# Counters that are sums of a number field: metric and label values → field.
SUMS = {
    ("sojourn_token_padding_tokens_total",): "padding_tokens",
    ("sojourn_token_overrun_tokens_total",): "overrun_tokens",
    ("sojourn_token_budget_tokens_total",): "budget",
    ("sojourn_token_logit_rows_total",): "logit_rows",
    ("sojourn_compute_device_seconds_total",): "device_ns",
    ("sojourn_compute_device_gap_seconds_total",): "gap_ns",
    ("sojourn_compute_draft_seconds_total",): "draft_ns",
    ("sojourn_compute_draft_flops_total",): "draft_flops",
    ("sojourn_compute_draft_moved_bytes_total",): "draft_bytes",
    ("sojourn_compute_flops_total",): "flops",
    ("sojourn_compute_part_flops_total", "attention"): "flops_attention",
    ("sojourn_compute_part_flops_total", "mlp"): "flops_mlp",
    ("sojourn_compute_part_flops_total", "head"): "flops_head",
    ("sojourn_compute_part_flops_total", "adapters"): "flops_adapters",
    ("sojourn_compute_moved_bytes_total",): "bytes",
    ("sojourn_memory_evicted_blocks_total",): "evicted_blocks",
    ("sojourn_memory_adapter_loads_total",): "adapter_loads",
    ("sojourn_memory_adapter_evictions_total",): "adapter_evictions",
    ("sojourn_memory_shadow_evicted_blocks_total",): "shadow_evicted_blocks",
}
# Counters whose label values are the keys of a map.
TALLIES = {
    "sojourn_token_undrafted_total": "undrafted",
    "sojourn_request_refusals_total": "refusals",
    "sojourn_memory_tier_loaded_bytes_total": "tier_loaded_bytes",
    "sojourn_memory_tier_stored_bytes_total": "tier_stored_bytes",
    "sojourn_memory_tier_load_seconds_total": "tier_load_ns",
    "sojourn_memory_tier_store_seconds_total": "tier_store_ns",
    "sojourn_memory_tier_failures_total": "tier_failures",
    "sojourn_memory_tier_refused_blocks_total": "tier_refused",
    "sojourn_memory_leases_ended_total": "leases_ended",
    "sojourn_compute_exchange_seconds_total": "exchange_ns",
    "sojourn_compute_exchange_hidden_seconds_total": "exchange_hidden_ns",
    "sojourn_compute_exchanged_bytes_total": "exchanged_bytes",
}
# Histograms of list fields that are empty in most steps.
SAMPLES = {
    "sojourn_memory_reuse_gap_seconds": "reuse_gap_ns",
    "sojourn_memory_reuse_distance_blocks": "reuse_distance_blocks",
    "sojourn_memory_eviction_age_seconds": "evicted_age_ns",
    "sojourn_memory_eviction_idle_seconds": "evicted_idle_ns",
    "sojourn_token_entropy_nats": "entropy_millinats",
    "sojourn_token_nucleus_mass_ratio": "nucleus_mass_ppm",
    "sojourn_compute_expert_imbalance_ratio": "expert_imbalance_percent",
}
# Counters that are sums of a number field, by composition of the step.
PHASES = {
    "sojourn_compute_phase_flops_total": "flops",
    "sojourn_compute_phase_moved_bytes_total": "bytes",
    "sojourn_compute_phase_device_seconds_total": "device_ns",
}


def draft_positions(steps: Steps, result: str) -> list[int]:
    """Drafts at each position of all steps; `result` is drafted or accepted."""
    found: list[int] = []
    for counts in steps.values(f"{result}_by_position"):
        found += [0] * (len(counts) - len(found))
        for position, count in enumerate(counts):
            found[position] += count
    return found


class ColumnSums:
    """Samples of counters, each the sum of one column of numbers of the steps."""

    def __init__(self, series: Series, columns: Mapping[tuple[str, ...], str]):
        """`columns`: metric and label values → column."""
        self._samples = [(series.numbers[name], tuple(labels), column) for (name, *labels), column in columns.items()]

    def add(self, steps: Steps, chosen: np.ndarray | None = None) -> None:
        """`chosen`: only those steps, a mask [steps]."""
        for samples, labels, name in self._samples:
            column = steps[name]
            samples[labels] += int((column if chosen is None else column[chosen]).sum())


class StepFold:
    """Folds engine steps in, a batch at once."""

    def __init__(self, series: Series):
        self._numbers, self._histograms = series.numbers, series.histograms
        self._sums = ColumnSums(series, SUMS)
        self._tallies = Tallies(series, TALLIES)
        self._phases = [
            ColumnSums(series, {(name, composition): field for name, field in PHASES.items()})
            for composition in COMPOSITIONS
        ]
        self._limits: tuple[float, float] | None = None

    def limit(self, flops_per_second: float, bytes_per_second: float) -> None:
        """The device's measured limits: from now on steps are held against them."""
        self._limits = (flops_per_second, bytes_per_second)

    def observe(self, steps: Steps) -> None:
        numbers = self._numbers
        self._sums.add(steps)
        self._tallies.add_all(steps.values)
        self._histograms["sojourn_token_step_tokens"][()].observe_all(steps.tokens)
        for stage, ns in zip(STAGES, steps.stages.sum(axis=1).tolist(), strict=True):
            numbers["sojourn_compute_stage_seconds_total"][(stage,)] += ns
        by_kind = np.bincount(steps.kinds, weights=steps.new_tokens, minlength=len(KINDS))
        for kind, tokens in zip(KINDS, by_kind.tolist(), strict=True):
            numbers["sojourn_token_scheduled_tokens_total"][(kind,)] += int(tokens)
        for result in ("drafted", "accepted"):
            for position, count in enumerate(draft_positions(steps, result)):
                numbers["sojourn_token_draft_position_tokens_total"][(str(position), result)] += count
        self._observe_compositions(steps)
        self._observe_predictions(steps)
        for graph, count in Counter(record.graph for record in steps.records).items():
            numbers["sojourn_compute_steps_total"][(graph,)] += count
        for name, field in SAMPLES.items():
            self._histograms[name][()].observe_all(steps.samples(field))
        if steps.records:
            for tier, blocks in steps.records[-1].tier_blocks.items():
                numbers["sojourn_memory_tier_blocks"][(tier,)] = blocks
        self._observe_ranks_and_experts(steps)
        for victim, cause, tokens in steps.preemptions():
            numbers["sojourn_memory_preemptions_total"][()] += 1
            numbers["sojourn_memory_preempted_tokens_total"][("self" if cause == victim else "other",)] += tokens

    def _observe_ranks_and_experts(self, steps: Steps) -> None:
        seconds = self._numbers["sojourn_compute_rank_seconds_total"]
        tokens = self._numbers["sojourn_compute_expert_tokens_total"]
        for record in steps.records:
            if record.experts is not None:
                for expert, count in enumerate(record.experts.expert_tokens):
                    tokens[(str(expert),)] += count
            if record.group is not None:
                for activity in ACTIVITIES:
                    for rank, ns in enumerate(getattr(record.group, f"rank_{activity}_ns")):
                        seconds[(str(rank), activity)] += ns

    def _observe_compositions(self, steps: Steps) -> None:
        wall_ns, needed_ns = steps["end_ns"] - steps["begin_ns"], None
        if self._limits is not None:
            needed_s = np.maximum(steps["flops"] / self._limits[0], steps["bytes"] / self._limits[1])
            needed_ns = np.rint(needed_s * NS_PER_SECOND)
        roofline = self._numbers["sojourn_compute_roofline_seconds_total"]
        for code, composition in enumerate(COMPOSITIONS):
            chosen = steps.compositions == code
            if chosen.any():
                self._phases[code].add(steps, chosen)
                self._histograms["sojourn_compute_step_seconds"][(composition,)].observe_all(wall_ns[chosen])
                if needed_ns is not None:
                    roofline[(composition,)] += int(needed_ns[chosen].sum())

    def _observe_predictions(self, steps: Steps) -> None:
        known = steps["predicted_ns"] > 0
        if known.any():
            predicted, measured = steps["predicted_ns"][known], steps["device_ns"][known]
            residual_ns = measured - predicted
            self._numbers["sojourn_compute_predicted_seconds_total"][()] += int(predicted.sum())
            residual = self._numbers["sojourn_compute_residual_seconds_total"]
            residual[("slower",)] += int(residual_ns[residual_ns > 0].sum())
            residual[("faster",)] -= int(residual_ns[residual_ns <= 0].sum())
            self._histograms["sojourn_compute_prediction_ratio"][()].observe_all(measured / predicted)
