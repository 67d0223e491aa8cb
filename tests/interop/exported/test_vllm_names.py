"""vLLM's names say what vLLM means by them: known records, known answers."""

from random import Random

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sojourn.interop.exported.prometheus import Exporter
from sojourn.interop.exported.prometheus_pool import Pool
from sojourn.interop.exported.vllm_names import EngineFacts
from sojourn.metrics.records import RequestRecord
from sojourn.metrics.steps import Steps
from tests.metrics.random_records import MS, random_request, random_step
from tests.metrics.vllm_families import DASHBOARDS, OTHERS

FACTS = EngineFacts(
    num_kv_blocks=100, block_size=16, max_model_len=300, kv_bytes_per_token=10, cache_dtype="float32",
    prefix_caching=True,
)  # fmt: skip
REQUEST = RequestRecord(
    "r", arrived_ns=1000 * MS, finished_ns=2000 * MS, finish_reason="length", prompt_tokens=60, cached_tokens=48,
    output_tokens=4, longest_output_tokens=4, preemptions=1, first_step=3, last_step=9, encoded_ns=1001 * MS,
    queued_ns=1002 * MS, scheduled_ns=1402 * MS, first_written_ns=1601 * MS, written_ns=1999 * MS,
    token_ns=[1600 * MS, 1650 * MS, 1850 * MS, 1900 * MS],
)  # fmt: skip


def exporter(facts: EngineFacts = FACTS) -> Exporter:
    made = Exporter("tiny", compat="vllm")
    made.observe_ready(facts)
    return made


def families(source: Exporter) -> dict:
    found = text_string_to_metric_families(source.render().decode())
    return {family.name[5:]: family for family in found if family.name.startswith("vllm:")}


def value(page: Exporter, name: str, /, **labels: str) -> float:
    """Of one sample, which carries vLLM's two common labels and those given."""
    wanted = {"model_name": "tiny", "engine": "0"} | labels
    samples = (sample for family in families(page).values() for sample in family.samples)
    (found,) = [sample for sample in samples if sample.name == f"vllm:{name}" and sample.labels == wanted]
    return found.value


def observed(name: str, *requests: RequestRecord) -> tuple[float, float]:
    """(count, sum) of a histogram after some requests."""
    source = exporter()
    for request in requests:
        source.observe_request(request)
    return value(source, f"{name}_count"), value(source, f"{name}_sum")


def test_families_are_vllm_s_with_their_types_and_none_without_being_asked_for():
    assert {name: family.type for name, family in families(exporter()).items()} == DASHBOARDS | OTHERS
    native = Exporter("tiny")
    native.observe_ready(FACTS)
    assert not families(native)


def test_what_an_endpoint_picker_reads_of_a_pool():
    source = exporter()
    step = msgspec.structs.replace(
        random_step(Random(1)), blocks_free=20, blocks_reusable=30, blocks_active=50, waiting=7
    )
    source.observe_steps(Steps([step]))
    assert value(source, "num_requests_running") == len(step.request_ids)
    assert value(source, "num_requests_waiting") == 7
    assert value(source, "kv_cache_usage_perc") == 0.5  # what can be evicted is free
    (info,) = families(source)["cache_config_info"].samples
    assert info.value == 1 and info.labels["engine"] == "0"
    assert info.labels["block_size"] == "16" and info.labels["num_gpu_blocks"] == "100"
    source.gauges.observe_state(Pool(free=70, reusable=30))
    assert value(source, "num_requests_running") == value(source, "kv_cache_usage_perc") == 0


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("time_to_first_token_seconds", 0.600),  # from arrival, not from when it was queued
        ("e2e_request_latency_seconds", 0.900),
        ("request_queue_time_seconds", 0.400),
        ("request_prefill_time_seconds", 0.198),
        ("request_decode_time_seconds", 0.300),
        ("request_inference_time_seconds", 0.498),
        ("request_time_per_output_token_seconds", 0.100),
    ],
)
def test_phase_lies_between_vllm_s_two_events(name, seconds):
    assert observed(name, REQUEST) == (1, pytest.approx(seconds))


def test_gap_between_tokens_is_one_observation_a_step():
    assert observed("inter_token_latency_seconds", REQUEST) == (3, pytest.approx(0.3))
    # Two choices that decode side by side, or a draft that was accepted: two tokens of one step.
    twice = msgspec.structs.replace(
        REQUEST, token_ns=sorted([*REQUEST.token_ns, *REQUEST.token_ns]), output_tokens=8, longest_output_tokens=4
    )
    assert observed("inter_token_latency_seconds", twice) == (3, pytest.approx(0.3))
    assert observed("request_time_per_output_token_seconds", twice) == (1, pytest.approx(0.1))
    assert observed("request_max_num_generation_tokens", twice) == (1, 4)
    assert observed("request_generation_tokens", twice) == (1, 8)


def test_single_token_has_no_gap_but_a_mean_of_zero():
    short = msgspec.structs.replace(REQUEST, token_ns=[1600 * MS], output_tokens=1, longest_output_tokens=1)
    assert observed("inter_token_latency_seconds", short) == (0, 0)
    assert observed("request_time_per_output_token_seconds", short) == (1, 0)


def test_prompt_tokens_are_told_apart_by_where_they_came_from():
    source = exporter()
    source.observe_request(REQUEST)
    assert value(source, "prompt_tokens_total") == 60
    assert value(source, "prompt_tokens_by_source_total", source="local_compute") == 12
    assert value(source, "prompt_tokens_by_source_total", source="local_cache_hit") == 48
    assert value(source, "prompt_tokens_by_source_total", source="external_kv_transfer") == 0


def test_preempted_request_has_asked_the_prefix_cache_once():
    source = exporter()
    source.observe_request(REQUEST)
    assert (value(source, "prefix_cache_queries_total"), value(source, "prefix_cache_hits_total")) == (60, 48)
    without = exporter(EngineFacts(100, 16, 300, 10, "float32", prefix_caching=False))
    without.observe_request(msgspec.structs.replace(REQUEST, cached_tokens=0))
    assert value(without, "prefix_cache_queries_total") == 0


def test_client_that_goes_away_is_no_success_but_its_first_token_counts():
    gone = msgspec.structs.replace(REQUEST, finish_reason="abort")
    failed = msgspec.structs.replace(REQUEST, finish_reason=None, error="the core died", token_ns=[])
    source = exporter()
    for request in (gone, failed, REQUEST):
        source.observe_request(request)
    by_reason = {
        reason: value(source, "request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error", "repetition")
    }
    assert by_reason == {"stop": 0, "length": 1, "abort": 0, "error": 1, "repetition": 0}
    assert value(source, "time_to_first_token_seconds_count") == 2
    assert value(source, "e2e_request_latency_seconds_count") == 1


def test_steps_count_as_they_happen():
    source, rng = exporter(), Random(2)
    steps = [random_step(rng, index) for index in range(9)]
    for step in steps:
        source.observe_steps(Steps([step]))
    tokens = sum(sum(step.new_tokens) for step in steps)
    assert value(source, "iteration_tokens_total_sum") == tokens
    assert value(source, "iteration_tokens_total_count") == 9
    assert value(source, "generation_tokens_total") == sum(step.emitted_tokens for step in steps)
    assert value(source, "num_preemptions_total") == sum(len(step.preempted_ids) for step in steps)
    flops = sum(step.flops for step in steps)
    assert value(source, "estimated_flops_per_gpu_total") == pytest.approx(
        flops, rel=1e-15
    )  # beyond 2^53 a float rounds
    assert value(source, "estimated_write_bytes_per_gpu_total") == 10 * tokens
    for name, lists in (
        ("lifetime", [s.evicted_age_ns for s in steps]),
        ("reuse_gap", [s.reuse_gap_ns for s in steps]),
    ):
        assert value(source, f"kv_block_{name}_seconds_count") == sum(map(len, lists))
    read = value(source, "estimated_read_bytes_per_gpu_total")
    assert read == sum(step.bytes for step in steps) - 10 * tokens
    assert value(source, "estimated_read_bytes_per_gpu_total") == read  # a second scrape takes nothing off again


def test_buckets_are_vllm_s():
    source = exporter()
    source.observe_request(random_request(Random(3)))
    bounds = {
        name: [float(s.labels["le"]) for s in families(source)[name].samples if s.name.endswith("_bucket")]
        for name in ("request_prompt_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds")
    }
    assert bounds["request_prompt_tokens"] == [1, 2, 5, 10, 20, 50, 100, 200, float("inf")]  # up to max_model_len
    assert bounds["time_to_first_token_seconds"][:3] == [0.001, 0.005, 0.01]
    assert bounds["inter_token_latency_seconds"][-2] == 80


def test_restarted_core_goes_on_where_the_old_one_ended():
    source = exporter()
    source.observe_request(REQUEST)
    source.observe_core_restart()
    source.observe_ready(FACTS)
    assert value(source, "prompt_tokens_total") == 60
