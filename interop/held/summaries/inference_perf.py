"""Reports of inference-perf: of a stage or of all, by the client (lifecycle) and by the server (Prometheus)."""

from typing import Any

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import BenchmarkFigures, Held, Reader
from sojourn.interop.held.summaries.figures import figures_of, load_of, prove, statistic_of
from sojourn.interop.imported import inference_perf
from sojourn.interop.imported.result import Json, checked, count, inner, number

TOOL = "inference-perf"
CLIENT = {
    "ttft_ms": "client: request start to the first token",
    "tpot_ms": "client: first to last token, by output tokens - 1",
    "itl_ms": "client: between two chunks, all requests together",
    "e2e_ms": "client: request start to end", "e2e_per_token_ms": "client: E2E by output tokens",
    "send_lag_ms": "client: scheduled to request start",
    "requests_per_s": "client: first start to last end",
}  # fmt: skip
LATENCIES = {
    "request_latency": "e2e_ms", "time_to_first_token": "ttft_ms", "time_per_output_token": "tpot_ms",
    "inter_token_latency": "itl_ms", "normalized_time_per_output_token": "e2e_per_token_ms",
    "request_queue_time": "queue_ms", "request_prefill_time": "prefill_ms", "request_decode_time": "decode_ms",
}  # fmt: skip
SERVER = dict.fromkeys(LATENCIES.values(), "server: its own histogram, mean over the run, percentiles by its buckets")
NOT_SHOWN = ["each request: give per_request_lifecycle_metrics.json, which report.request_lifecycle.per_request: true "
             "writes"]  # fmt: skip
NO_CLIENT = "latencies at the client: give the lifecycle report of the same folder"
Told = dict[tuple[str, str], tuple[Any, float, str]]


def _is_report(given: Given) -> bool:
    return isinstance(inner(given.document, "successes"), dict) and "load_summary" in given.document


def read_report(given: Given) -> list[Held]:
    document = given.document
    made = document["successes"]
    if "rate" in made or "queue_len" in made:
        return [_of_server(given.name, made)]
    told: Told = {}
    for theirs, each in (inner(made, "latency") or {}).items():
        told |= _stated(theirs, each)
    delay = inner(document, "load_summary", "schedule_delay")
    told |= {
        ("send_lag_ms", statistic): (value, 1e3, "schedule_delay") for statistic, value in _statistics(delay).items()
    }
    for ours in ("output_tokens_per_s", "input_tokens_per_s", "total_tokens_per_s", "requests_per_s"):
        told[ours, "rate"] = inner(made, "throughput", f"{ours}ec"), 1.0, f"{ours}ec"
    for ours, theirs in (("input_tokens", "prompt_len"), ("output_tokens", "output_len")):
        told |= {(ours, statistic): (value, 1.0, theirs) for statistic, value in _statistics(made.get(theirs)).items()}
    told["succeeded", "total"] = made.get("count"), 1.0, "successes.count"
    told["failed", "total"] = inner(document, "failures", "count"), 1.0, "failures.count"
    wanted, got = (number(inner(document, "load_summary", name)) for name in ("requested_rate", "achieved_rate"))
    told["offered_requests_per_s", "rate"] = got, 1.0, "achieved_rate"
    limit = count(inner(document, "load_summary", "concurrency"))
    figures = BenchmarkFigures(
        tool=TOOL, figures=figures_of(CLIENT, told), label=f"{wanted:g} requests/s" if wanted else "all stages",
        load=load_of(request_rate=wanted, max_concurrency=limit),
    )  # fmt: skip
    notes = prove(figures)
    return [Held(kind="report of inference-perf", name=given.name, figures=figures, notes=notes, missing=NOT_SHOWN)]


def _statistics(summary: Any) -> dict[str, Any]:
    if not isinstance(summary, dict):
        return {}
    return {statistic: value for key, value in summary.items() if (statistic := statistic_of(key)) is not None}


def _stated(theirs: str, summary: Any) -> Told:
    name = LATENCIES.get(theirs)
    if name is None:
        return {}
    return {(name, statistic): (value, 1e3, theirs) for statistic, value in _statistics(summary).items()}


def _of_server(name: str, made: Json) -> Held:
    """What the server's own metrics said during the load, as inference-perf asked a Prometheus for it."""
    told: Told = {}
    for theirs, each in made.items():
        told |= _stated(theirs, each)
    told["succeeded", "total"] = made.get("count"), 1.0, "count"
    told["requests_per_s", "rate"] = made.get("rate"), 1.0, "rate"
    told["output_tokens_per_s", "rate"] = inner(made, "output_len", "rate"), 1.0, "output_len.rate"
    told["input_tokens_per_s", "rate"] = inner(made, "prompt_len", "rate"), 1.0, "prompt_len.rate"
    told["waiting", "mean"] = inner(made, "queue_len", "mean"), 1.0, "queue_len"
    told["running", "mean"] = inner(made, "num_requests_running", "mean"), 1.0, "num_requests_running"
    told["preemptions", "total"] = inner(made, "num_preemptions_total", "mean"), 1.0, "num_preemptions_total"
    unasked = _unasked(made)
    if "prefix_cache_hit_percent" not in unasked:
        told["hit_rate", "mean"] = inner(made, "prefix_cache_hit_percent", "mean"), 0.01, "prefix_cache_hit_percent"
    if "kv_cache_usage_percentage" not in unasked:
        told["kv_use", "mean"] = inner(made, "kv_cache_usage_percentage", "mean"), 1.0, "kv_cache_usage_percentage"
    figures = BenchmarkFigures(tool=TOOL, figures=figures_of(SERVER, told, "server"), label="server's metrics")
    missing = [NO_CLIENT, *(f"{each}: the report has 0 for it, as for a metric that was not found" for each in unasked)]
    return Held(
        kind="server report of inference-perf", name=name, figures=figures, notes=prove(figures), missing=missing
    )


def _unasked(made: Json) -> list[str]:
    """A metric that the Prometheus did not know is written as 0: a use of 0 while requests ran is none."""
    zero = [name for name in ("kv_cache_usage_percentage", "prefix_cache_hit_percent")
            if not number(inner(made, name, "mean"))]  # fmt: skip
    return zero if made.get("count") else []


def _is_requests(given: Given) -> bool:
    return any(map(inference_perf.recognises, given.documents))


def read_requests(given: Given) -> list[Held]:
    return [Held(kind="requests of inference-perf", name=given.name, requests=checked(each))
            for each in inference_perf.read(given.document)]  # fmt: skip


REPORT = Reader(
    kind="inference-perf's stage and summary reports (lifecycle and Prometheus)",
    shows="percentiles, how late the client sent; of the server: line, KV use, preemptions", recognises=_is_report,
    read=read_report,
)  # fmt: skip
REQUESTS = Reader(kind="inference-perf's per_request_lifecycle_metrics.json", shows="a run", recognises=_is_requests,
                  read=read_requests)  # fmt: skip
