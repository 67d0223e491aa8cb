"""What tools print, and results without a server, in their own shape: the story of `shapes`."""

import json

GUIDELLM_TABLES = """ℹ Run Summary Info
|============|==========|==========|======|======|======|=========|=======|=====|=========|======|=====|
| Benchmark  | Timings                              ||||| Input Tokens        ||| Output Tokens      |||
| Strategy   | Start    | End      | Dur  | Warm | Cool | Comp    | Inc   | Err | Comp    | Inc  | Err |
|            |          |          | Sec  | Sec  | Sec  | Tot     | Tot   | Tot | Tot     | Tot  | Tot |
|------------|----------|----------|------|------|------|---------|-------|-----|---------|------|-----|
| concurrent | 09:35:12 | 09:36:02 | 50.0 | 0.0  | 0.0  | 20000.0 | 607.0 | 0.0 | 10100.0 | 60.0 | 0.0 |
|============|==========|==========|======|======|======|=========|=======|=====|=========|======|=====|

ℹ Request Latency Statistics (Completed Requests)
|============|=========|========|=======|=======|=======|=====|======|======|
| Benchmark  | Request Latency || TTFT         || ITL        || TPOT       ||
| Strategy   | Sec             || ms           || ms         || ms         ||
|            | Mdn     | p95    | Mdn   | p95   | Mdn   | p95 | Mdn  | p95  |
|------------|---------|--------|-------|-------|-------|-----|------|------|
| concurrent | 2.1     | 3.0    | 180.0 | 500.0 | 20.0  | 25.0 | 21.8 | 30.0 |
|============|=========|========|=======|=======|=======|=====|======|======|
"""
GUIDELLM_OLD_TABLES = """Benchmarks Info:
=====================================================================
Metadata                                        |||| Requests Made  |||
      Benchmark| Start Time| End Time| Duration (s)|  Comp|  Inc|  Err
---------------|-----------|---------|-------------|------|-----|-----
concurrent@5   |   09:35:12| 09:36:02|         50.0|   100|    2|    4
=====================================================================


Benchmarks Stats:
=======================================================================================
Metadata       | Request Stats         || Out Tok/sec| Req Latency (sec)||| TTFT (ms)         |||
      Benchmark| Per Second| Concurrency|        mean|  mean| median| p99|  mean| median|   p99
---------------|-----------|------------|------------|------|-------|----|------|-------|------
concurrent@5   |       2.00|        4.40|       202.0|  2.20|   2.10| 3.0| 200.0|  180.0| 900.0
=======================================================================================
"""
LATENCY = {"avg_latency": 2.2, "latencies": [2.1, 3.0], "percentiles": {"10": 2.1, "50": 2.1, "99": 3.0}}
THROUGHPUT = {"elapsed_time": 50.0, "num_requests": 100, "total_num_tokens": 30_100, "requests_per_second": 2.0,
              "tokens_per_second": 602.0}  # fmt: skip
PRINTED = (
    "Avg latency: 2.2 seconds\n99% percentile latency: 3.0 seconds\nINFO 01-02 03:04:05 [x.py:1] done\n"
    "Throughput: 2.00 requests/s, 602.00 total tokens/s, 202.00 output tokens/s\nTotal num output tokens:  10100\n"
)
OLLAMA = {
    "model": "m", "done": True, "total_duration": 2_200_000_000, "load_duration": 50_000_000, "prompt_eval_count": 200,
    "prompt_eval_duration": 130_000_000, "eval_count": 101, "eval_duration": 2_020_000_000,
}  # fmt: skip
OLLAMA_PRINTED = """The answer is 42.

total duration:       2.2s
load duration:        50ms
prompt eval count:    200 token(s)
prompt eval duration: 130ms
prompt eval rate:     1538.46 tokens/s
eval count:           101 token(s)
eval duration:        2.02s
eval rate:            50.00 tokens/s
"""
PHASES = {("e2e_ms", "mean"): 2200.0, ("tpot_ms", "mean"): 20.0, ("prefill_ms", "mean"): 130.0,
          ("output_tokens", "mean"): 101.0}  # fmt: skip
LLMPERF_ROWS = [
    {"error_code": None, "ttft_s": 0.2, "inter_token_latency_s": 0.022, "end_to_end_latency_s": 2.2,
     "number_output_tokens": 101, "number_input_tokens": 200},
    {"error_code": 503, "ttft_s": 9.0, "end_to_end_latency_s": 9.0, "number_output_tokens": 0},
]  # fmt: skip
MORE = {
    "llmperf, rows": (json.dumps(LLMPERF_ROWS), {
        ("ttft_ms", "mean"): 200.0, ("e2e_ms", "mean"): 2200.0, ("failed", "total"): 1.0, ("succeeded", "total"): 1.0,
    }),
    "GuideLLM, printed": (GUIDELLM_TABLES, {
        ("e2e_ms", "median"): 2100.0, ("ttft_ms", "median"): 180.0, ("tpot_ms", "p95"): 25.0,
        ("e2e_per_token_ms", "median"): 21.8, ("duration_s", "total"): 50.0, ("output_tokens", "total"): 10_100.0,
    }),
    "GuideLLM 0.3, printed": (GUIDELLM_OLD_TABLES, {
        ("e2e_ms", "mean"): 2200.0, ("ttft_ms", "mean"): 200.0, ("ttft_ms", "p99"): 900.0, ("failed", "total"): 4.0,
        ("requests_per_s", "rate"): 2.0, ("succeeded", "total"): 100.0,
    }),
    "vllm bench latency": (json.dumps(LATENCY), {("e2e_ms", "mean"): 2200.0, ("e2e_ms", "p99"): 3000.0}),
    "vllm bench throughput": (json.dumps(THROUGHPUT), {("requests_per_s", "rate"): 2.0}),
    "Ollama": (json.dumps(OLLAMA), PHASES), "Ollama, several": (json.dumps([OLLAMA, OLLAMA]), PHASES),
    "Ollama, a stream": ('{"model": "m", "response": "a"}\n' + json.dumps(OLLAMA), PHASES),
    "Ollama, printed": (OLLAMA_PRINTED, PHASES),
    "Ollama, rates alone": ("eval rate: 50.00 tokens/s\n" * 3, {("tpot_ms", "mean"): 20.0}),
}  # fmt: skip
