"""Pages of their shape: of Triton with an ensemble, and of LiteLLM, read with the figures that they state."""

import pytest

from sojourn.interop.sources.page import rows_of
from sojourn.interop.sources.registry import recognise
from sojourn.live.watch.observer import Observer

SECOND = 10**9
TRITON = """\
nv_inference_request_success{{model="ensemble",version="1"}} {ended}
nv_inference_request_success{{model="preprocessing",version="1"}} {ended}
nv_inference_request_success{{model="tensorrt_llm",version="1"}} {ended}
nv_inference_request_success{{model="tensorrt_llm_bls",version="1"}} 0
nv_inference_request_duration_us{{model="ensemble",version="1"}} {e2e_us}
nv_inference_request_duration_us{{model="tensorrt_llm",version="1"}} {e2e_us}
nv_inference_queue_duration_us{{model="ensemble",version="1"}} {queue_us}
nv_inference_queue_duration_us{{model="tensorrt_llm",version="1"}} {queue_us}
nv_inference_exec_count{{model="tensorrt_llm",version="1"}} {ended}
nv_inference_pending_request_count{{model="tensorrt_llm",version="1"}} 0
nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="active",version="1"}} {active}
nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="scheduled",version="1"}} {scheduled}
nv_trt_llm_request_metrics{{model="tensorrt_llm",request_type="max",version="1"}} 64
nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"}} 0.25
nv_trt_llm_kv_cache_block_metrics{{kv_cache_block_type="max",model="tensorrt_llm",version="1"}} 4000
nv_inference_first_response_histogram_ms_bucket{{model="tensorrt_llm",version="1",le="100"}} 0
nv_inference_first_response_histogram_ms_bucket{{model="tensorrt_llm",version="1",le="500"}} {ended}
nv_inference_first_response_histogram_ms_bucket{{model="tensorrt_llm",version="1",le="+Inf"}} {ended}
nv_inference_first_response_histogram_ms_sum{{model="tensorrt_llm",version="1"}} {first_ms}
nv_inference_first_response_histogram_ms_count{{model="tensorrt_llm",version="1"}} {ended}
"""
LITELLM = """\
litellm_in_flight_requests 3
litellm_proxy_total_requests_metric_total{{requested_model="m",status_code="200",team="a"}} {ended}
litellm_proxy_total_requests_metric_total{{requested_model="m",status_code="500",team="a"}} 2
litellm_output_tokens_metric_total{{model="m",requested_model="m",team="a"}} {tokens}
litellm_request_total_latency_metric_sum{{model="m",team="a"}} {total_s}
litellm_request_total_latency_metric_count{{model="m",team="a"}} {ended}
litellm_overhead_latency_metric_sum{{api_provider="openai",model_group="m"}} {front_s}
litellm_overhead_latency_metric_count{{api_provider="openai",model_group="m"}} {ended}
litellm_llm_api_latency_metric_sum{{model="m",team="a"}} {server_s}
litellm_llm_api_latency_metric_count{{model="m",team="a"}} {ended}
"""


def view_of(page: str, seconds: int = 30, **each: float):
    """Of a server that ends a request a second; `each`: what a counter grows by with it, and what gauges show."""
    gauges = {name: each.pop(name) for name in ("active", "scheduled") if name in each}
    observer = Observer("http://x", "x", {}, 60.0)
    for second in range(seconds + 1):
        ended = 100 + second
        text = page.format(ended=ended, **gauges, **{name: ended * by for name, by in each.items()})
        ns = SECOND * (second + 1)
        observer.add(ns, rows_of(text.encode(), ns, 0.01))
    return observer.view()[0]


def test_a_request_of_tritons_ensemble_counts_once_and_microseconds_are_seconds():
    view = view_of(TRITON, active=9, scheduled=4, e2e_us=1.5e6, queue_us=2e3, first_ms=300)
    assert view.source == "triton" and view.finished == 30
    assert view.server_ms == pytest.approx(1500) and view.span("request.admission").mean_ms == pytest.approx(2)
    assert view.gauges["sojourn_request_running"].mean == 4 and view.gauges["sojourn_request_waiting"].mean == 5
    assert view.gauges["sojourn_memory_kv_usage_ratio"].mean == 0.25
    ttft = view.latencies["sojourn_request_ttft_seconds"]
    assert ttft.mean == pytest.approx(0.3) and ttft.between["p50"] == (0.1, 0.5)


def test_models_of_triton_that_hold_no_other_are_added_up():
    page = 'nv_inference_request_success{{model="a",version="1"}} {ended}\n' + (
        'nv_inference_request_success{{model="b",version="1"}} {ended}\n'
    )
    assert view_of(page).finished == 60


def test_an_idle_triton_is_not_stuck_by_the_size_of_its_batch():
    observer = Observer("http://x", "x", {}, 60.0)
    still = TRITON.format(ended=7, e2e_us=1, queue_us=1, first_ms=1, active=0, scheduled=0).encode()
    for second in range(120):
        observer.add(SECOND * (second + 1), rows_of(still, SECOND * (second + 1), 0.01))
    assert observer.watched().state == "idle"


def test_litellm_splits_its_own_overhead_from_the_server_behind():
    view = view_of(LITELLM, tokens=50, total_s=1.02, front_s=0.02, server_s=1.0)
    assert recognise({"litellm_in_flight_requests"}).key == view.source == "litellm"
    assert view.span("request.routing").mean_ms == pytest.approx(20)
    assert view.span("compute.decode").mean_ms == pytest.approx(1000) and view.queue is None
    assert view.server_ms == pytest.approx(1020) and view.finished == 30


def test_a_page_of_tensorrt_llm_without_its_prefix_is_read():
    page = """\
time_to_first_token_seconds_sum{{engine_type="trtllm",model_name="m"}} {first_s}
time_to_first_token_seconds_count{{engine_type="trtllm",model_name="m"}} {ended}
request_success_total{{engine_type="trtllm",finished_reason="stop",model_name="m"}} {ended}
kv_cache_utilization{{engine_type="trtllm",model_name="m"}} 0.5
"""
    view = view_of(page, first_s=0.25)
    assert view.source == "tensorrt-llm" and view.finished == 30 and view.kv_largest == 0.5
    assert view.latencies["sojourn_request_ttft_seconds"].mean == pytest.approx(0.25)
