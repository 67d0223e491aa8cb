"""Small summaries in each tool's shape. One story in all of them: 100 requests in 50 s, TTFT 200 ms, TPOT 20 ms, 101
output tokens, E2E 2.2 s; p99 of TTFT is 900 ms."""

import json
from typing import Any

import yaml

from tests.interop.held.more_shapes import MORE

STATS = {"p90": 1.5, "p99": 4.5}  # by which the percentiles of TTFT exceed the mean


def vllm(**others: Any) -> dict[str, Any]:
    return {
        "backend": "vllm", "model_id": "m", "num_prompts": 100, "request_rate": "inf", "max_concurrency": 5,
        "duration": 50.0, "completed": 100, "failed": 0, "total_input_tokens": 20_000, "total_output_tokens": 10_100,
        "request_throughput": 2.0, "request_goodput:": None, "output_throughput": 202.0, "mean_ttft_ms": 200.0,
        "median_ttft_ms": 180.0, "p99_ttft_ms": 900.0, "mean_tpot_ms": 20.0, "median_tpot_ms": 20.0,
        "mean_itl_ms": 20.0,
        "mean_e2el_ms": 2200.0, "p99_e2el_ms": 3000.0,
    } | others  # fmt: skip


def sglang() -> dict[str, Any]:
    found = {name.replace("e2el", "e2e_latency"): value for name, value in vllm().items()}
    return found | {"backend": "sglang", "total_output_tokens_retokenized": 10_050, "concurrency": 4.4}


TABLE = """
============ Serving Benchmark Result ============
Successful requests:                     100
Maximum request concurrency:             5
Benchmark duration (s):                  50.00
Total input tokens:                      20000
Total generated tokens:                  10100
Request throughput (req/s):              2.00
Output token throughput (tok/s):         202.00
---------------Time to First Token----------------
Mean TTFT (ms):                          200.00
Median TTFT (ms):                        180.00
P99 TTFT (ms):                           900.00
-----Time per Output Token (excl. 1st token)------
Mean TPOT (ms):                          20.00
----------------End-to-end Latency----------------
Mean E2EL (ms):                          2200.00
==================================================
"""


def inferencex() -> dict[str, Any]:
    return {
        "hw": "h100", "conc": 5, "image": "vllm/vllm-openai:v0.21.0", "model": "m", "framework": "vllm", "isl": 200,
        "osl": 101, "tp": 8, "tput_per_gpu": 75.0, "output_tput_per_gpu": 25.0, "mean_ttft": 0.2, "p99_ttft": 0.9,
        "mean_tpot": 0.02, "median_tpot": 0.02, "median_intvty": 50.0, "mean_e2el": 2.2,
    }  # fmt: skip


def llmd(version: str = "0.2.1") -> dict[str, Any]:
    def of(units: str, mean: float, **more: float) -> dict[str, Any]:
        return {"units": units, "mean": mean, **more}

    made = {
        "requests": {"total": 100, "failures": 0, "output_length": of("count", 101.0)},
        "latency": {"time_to_first_token": of("ms", 200.0, p99=900.0), "request_latency": of("s", 2.2),
                    "time_per_output_token": of("s/token", 0.02)},
        "throughput": {"output_token_rate": of("tokens/s", 202.0), "request_rate": of("queries/s", 2.0)},
    }  # fmt: skip
    load = {"standardized": {"tool": "inference-perf", "tool_version": "0.3.0", "rate_qps": 2.0}}
    head: dict[str, Any] = {"version": version, "scenario": {"load": load}}
    if version == "0.1":
        made["throughput"] = {"output_tokens_per_sec": 202.0, "requests_per_sec": 2.0}
        return head | {"metrics": made}
    return head | {"run": {"uid": "a"}, "results": {"request_performance": {"aggregate": made}}}


def _distribution(mean: float, p99: float) -> dict[str, Any]:
    return {"successful": {"mean": mean, "median": mean, "std_dev": 1.0, "min": 0.0, "max": p99, "count": 100,
                           "percentiles": {"p001": 0.0, "p01": 0.0, "p05": 0.0, "p99": p99}}}  # fmt: skip


def guidellm() -> dict[str, Any]:
    metrics = {
        "request_totals": {"successful": 100, "errored": 0, "incomplete": 0, "total": 100},
        "requests_per_second": _distribution(2.0, 4.0), "request_concurrency": _distribution(4.4, 5.0),
        "request_latency": _distribution(2.2, 3.0), "time_to_first_token_ms": _distribution(200.0, 900.0),
        "time_per_output_token_ms": _distribution(21.8, 30.0), "inter_token_latency_ms": _distribution(20.0, 25.0),
        "output_token_count": _distribution(101.0, 101.0), "output_tokens_per_second": _distribution(202.0, 300.0),
    }  # fmt: skip
    strategy = {"type_": "concurrent", "streams": 5}
    benchmark = {"config": {"strategy": strategy}, "metrics": metrics, "duration": 50.0}
    return {"metadata": {"guidellm_version": "0.5.0"}, "benchmarks": [benchmark]}


GUIDELLM_CSV = """Run Info,Request Counts,Request Latency,Time to First Token,Time to First Token,Time to First Token
Run ID,Successful,Successful Sec,Successful ms,Successful ms,Successful ms
,,Mean,Mean,Median,Percentiles
a,100,2.2,200.0,180.0,"[1, 2, 3, 4, 5, 6, 300, 400, 500, 900, 950]"
"""
GUIDELLM_FLAT = (
    "Type,Run Id,Name,Duration,Successful Requests,Successful Request latency mean,"
    "Successful Time to first token ms mean,Successful Time to first token ms median,"
    '"Successful Time to first token ms [min, 0.1, 1, 5, 10, 25, 75, 90, 95, 99, max]"'
    '\ngenerative,r,concurrent@5,50.0,100,2.2,200.0,180.0,"[1, 2, 3, 4, 5, 6, 300, 400, 500, 900, 950]"\n'
)


def aiperf() -> dict[str, Any]:
    return {
        "aiperf_version": "0.13.0", "time_to_first_token": {"unit": "ms", "avg": 200.0, "p50": 180.0, "p99": 900.0},
        "inter_token_latency": {"unit": "ms", "avg": 20.0}, "request_latency": {"unit": "sec", "avg": 2.2, "p99": 3.0},
        "output_sequence_length": {"unit": "tokens", "avg": 101.0}, "request_count": {"unit": "requests", "avg": 100},
        "request_throughput": {"unit": "requests/sec", "avg": 2.0}, "benchmark_duration": {"unit": "sec", "avg": 50.0},
    }  # fmt: skip


AIPERF_CSV = """Metric,avg,min,max,p50,p99,std
Inter Token Latency (ms),20.00,1,30,20,25,1
Output Sequence Length (tokens),101.00,101,101,101,101,0
Request Latency (ms),"2,200.00",1,3000,2200,3000,1
Time to First Token (ms),200.00,1,950,180.00,900.00,1

Metric,Value
Benchmark Duration (sec),50.00
Request Count,100
Request Throughput (requests/sec),2.00
"""


def _seconds(mean: float, p99: float) -> dict[str, float]:
    return {"mean": mean, "median": mean * 0.9, "p99": p99, "max": p99}


def inference_perf(**load: Any) -> dict[str, Any]:
    return {
        "load_summary": {"count": 100, "schedule_delay": _seconds(0.001, 0.01)} | load,
        "successes": {
            "count": 100, "latency": {
                "request_latency": _seconds(2.2, 3.0), "time_to_first_token": _seconds(0.2, 0.9),
                "time_per_output_token": _seconds(0.02, 0.025)},
            "throughput": {"requests_per_sec": 2.0, "output_tokens_per_sec": 202.0}, "output_len": {"mean": 101.0}},
        "failures": {"count": 0},
    }  # fmt: skip


def llmperf() -> dict[str, Any]:
    return {
        "version": "2023-08-31", "num_concurrent_requests": 5, "results_ttft_s_quantiles_p50": 0.18,
        "results_ttft_s_quantiles_p99": 0.9, "results_ttft_s_mean": 0.2, "results_end_to_end_latency_s_mean": 2.2,
        "results_inter_token_latency_s_mean": 2.2 / 101, "results_number_output_tokens_mean": 101.0,
        "results_num_requests_started": 100, "results_num_completed_requests": 100, "results_number_errors": 0,
        "results_num_completed_requests_per_min": 120.0,
    }  # fmt: skip


LOCUST = (
    '"Type","Name","Request Count","Failure Count","Median Response Time","Average Response Time","Min Response Time",'
    '"Max Response Time","Average Content Size","Requests/s","Failures/s","50%","90%","99%","100%"\n'
    '"POST","/v1/chat/completions",100,4,2100,2200,10,3000,99,2.0,0.08,2100,2500,3000,3000\n'
    '"","Aggregated",100,4,2100,2200,10,3000,99,2.0,0.08,2100,2500,3000,3000\n'
)
K6 = {"metrics": {
    "http_req_duration": {"avg": 2200.0, "med": 2100.0, "p(99)": 3000.0}, "http_req_waiting": {"avg": 200.0},
    "http_reqs": {"count": 100, "rate": 2.0}, "http_req_failed": {"passes": 4, "fails": 96, "value": 0.04}},
}  # fmt: skip
K6_NEW = {"metrics": {name: {"type": "trend", "values": {"rate" if key == "value" else key: value
                                                        for key, value in each.items()}}
                      for name, each in K6["metrics"].items()}, "state": {"testRunDurationMs": 50_000.0}}  # fmt: skip
K6_TEXT = """
     http_req_duration..............: avg=2.2s    min=5.77ms  med=2.1s    max=1m3s p(90)=2.5s p(99)=3s
       { expected_response:true }...: avg=1.9s    min=5.77ms  med=1.9s    max=1m3s p(90)=2.5s p(99)=3s
     http_req_failed................: 4.00%  ✓ 4         ✗ 96
     http_req_waiting...............: avg=200ms   min=5.77ms  med=0.18s   max=950ms p(90)=400ms p(99)=900ms
     http_reqs......................: 100    2/s
"""
OHA = {
    "summary": {"successRate": 0.96, "total": 50.0, "slowest": 3.0, "fastest": 0.01, "average": 2.2,
                "requestsPerSec": 2.0},
    "latencyPercentiles": {"p50": 2.1, "p99": 3.0}, "statusCodeDistribution": {"200": 96, "503": 3},
    "errorDistribution": {"operation timed out": 1},
}  # fmt: skip
# Tool → text, and what must be read: our name, statistic, value.
TTFT = {("ttft_ms", "mean"): 200.0, ("ttft_ms", "p99"): 900.0}
E2E = {("e2e_ms", "mean"): 2200.0}
TPOT = {("tpot_ms", "mean"): 20.0}
RESPONSE = {("response_ms", "mean"): 2200.0, ("response_ms", "median"): 2100.0, ("response_ms", "p99"): 3000.0,
            ("failed", "total"): 4.0}  # fmt: skip
SHAPES: dict[str, tuple[str, dict[tuple[str, str], float]]] = {
    "vLLM": (json.dumps(vllm()), TTFT | E2E | TPOT | {("requests_per_s", "rate"): 2.0}),
    "vLLM, appended": (f"{json.dumps(vllm())}\n{json.dumps(vllm())}\n", TTFT),
    "SGLang": (json.dumps(sglang()), TTFT | E2E | TPOT | {("in_flight", "mean"): 4.4}),
    "table": (TABLE, TTFT | E2E | TPOT),
    "table in a log": ("\n".join(f"bench-1  | {line}" for line in TABLE.split("\n")), TTFT | E2E | TPOT),
    "InferenceX": (json.dumps(inferencex()), TTFT | E2E | TPOT | {("tokens_per_s_per_user", "median"): 50.0}),
    "llm-d": (json.dumps(llmd()), TTFT | E2E | TPOT | {("output_tokens_per_s", "rate"): 202.0}),
    "llm-d 0.1, YAML": (yaml.safe_dump(llmd("0.1")), TTFT | E2E | TPOT | {("requests_per_s", "rate"): 2.0}),
    "GuideLLM": (json.dumps(guidellm()), TTFT | E2E | TPOT | {("e2e_per_token_ms", "mean"): 21.8}),
    "GuideLLM CSV": (GUIDELLM_CSV, TTFT | E2E | {("succeeded", "total"): 100.0, ("ttft_ms", "p75"): 300.0}),
    "GuideLLM 0.3 CSV": (GUIDELLM_FLAT, TTFT | E2E | {("succeeded", "total"): 100.0, ("ttft_ms", "p75"): 300.0}),
    "AIPerf": (json.dumps(aiperf()), TTFT | E2E | TPOT | {("duration_s", "total"): 50.0}),
    "AIPerf, first versions": (json.dumps({"records": aiperf()}), TTFT | E2E),
    "AIPerf CSV": (AIPERF_CSV, TTFT | E2E | TPOT | {("succeeded", "total"): 100.0}),
    "inference-perf": (json.dumps(inference_perf()), TTFT | E2E | TPOT | {("send_lag_ms", "mean"): 1.0}),
    "llmperf": (json.dumps(llmperf()), TTFT | E2E | {("requests_per_s", "rate"): 2.0}),
    "Locust": (LOCUST, RESPONSE),
    "k6": (json.dumps(K6), RESPONSE | {("ttft_ms", "mean"): 200.0}),
    "k6, new form": (json.dumps(K6_NEW), RESPONSE),
    "k6, printed": (K6_TEXT, RESPONSE | TTFT | {("response_ms", "max"): 63_000.0}),
    "oha": (json.dumps(OHA), RESPONSE),
    **MORE,
}  # fmt: skip
