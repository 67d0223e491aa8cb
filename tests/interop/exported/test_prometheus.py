"""What is scraped equals the records, no more and no less."""

import subprocess
from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sojourn.interop.exported.prometheus import FOLDED_AT_ONCE, FOLDED_TOKENS, Exporter
from sojourn.interop.exported.request_outcome import latencies_ns
from sojourn.metrics.catalog.catalog import METRIC_BY_NAME
from sojourn.metrics.catalog.metric import RATIO_BOUNDS
from sojourn.metrics.ledger import ACCOUNT_BY_NAME, SERVER_ACCOUNTS, closes
from sojourn.metrics.memory.prefix_outcomes import PREFIX_OUTCOMES, RATIOS
from sojourn.metrics.records import COMPOSITIONS, KINDS, STAGES, WAITS, RequestRecord, StepRecord
from sojourn.metrics.steps import Steps
from tests.interop.exported.scraped_page import OBJECTIVES, fed, scraped, value
from tests.metrics.random_records import MS, random_request, random_step

# Histograms of an account, in one's own words and not the exporter's.
ACCOUNT_HISTOGRAMS = {
    "request_admission": "request.admission", "request_queue": "request.queue",
    "request_interference": "request.interference", "request_stream": "request.stream",
    "memory_blocked": "memory.blocked", "token_encode": "token.encode", "token_sample": "token.sample",
    "token_decode": "token.decode",
}  # fmt: skip


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 12))
def test_step_totals_equal_the_sums_over_the_records(seed, count):
    rng = Random(seed)
    steps = [random_step(rng, index) for index in range(count)]
    samples = fed(steps, [])
    for position, stage in enumerate(STAGES):
        total = sum(step.stages[position] for step in steps)
        assert value(samples, "compute_stage_seconds_total", stage=stage) == pytest.approx(total / 1e9)
    for kind in KINDS:
        total = sum(n for step in steps for n, k in zip(step.new_tokens, step.kinds, strict=True) if k == kind)
        assert value(samples, "token_scheduled_tokens_total", kind=kind) == total
    sums = {
        "token_padding_tokens_total": [step.padding_tokens for step in steps],
        "token_overrun_tokens_total": [step.overrun_tokens for step in steps],
        "token_budget_tokens_total": [step.budget for step in steps],
        "token_step_tokens_sum": [sum(step.new_tokens) for step in steps],
        "token_step_tokens_count": [1] * count,
        "compute_flops_total": [step.flops for step in steps],
        "token_logit_rows_total": [step.logit_rows for step in steps],
        "compute_moved_bytes_total": [step.bytes for step in steps],
        "compute_device_seconds_total": [step.device_ns / 1e9 for step in steps],
        "compute_device_gap_seconds_total": [step.gap_ns / 1e9 for step in steps],
        "compute_predicted_seconds_total": [(step.predicted_ns or 0) / 1e9 for step in steps],
        "compute_prediction_ratio_count": [step.predicted_ns is not None for step in steps],
        "memory_evicted_blocks_total": [step.evicted_blocks for step in steps],
        "memory_shadow_evicted_blocks_total": [step.shadow_evicted_blocks for step in steps],
        "memory_preemptions_total": [len(step.preempted_ids) for step in steps],
    }
    for name, parts in sums.items():
        assert value(samples, name) == pytest.approx(sum(parts))
    for part in ("attention", "mlp", "head"):
        flops = sum(getattr(step, f"flops_{part}") for step in steps)
        assert value(samples, "compute_part_flops_total", part=part) == pytest.approx(flops)
    for name in ("flops", "moved_bytes", "device_seconds"):
        by_phase = [value(samples, f"compute_phase_{name}_total", composition=phase) for phase in COMPOSITIONS]
        assert sum(by_phase) == pytest.approx(value(samples, f"compute_{name}_total"))
    samples_of = {
        "token_entropy_nats": (1000, [step.entropy_millinats for step in steps]),
        "token_nucleus_mass_ratio": (1e6, [step.nucleus_mass_ppm for step in steps]),
        "memory_reuse_gap_seconds": (1e9, [step.reuse_gap_ns for step in steps]),
        "memory_reuse_distance_blocks": (1, [step.reuse_distance_blocks for step in steps]),
        "memory_eviction_age_seconds": (1e9, [step.evicted_age_ns for step in steps]),
        "memory_eviction_idle_seconds": (1e9, [step.evicted_idle_ns for step in steps]),
    }
    for name, (scale, lists) in samples_of.items():
        values = [number for numbers in lists for number in numbers]
        assert value(samples, f"{name}_count") == len(values)
        assert value(samples, f"{name}_sum") == pytest.approx(sum(values) / scale)
    given_up = {"self": 0, "other": 0}
    for step in steps:
        for victim, cause, tokens in zip(step.preempted_ids, step.preempted_for, step.preempted_tokens, strict=True):
            given_up["self" if victim == cause else "other"] += tokens
    for cause, tokens in given_up.items():
        assert value(samples, "memory_preempted_tokens_total", cause=cause) == tokens
    refused = sum((Counter(step.refusals) for step in steps), Counter())
    for reason, times in refused.items():
        assert value(samples, "request_refusals_total", reason=reason) == times
    for graph, times in Counter(step.graph for step in steps).items():
        assert value(samples, "compute_steps_total", graph=graph) == times
    residual = sum(step.device_ns - step.predicted_ns for step in steps if step.predicted_ns)
    slower, faster = (value(samples, "compute_residual_seconds_total", direction=way) for way in ("slower", "faster"))
    assert slower - faster == pytest.approx(residual / 1e9, abs=1e-12)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 12))
def test_request_totals_equal_the_sums_over_the_records(seed, count):
    rng = Random(seed)
    requests = [random_request(rng, index) for index in range(count)]
    samples = fed([], requests)
    for info in SERVER_ACCOUNTS:
        labels = {"lifecycle": info.lifecycle, "account": info.name}
        whole = sum(request.ledger[info.account] for request in requests) / 1e9
        first = sum(request.ttft[info.account] for request in requests) / 1e9
        assert value(samples, "request_ledger_seconds_total", **labels) == pytest.approx(whole)
        assert value(samples, "request_ttft_ledger_seconds_total", **labels) == pytest.approx(first)
    for outcome, times in Counter(request.finish_reason or "error" for request in requests).items():
        assert value(samples, "request_finished_total", outcome=outcome) == times
    for reason in WAITS:
        waited = sum(request.waits.get(reason, 0) for request in requests) / 1e9
        assert value(samples, "request_wait_seconds_total", reason=reason) == pytest.approx(waited)
    written = [request for request in requests if request.written_ns is not None]
    ended = [request for request in written if request.finish_reason in ("stop", "length")]
    gaps = [b - a for request in requests for a, b in zip(request.token_ns, request.token_ns[1:], strict=False)]
    off = [request.written_ns - request.arrived_ns - sum(request.ledger) for request in written]
    latency = [request.written_ns - request.arrived_ns for request in written]
    sums = {
        "token_prompt_tokens_total": [request.prompt_tokens for request in requests],
        "token_prompt_characters_total": [request.prompt_characters for request in requests],
        "token_output_characters_total": [request.output_characters for request in requests],
        "token_computed_tokens_total": [request.computed_tokens for request in requests],
        "memory_infinite_hit_tokens_total": [request.infinite_hit_tokens for request in requests],
        "token_generated_tokens_total": [request.output_tokens for request in requests],
        "token_drafted_tokens_total": [request.drafted_tokens for request in requests],
        "token_accepted_tokens_total": [request.accepted_tokens for request in requests],
        "memory_recomputed_tokens_total": [request.recomputed_tokens for request in requests],
        "memory_preempted_seconds_count": [request.preemptions > 0 for request in requests],
        **{
            f"{name}_seconds_sum": [request.ledger[ACCOUNT_BY_NAME[account].account] / 1e9 for request in requests]
            for name, account in ACCOUNT_HISTOGRAMS.items()
        },
        "request_prompt_length_tokens_sum": [request.prompt_tokens for request in requests],
        "request_output_length_tokens_count": [1] * count,
        "request_ttft_seconds_sum": [(request.first_written_ns - request.arrived_ns) / 1e9 for request in written],
        "request_e2e_seconds_sum": [(request.written_ns - request.arrived_ns) / 1e9 for request in ended],
        "request_itl_seconds_sum": [gap / 1e9 for gap in gaps],
        "request_itl_seconds_count": [1] * len(gaps),
        "request_tpot_seconds_sum": [
            (request.token_ns[-1] - request.token_ns[0]) / (len(request.token_ns) - 1) / 1e9
            for request in requests
            if len(request.token_ns) > 1
        ],
        "request_tpot_seconds_count": [len(request.token_ns) > 1 for request in requests],
        "request_unaccounted_seconds_total": [abs(rest) / 1e9 for rest in off],
        "request_unclosed_total": [not closes(*pair) for pair in zip(off, latency, strict=True)],
    }
    for name, parts in sums.items():
        assert value(samples, name) == pytest.approx(sum(parts)), name


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_prefix_outcomes_sum_to_the_prompt_tokens_of_the_requests_that_ran(seed):
    rng = Random(seed)
    requests = [random_request(rng, index) for index in range(8)]
    samples = fed([], requests)
    hit, miss = (value(samples, "memory_prefix_tokens_total", result=result) for result in ("hit", "miss"))
    asked = sum(request.prompt_tokens for request in requests if request.first_step is not None)
    assert hit + miss == asked
    by_cause = {o: value(samples, "memory_prefix_outcome_tokens_total", outcome=o) for o in PREFIX_OUTCOMES}
    assert sum(by_cause.values()) == asked
    assert by_cause["miss_cold"] == sum(request.prefix_outcomes.get("miss_cold", 0) for request in requests)
    for place, ratio in enumerate(RATIOS):
        held = sum(r.resized_hit_tokens[place] for r in requests if len(r.resized_hit_tokens) > place)
        assert value(samples, "memory_resized_hit_tokens_total", pool=f"{ratio:g}") == held
    evicted = [request.evicted_ago_ns for request in requests if request.evicted_ago_ns is not None]
    assert value(samples, "memory_evicted_ago_seconds_count") == len(evicted)
    assert value(samples, "memory_evicted_ago_seconds_sum") == pytest.approx(sum(evicted) / 1e9)


@settings(max_examples=30)
@given(bound=st.sampled_from(METRIC_BY_NAME["sojourn_request_ttft_seconds"].buckets), beyond=st.integers(0, 1))
def test_latency_on_a_bucket_bound_counts_below_it_and_a_nanosecond_more_does_not(bound, beyond):
    latency_ns = round(bound * 1e9) + beyond
    request = RequestRecord("r", arrived_ns=7, finished_ns=7, finish_reason="stop", first_written_ns=7 + latency_ns)
    samples = fed([], [request])
    assert value(samples, "request_ttft_seconds_bucket", le=str(float(bound))) == 1 - beyond
    assert value(samples, "request_ttft_seconds_bucket", le="+Inf") == 1


@settings(max_examples=40)
@given(gaps=st.lists(st.integers(0, 60_000 * MS), min_size=1, max_size=50))
def test_batched_histogram_counts_what_counting_one_by_one_gives(gaps):
    token_ns = [sum(gaps[:index]) for index in range(len(gaps) + 1)]
    samples = fed([], [RequestRecord("r", arrived_ns=0, finished_ns=1, finish_reason="stop", token_ns=token_ns)])
    for bound in METRIC_BY_NAME["sojourn_request_itl_seconds"].buckets:
        expected = sum(gap / 1e9 <= bound for gap in gaps)
        assert value(samples, "request_itl_seconds_bucket", le=str(float(bound))) == expected


def test_step_is_told_apart_by_what_it_was_made_of():
    def step(*kinds: str) -> StepRecord:
        changes = dict(kinds=list(kinds), new_tokens=[1] * len(kinds), request_ids=list("abc")[: len(kinds)])
        return random_step(Random(1)).with_columns(**changes)

    samples = fed(
        [step("prefill", "recompute"), step("decode", "verify"), step("decode"), step("decode", "prefill")], []
    )
    counts = {kind: value(samples, "compute_step_seconds_count", composition=kind) for kind in ("prefill", "decode")}
    assert counts == {"prefill": 1, "decode": 2}
    assert value(samples, "compute_step_seconds_count", composition="mixed") == 1


def test_events_outside_the_records_are_counted_and_recorder_totals_taken_over():
    exporter = Exporter("tiny", clock_ns=iter(range(500 * MS, 600 * MS, MS)).__next__)
    exporter.observe_rejection("queue_full")
    exporter.observe_rejection("queue_full")
    exporter.observe_core_restart()
    exporter.observe_recorder(dropped=3, failed=1)
    exporter.observe_recorder(dropped=5, failed=2)
    exporter.render()
    samples = scraped(exporter)
    assert value(samples, "request_rejected_total", reason="queue_full") == 2
    assert value(samples, "telemetry_core_restarts_total") == 1
    assert value(samples, "telemetry_dropped_records_total") == 5
    assert value(samples, "telemetry_failed_records_total") == 2
    assert value(samples, "telemetry_render_seconds_total") == pytest.approx(0.001)


def test_order_of_the_records_changes_no_total():
    rng = Random(5)
    steps = [random_step(rng, index) for index in range(9)]
    requests = [random_request(rng, index) for index in range(9)]
    gauges = {name for name, metric in METRIC_BY_NAME.items() if metric.kind == "gauge"}

    def totals(samples: dict) -> dict:
        # Times are integers inside and exact in any order; a sum of fractions depends on it in the last digit.
        of_fractions = ("render_seconds_total", "ratio_sum", "tpot_seconds_sum")
        return {key: n for key, n in samples.items() if key[0] not in gauges and not key[0].endswith(of_fractions)}

    assert totals(fed(steps, requests)) == totals(fed(steps[::-1], requests[::-1]))


def test_page_declares_the_whole_catalogue_with_its_types():
    families = {family.name: family for family in text_string_to_metric_families(Exporter("tiny").render().decode())}
    for metric in METRIC_BY_NAME.values():
        assert families[metric.name.removesuffix("_total")].type == metric.kind
    assert len(families) == len(METRIC_BY_NAME)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 9), scrapes=st.sets(st.integers(0, 8)))
def test_requests_count_the_same_however_many_are_folded_at_once(seed, count, scrapes):
    rng = Random(seed)
    requests = [random_request(rng, index) for index in range(count)]
    exporter = Exporter("tiny", OBJECTIVES)
    for index, request in enumerate(requests):
        exporter.observe_request(request)
        if index in scrapes:
            exporter.render()
    by_turns, at_once = scraped(exporter), fed([], requests)
    spent = ("sojourn_telemetry_render_seconds_total", frozenset())
    assert by_turns | {spent: 0} == pytest.approx(at_once | {spent: 0})


@pytest.mark.parametrize(("tokens", "folded"), [(1, FOLDED_AT_ONCE), (FOLDED_TOKENS // 4, 4), (FOLDED_TOKENS, 1)])
def test_a_fold_is_bounded_in_requests_and_in_tokens(monkeypatch, tokens, folded):
    """The front writes no token meanwhile."""
    request = msgspec.structs.replace(random_request(Random(1)), token_ns=[MS * index for index in range(tokens)])
    counts, exporter = [], Exporter("tiny")
    monkeypatch.setattr(exporter._requests, "observe_all", lambda requests, *_: counts.append(len(requests)))
    for _ in range(2 * folded):
        exporter.observe_request(request)
    assert counts == [folded, folded]


def test_model_name_of_any_text_survives_the_page():
    exporter = Exporter('a "b"\\\n{c}')
    family = next(iter(text_string_to_metric_families(exporter.render().decode())))
    assert family.samples[0].labels["model_name"] == 'a "b"\\\n{c}'


@pytest.mark.prometheus
def test_promtool_finds_no_fault_in_the_page():
    rng = Random(3)
    exporter = Exporter("tiny", OBJECTIVES)
    for index in range(20):
        exporter.observe_steps(Steps([random_step(rng, index)]))
        exporter.observe_request(random_request(rng, index))
    exporter.observe_rejection("queue_full")
    done = subprocess.run(["promtool", "check", "metrics"], input=exporter.render(), capture_output=True, check=False)
    assert done.returncode == 0 and not done.stderr and not done.stdout, (done.stdout, done.stderr)


def test_step_as_long_as_predicted_lies_on_the_bound_at_one():
    assert 1.0 in RATIO_BOUNDS
    step = random_step(Random(1)).with_columns(device_ns=MS, predicted_ns=MS)
    samples = fed([step], [])
    assert value(samples, "compute_prediction_ratio_bucket", le="1.0") == 1
    assert value(samples, "compute_residual_seconds_total", direction="slower") == 0


@pytest.mark.parametrize(("choices", "tokens"), [(1, 5), (3, 5), (3, 1)])
def test_time_per_output_token_of_parallel_choices_is_that_of_the_longest(choices, tokens):
    token_ns = sorted([MS * (10 + 20 * index) for index in range(tokens)] * choices)
    request = msgspec.structs.replace(
        random_request(Random(1)), token_ns=token_ns, output_tokens=choices * tokens, longest_output_tokens=tokens
    )
    assert latencies_ns(request).get("tpot_ms") == (20 * MS if tokens > 1 else None)


def test_age_of_the_oldest_wait_is_in_seconds():
    exporter = Exporter("tiny")
    exporter.core.observe_oldest_wait(1.25)
    assert value(scraped(exporter), "request_oldest_wait_seconds") == 1.25
