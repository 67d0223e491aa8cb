"""Every metric declared once: name, type, unit, lifecycle, labels, buckets, what it measures and what it cannot.

The exporter, the dashboards, the Prometheus rules and `docs/metrics.md` are made from this list. A name reads
`sojourn_<lifecycle>_<noun>_<unit>`, with `_total` behind it where the value only grows. `telemetry` is the fifth word:
what Sojourn itself costs and loses. All series carry `model_name` beside the labels named here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from metrics.ledger import LIFECYCLES, SERVER_ACCOUNTS
from metrics.records import KINDS, REFUSALS, STAGES

Kind = Literal["counter", "gauge", "histogram"]
OWNERS = (*LIFECYCLES, "telemetry")
OUTCOMES = ("stop", "length", "abort", "error")
COMPOSITIONS = ("prefill", "decode", "mixed")
BLOCK_STATES = ("active", "pinned", "reusable", "free")  # as they are stacked: what is in use lies below
GOOD = "all_objectives"  # value of the label `objective` that stands for a good request


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of time series. A histogram's buckets are upper bounds, inclusive, in `unit`."""

    name: str
    kind: Kind
    unit: str
    lifecycle: str
    meaning: str
    cannot: str
    labels: tuple[str, ...] = ()
    # Label values known beforehand: their series exist from the start, so that a rate never misses the first event.
    values: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def help(self) -> str:
        return f"{self.meaning} {self.cannot}"


def log_buckets(first: float, last: float, per_decade: int) -> tuple[float, ...]:
    """Bounds from `first` to at least `last`, evenly spaced on a logarithmic axis, rounded to two digits."""
    bounds, index = [], 0
    while not bounds or bounds[-1] < last:
        bounds.append(float(f"{first * 10 ** (index / per_decade):.1e}"))
        index += 1
    return tuple(bounds)


TOKEN_BOUNDS = (1.0, *(float(base << power) for power in range(17) for base in (2, 3)))  # 1 2 3 4 6 8 12 … 196608
LATENCY_BOUNDS = log_buckets(0.001, 600, per_decade=6)
GAP_BOUNDS = log_buckets(0.000_1, 30, per_decade=6)
STEP_BOUNDS = log_buckets(0.000_05, 10, per_decade=6)
WORK_BOUNDS = log_buckets(0.000_01, 10, per_decade=5)  # work on the host, from one short prompt to a huge one
RATIO_BOUNDS = log_buckets(0.1, 10, per_decade=14)


def _counter(lifecycle: str, name: str, unit: str, meaning: str, cannot: str, **labels: Iterable[str]) -> Metric:
    return _labelled(Metric(f"sojourn_{lifecycle}_{name}", "counter", unit, lifecycle, meaning, cannot), labels)


def _gauge(lifecycle: str, name: str, unit: str, meaning: str, cannot: str, **labels: Iterable[str]) -> Metric:
    return _labelled(Metric(f"sojourn_{lifecycle}_{name}", "gauge", unit, lifecycle, meaning, cannot), labels)


def _histogram(
    lifecycle: str, name: str, unit: str, buckets: tuple[float, ...], meaning: str, cannot: str, **labels: Iterable[str]
) -> Metric:
    metric = Metric(f"sojourn_{lifecycle}_{name}", "histogram", unit, lifecycle, meaning, cannot, buckets=buckets)
    return _labelled(metric, labels)


def _labelled(metric: Metric, labels: Mapping[str, Iterable[str]]) -> Metric:
    """One label with its values; an empty list of values says that they are only known once they occur."""
    names = tuple(labels)
    values = tuple((value,) for value in labels[names[0]]) if len(names) == 1 else ()
    return replace(metric, labels=names, values=values or (() if names else ((),)))


_ACCOUNT_LABELS = {
    "labels": ("lifecycle", "account"),
    "values": tuple((info.lifecycle, info.name) for info in SERVER_ACCOUNTS),
}

REQUEST = (
    _gauge("request", "running", "requests", "Requests that got tokens in the last step; 0 while the engine idles.",
           "A request that was admitted but got no token in that step is not in it."),
    _gauge("request", "waiting", "requests", "Requests that the scheduler held back when it planned the last step.",
           "Requests still in the front process (being parsed or tokenised) are not in it."),
    _counter("request", "finished_total", "requests", "Requests that ended, by outcome: stop, length, abort, error.",
             "Refused requests are in sojourn_request_rejected_total; an abort does not tell why the client left.",
             outcome=OUTCOMES),
    _counter("request", "rejected_total", "requests", "Requests refused at the door, by reason.",
             "Says nothing of how long they would have waited.", reason=()),
    _histogram("request", "ttft_seconds", "seconds", LATENCY_BOUNDS,
               "Time to first token: arrival of the request → first text handed to the socket.",
               "An answer that is not streamed is written at once: its TTFT is its end. The network is not in it."),
    _histogram("request", "itl_seconds", "seconds", GAP_BOUNDS,
               "Inter-token latency: each gap between two tokens of a request as they left the loop.",
               "Booked when the request ends; tokens of one step are 0 apart; stalls of the stream are not in it."),
    _histogram("request", "tpot_seconds", "seconds", GAP_BOUNDS,
               "Time per output token: a request's mean gap after its first token.",
               "A mean hides single stalls (see sojourn_request_itl_seconds); needs two tokens."),
    _histogram("request", "e2e_seconds", "seconds", LATENCY_BOUNDS,
               "End to end: arrival → last byte handed to the socket, of requests that finished by stop or length.",
               "Aborts and errors are left out, as their length is not the server's; the network is not in it."),
    _histogram("request", "queue_seconds", "seconds", LATENCY_BOUNDS,
               "Time a request waited for a place in the batch or in the token budget (account request.queue).",
               "Waiting for KV blocks is in sojourn_memory_blocked_seconds; who is still waiting is not in it."),
    _histogram("request", "prompt_length_tokens", "tokens", TOKEN_BOUNDS, "Prompt tokens of a request.",
               "Says what was asked for, not what was computed: cached tokens are in it."),
    _histogram("request", "output_length_tokens", "tokens", TOKEN_BOUNDS, "Output tokens of a request.",
               "An aborted request counts with what it had."),
    replace(_counter("request", "ledger_seconds_total", "seconds",
                     "Time of ended requests from arrival to the last byte, by account of the ledger.",
                     "The client's accounts need the client's clock: only a run directory has them."),
            **_ACCOUNT_LABELS),
    replace(_counter("request", "ttft_ledger_seconds_total", "seconds",
                     "Time of ended requests from arrival to the first text, by account of the ledger.",
                     "The client's accounts need the client's clock: only a run directory has them."),
            **_ACCOUNT_LABELS),
    _counter("request", "unaccounted_seconds_total", "seconds",
             "Latency that no account explains, or that two explain, without its sign.",
             "A sum of absolute values: it cannot tell a gap from an overlap."),
    _counter("request", "unclosed_total", "requests",
             "Requests whose ledger misses the closure bound: 1 % of the latency and 1 ms.",
             "Judged by the server's own clock readings; agreement with the client is tested per run."),
    _counter("request", "refusals_total", "requests",
             "Times that a step left a waiting request behind, by the scheduler's reason.",
             "Counts requests × steps: many short steps count more than one long one; seconds are in the ledger.",
             reason=REFUSALS),
    _counter("request", "objective_total", "requests",
             "Ended requests of a class that met or missed an objective; objective=\"all_objectives\" is goodput.",
             "Server-side latency only; aborts and errors miss every objective; rejections are not in it.",
             klass=(), objective=(), outcome=()),
)  # fmt: skip

TOKEN = (
    _counter("token", "prompt_tokens_total", "tokens", "Prompt tokens of ended requests, cached ones included.",
             "Booked at the end of a request: for what runs now see sojourn_token_scheduled_tokens_total."),
    _counter("token", "computed_tokens_total", "tokens", "Tokens of ended requests that the model computed.",
             "Prompt tokens taken from the prefix cache are in sojourn_memory_prefix_tokens_total."),
    _counter("token", "generated_tokens_total", "tokens", "Output tokens of ended requests.",
             "Not all were read: an aborted request counts with what it had."),
    _counter("token", "drafted_tokens_total", "tokens", "Tokens that speculation proposed.",
             "0 without speculation."),
    _counter("token", "accepted_tokens_total", "tokens", "Proposed tokens that the model confirmed.",
             "Says nothing of the time that the proposals cost."),
    _counter("token", "scheduled_tokens_total", "tokens",
             "Tokens that steps computed, by kind: prefill, recompute, decode, verify. Live, step by step.",
             "Padding is not in it.", kind=KINDS),
    _counter("token", "padding_tokens_total", "tokens", "Tokens computed only to fill a graph's bucket.",
             "Their time is in the device time and cannot be told apart."),
    _counter("token", "overrun_tokens_total", "tokens",
             "Tokens computed for requests that had ended meanwhile: their next step was launched before the last was "
             "read.", "0 without overlap. Their time is in the device time and cannot be told apart."),
    _counter("token", "budget_tokens_total", "tokens",
             "Tokens that steps could have held; scheduled / budget is the fill of a step.",
             "A low fill is a fault only while requests wait."),
    _histogram("token", "step_tokens", "tokens", TOKEN_BOUNDS, "Tokens of one step, all kinds, without padding.",
               "Ten prompts and one long chunk look alike."),
    _histogram("token", "encode_seconds", "seconds", WORK_BOUNDS,
               "Parse, chat template and tokenise, per request (account token.encode).",
               "Only what delayed the request."),
    _histogram("token", "sample_seconds", "seconds", WORK_BOUNDS,
               "Logits → id, per request (account token.sample).",
               "One request's sum over its steps, on its critical path."),
    _histogram("token", "decode_seconds", "seconds", WORK_BOUNDS,
               "Ids → text, per request (account token.decode).",
               "What hides behind the device costs nothing and is not in it."),
)  # fmt: skip

COMPUTE = (
    _histogram("compute", "step_seconds", "seconds", STEP_BOUNDS,
               "Wall time of a step, by composition: prefill only, decode only, mixed.",
               "Time between steps is not in it; a long step may just be a large one (see the prediction).",
               composition=COMPOSITIONS),
    _counter("compute", "stage_seconds_total", "seconds",
             "Host time of steps by exclusive stage; the stages sum to the wall time.",
             "`wait` is host time: how busy the device was is in sojourn_compute_device_seconds_total.",
             stage=STAGES),
    _counter("compute", "device_seconds_total", "seconds", "Time the device was busy with steps.",
             "Busy is not efficient: compare flops and bytes with the roofline."),
    _counter("compute", "device_gap_seconds_total", "seconds",
             "Time the device had nothing to do while the loop had work: what the host did not hide.",
             "With an idle loop it stands still; the rest of the time without work is in no counter."),
    _counter("compute", "flops_total", "flops", "Floating-point operations that steps needed, counted exactly.",
             "Padding and wasted work are not in it."),
    _counter("compute", "moved_bytes_total", "bytes", "Bytes that steps must move at least: weights, KV, activations.",
             "A lower bound: misses of the device's caches are not in it."),
    _counter("compute", "predicted_seconds_total", "seconds",
             "Device time that the step model expects of the steps that it could predict.",
             "Silent until the model has seen enough steps."),
    _counter("compute", "residual_seconds_total", "seconds",
             "Measured minus predicted device time of a step, summed apart for slower and for faster steps.",
             "Slower than the model says is a fault only if the model was fitted on healthy steps.",
             direction=("slower", "faster")),
    _histogram("compute", "prediction_ratio", "ratio", RATIO_BOUNDS,
               "Measured / predicted device time of a step: 1 is as expected of its composition.",
               "Cannot name the reason: clocks, neighbours and bad kernels look alike here."),
    _counter("compute", "steps_total", "steps", "Steps by graph: eager, or the bucket that was replayed.",
             "Does not tell how long they took.", graph=()),
)  # fmt: skip

MEMORY = (
    _gauge("memory", "kv_blocks", "blocks", "KV blocks by state; the states sum to the pool.",
           "As of the last step; a full block with one reader counts like one with many.", state=BLOCK_STATES),
    _gauge("memory", "kv_usage_ratio", "ratio", "Share of KV blocks that live requests hold: active or pinned.",
           "Reusable blocks count as unused, since they can be evicted; empty slots inside blocks do not show."),
    _counter("memory", "prefix_tokens_total", "tokens",
             "Prompt tokens of requests that ran, by whether the prefix cache had them: hit, miss.",
             "Does not tell why a token missed, nor what an infinite cache would have hit.", result=("hit", "miss")),
    _counter("memory", "evicted_blocks_total", "blocks", "Reusable KV blocks given to someone else.",
             "Harmless unless somebody asks for the evicted prefix again."),
    _counter("memory", "preemptions_total", "requests", "Times that a running request lost its KV blocks.",
             "Their cost is in the recomputed tokens and in sojourn_memory_preempted_seconds."),
    _counter("memory", "recomputed_tokens_total", "tokens",
             "Tokens of ended requests whose KV was computed again after a preemption.",
             "Booked at the end of a request; live they are kind=\"recompute\" of the scheduled tokens."),
    _histogram("memory", "blocked_seconds", "seconds", LATENCY_BOUNDS,
               "Time a request waited for KV blocks (account memory.blocked).",
               "Requests that still wait are not in it."),
    _histogram("memory", "preempted_seconds", "seconds", LATENCY_BOUNDS,
               "Time from eviction to being scheduled again, of requests that were preempted.",
               "Rebuilding the KV comes on top: account memory.recompute of the ledger."),
)  # fmt: skip

TELEMETRY = (
    _counter("telemetry", "dropped_records_total", "records", "Records that did not fit into the recorder's ring.",
             "Does not tell which."),
    _counter("telemetry", "failed_records_total", "records", "Records that the disk refused.", "Does not tell which."),
    _counter("telemetry", "core_restarts_total", "restarts", "Times that the front started a new core process.",
             "The cause is in the log."),
    _counter("telemetry", "render_seconds_total", "seconds", "Time spent writing this page, without the current one.",
             "The cost of observing steps and requests is measured by the benchmarks."),
)  # fmt: skip

CATALOG: tuple[Metric, ...] = (*REQUEST, *TOKEN, *COMPUTE, *MEMORY, *TELEMETRY)
METRIC_BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOG}


def sample_names(metric: Metric) -> tuple[str, ...]:
    """The names under which its samples can be queried."""
    if metric.kind == "histogram":
        return tuple(metric.name + suffix for suffix in ("_bucket", "_sum", "_count"))
    return (metric.name,)


def render_markdown() -> str:
    """The page `docs/metrics.md`: one table a lifecycle."""
    lines = [
        "# Metrics",
        "",
        "Made from `metrics/catalog.py` by `python -m metrics.catalog > docs/metrics.md`; change it there.",
        "All series carry `model_name`. Histograms export `_bucket`, `_sum` and `_count`; an objective that the",
        "server was given is an exact bucket bound.",
    ]
    for owner in OWNERS:
        lines += ["", f"## {owner}", "", "| metric | type | labels | measures | cannot |", "|---|---|---|---|---|"]
        for metric in CATALOG:
            if metric.lifecycle == owner:
                shape = f"{metric.kind}, {metric.unit}"
                if metric.buckets:
                    shape += f", {len(metric.buckets)} buckets {metric.buckets[0]:g} … {metric.buckets[-1]:g}"
                labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
                lines.append(f"| `{metric.name}` | {shape} | {labels} | {metric.meaning} | {metric.cannot} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_markdown(), end="")
