"""Scripts that read vLLM's results read ours: the same keys in the same units."""

import json

import numpy as np
import pandas as pd
import pytest

from sojourn.interop.exported.vllm_result import DETAILED, vllm_result
from sojourn.loadgen.scenario.vllm_flags import parse
from sojourn.metrics.request.goodput import class_goodput, measured
from tests.metrics.request.test_latencies import failed, served
from tests.metrics.synthetic import synthetic_run

# What `vllm bench serve` 0.33 writes for `--save-result --save-detailed` with its default metrics and percentile.
VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens",
    "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts", "errors", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx",
    "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms",
    "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
}  # fmt: skip
OURS = {
    "goodput_slos_ms", "slo_attainment", "slo_attainment_by_metric", "goodput", "token_goodput", "fluidity_index",
    "steady_state", "load_summary", "client_error", "valid",
    "mean_ttft_due_ms", "median_ttft_due_ms", "std_ttft_due_ms", "p99_ttft_due_ms",
    "mean_e2el_due_ms", "median_e2el_due_ms", "std_e2el_due_ms", "p99_e2el_due_ms",
}  # fmt: skip
META = {
    "scenario": {
        "name": "two", "target": {"api": "chat"}, "arrivals": {"process": "gamma", "rate_rps": 4.0, "cv": 2.0}
    },
    "engine": {"model": "tiny"}, "wall_anchor": {"unix_ns": 1_760_000_000_000_000_000}, "valid": True,
    "objectives": [{"klass": "all", "ttft_ms": 100.0, "tpot_ms": 30.0, "source": "test"}],
}  # fmt: skip


def two_and_a_failure() -> pd.DataFrame:
    quick, slow = served(0, 5, [55.0, 75.0, 95.0], [1, 2, 1]), served(100, 100, [400.0, 420.0])
    return pd.DataFrame([quick | {"error": None}, slow | {"error": None}, failed(200) | {"error": "HTTP 500: no"}])


def test_keys_are_those_of_vllm_and_ours_apart():
    written = vllm_result(two_and_a_failure(), META, metrics=("ttft", "tpot", "itl"), percentiles=(99,))
    assert set(written) == VLLM_KEYS | OURS
    short = vllm_result(two_and_a_failure(), META, metrics=("ttft", "tpot", "itl"), percentiles=(99,), detailed=False)
    assert set(short) == (VLLM_KEYS | OURS) - set(DETAILED)


def test_arrays_are_in_seconds_from_the_actual_send_and_summaries_in_milliseconds():
    written = vllm_result(two_and_a_failure(), META)
    assert written["ttfts"] == [pytest.approx(0.05), pytest.approx(0.3), 0.0]
    assert written["latencies"] == [pytest.approx(0.09), pytest.approx(0.32), 0.0]
    for name in ("ttfts", "latencies", "start_times", "queue_times", "output_lens"):
        assert np.isfinite(np.array(written[name]) * 1000).all()
    assert written["itls"] == [pytest.approx([0.02, 0.02]), pytest.approx([0.02]), []]
    assert written["queue_times"][0] == pytest.approx(0.005) and written["input_lens"] == [10, 10, None]
    assert written["output_lens"] == [4, 2, 0] and written["errors"] == ["", "", "HTTP 500: no"]
    assert written["mean_ttft_ms"] == pytest.approx(175) and written["mean_ttft_due_ms"] == pytest.approx(177.5)
    assert written["mean_itl_ms"] == pytest.approx(20) and written["p99_e2el_ms"] == pytest.approx(317.7)


def test_goodput_is_over_the_run_and_attainment_over_what_was_sent():
    written = vllm_result(two_and_a_failure(), META)
    assert written["duration"] == pytest.approx(0.42) and (written["completed"], written["failed"]) == (2, 1)
    assert written["request_goodput"] == written["goodput"] == pytest.approx(1 / 0.42)
    assert written["slo_attainment"] == pytest.approx(1 / 3)
    assert written["slo_attainment_by_metric"] == {"ttft": pytest.approx(1 / 3), "tpot": pytest.approx(2 / 3)}
    assert written["goodput_slos_ms"] == {"ttft": 100.0, "tpot": 30.0}
    assert (written["request_rate"], written["burstiness"], written["max_concurrency"]) == (4.0, 0.25, None)
    assert written["max_output_tokens_per_s"] == 6 and written["max_concurrent_requests"] == 2


def test_tokens_that_nobody_told_are_null_and_not_0():
    untold = two_and_a_failure().assign(output_tokens=None)
    written = vllm_result(untold, META)
    for name in ("total_output_tokens", "output_throughput", "total_token_throughput", "token_goodput"):
        assert written[name] is None, name
    assert written["total_input_tokens"] == 20 and written["output_lens"] == [None, None, 0]
    failures = vllm_result(untold[untold.status != "ok"], META)
    assert failures["total_output_tokens"] == 0  # nothing was served, and that is known
    assert class_goodput(untold, META["objectives"])[0].goodput_tokens_per_s is None
    late = [META["objectives"][0] | {"ttft_ms": 1.0}]
    assert class_goodput(untold, late)[0].goodput_tokens_per_s == 0.0


def test_goodput_against_objectives_that_only_stand_in_is_null_as_in_vllm():
    asked = parse(["--dataset-name", "random", "--base-url", "http://127.0.0.1:1"]).scenario
    stands_in = META | {"objectives": [objective.model_dump(mode="json") for objective in asked.objectives]}
    written = vllm_result(two_and_a_failure(), stands_in)
    for name in ("request_goodput", "goodput", "token_goodput", "slo_attainment"):
        assert written[name] is None
    assert written["goodput_slos_ms"] == {} and written["completed"] == 2


def test_whole_run_becomes_json_and_an_empty_one_too(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=30)
    meta, rows = run.meta(), run.requests()
    written = json.loads(json.dumps(vllm_result(measured(rows, meta), meta), allow_nan=False))
    assert written["completed"] == 30 and len(written["ttfts"]) == 30
    nothing = json.loads(json.dumps(vllm_result(rows[:0], meta), allow_nan=False))
    assert nothing["completed"] == 0 and nothing["mean_ttft_ms"] is None and nothing["request_throughput"] is None
