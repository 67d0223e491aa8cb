"""The request lifecycle's metrics, and telemetry's own: what a user experiences, and what the measuring costs."""

from dataclasses import replace

from metrics.catalog.metric import (
    GAP_BOUNDS,
    LAG_BOUNDS,
    LATENCY_BOUNDS,
    TOKEN_BOUNDS,
    WORK_BOUNDS,
    counter,
    gauge,
    histogram,
)  # fmt: skip
from metrics.ledger import SERVER_ACCOUNTS
from metrics.records import REFUSALS, WAITS

OUTCOMES = ("stop", "length", "abort", "error")
DECISIONS = ("head", "objective", "error", "left_out")  # why a trace is kept, or not
EXPORTS = ("exported", "dropped", "refused")
_ACCOUNT_LABELS = {
    "labels": ("lifecycle", "account"),
    "values": tuple((info.lifecycle, info.name) for info in SERVER_ACCOUNTS),
}

REQUEST = (
    gauge("request", "running", "requests", "Requests that got tokens in the last step; 0 while the engine idles.",
          "A request that was admitted but got no token in that step is not in it."),
    gauge("request", "waiting", "requests", "Requests that the scheduler held back when it planned the last step.",
          "Requests still in the front process (being parsed or tokenised) are not in it."),
    counter("request", "finished_total", "requests", "Requests that ended, by outcome: stop, length, abort, error.",
            "Refused requests are in sojourn_request_rejected_total; an abort does not tell why the client left.",
            outcome=OUTCOMES),
    counter("request", "rejected_total", "requests", "Requests refused at the door, by reason.",
            "Says nothing of how long they would have waited.", reason=()),
    histogram("request", "ttft_seconds", "seconds", LATENCY_BOUNDS,
              "Time to first token: arrival of the request → first text handed to the socket.",
              "An answer that is not streamed is written at once: its TTFT is its end. The network is not in it."),
    histogram("request", "itl_seconds", "seconds", GAP_BOUNDS,
              "Inter-token latency: each gap between two tokens of a request as they left the loop.",
              "Booked when the request ends; tokens of one step are 0 apart; stalls of the stream are not in it."),
    histogram("request", "tpot_seconds", "seconds", GAP_BOUNDS,
              "Time per output token: a request's mean gap after its first token.",
              "A mean hides single stalls (see sojourn_request_itl_seconds); needs two tokens."),
    histogram("request", "e2e_seconds", "seconds", LATENCY_BOUNDS,
              "End to end: arrival → last byte handed to the socket, of requests that finished by stop or length.",
              "Aborts and errors are left out, as their length is not the server's; the network is not in it."),
    histogram("request", "queue_seconds", "seconds", LATENCY_BOUNDS,
              "Time a request waited for a place in the batch or in the token budget (account request.queue).",
              "Waiting for KV blocks is in sojourn_memory_blocked_seconds; who is still waiting is not in it."),
    histogram("request", "admission_seconds", "seconds", WORK_BOUNDS,
              "Time from the end of encoding until the scheduler saw a request (account request.admission).",
              "Waiting for a step that was under way is in sojourn_request_queue_seconds."),
    histogram("request", "interference_seconds", "seconds", LATENCY_BOUNDS,
              "Time that other requests' prompt work cost a request (account request.interference).",
              "Does not tell whose: the steps of a run directory do."),
    histogram("request", "stream_seconds", "seconds", LATENCY_BOUNDS,
              "Time from leaving the loop, or from text being ready, until the socket had it (account request.stream).",
              "A slow reader and a busy front look alike here."),
    histogram("request", "loop_lag_seconds", "seconds", LAG_BOUNDS,
              "How late a timer of the front's event loop rang that is due ten times a second.",
              "Whatever blocks the loop stalls every stream by as much; who did is not told."),
    histogram("request", "prompt_length_tokens", "tokens", TOKEN_BOUNDS, "Prompt tokens of a request.",
              "Says what was asked for, not what was computed: cached tokens are in it."),
    histogram("request", "output_length_tokens", "tokens", TOKEN_BOUNDS, "Output tokens of a request.",
              "An aborted request counts with what it had."),
    replace(counter("request", "ledger_seconds_total", "seconds",
                    "Time of ended requests from arrival to the last byte, by account of the ledger.",
                    "The client's accounts need the client's clock: only a run directory has them."),
            **_ACCOUNT_LABELS),
    replace(counter("request", "ttft_ledger_seconds_total", "seconds",
                    "Time of ended requests from arrival to the first text, by account of the ledger.",
                    "The client's accounts need the client's clock: only a run directory has them."),
            **_ACCOUNT_LABELS),
    counter("request", "unaccounted_seconds_total", "seconds",
            "Latency that no account explains, or that two explain, without its sign.",
            "A sum of absolute values: it cannot tell a gap from an overlap."),
    counter("request", "unclosed_total", "requests",
            "Requests whose ledger misses the closure bound: 1 % of the latency and 1 ms.",
            "Judged by the server's own clock readings; agreement with the client is tested per run."),
    counter("request", "wait_seconds_total", "seconds",
            "Time of ended requests in the core's queue, by what held them back; sums to the accounts request.queue, "
            "memory.blocked and memory.preempted.",
            "Who stands behind the head waits for what the head was refused for; who held the place is not told.",
            reason=WAITS),
    counter("request", "refusals_total", "requests",
            "Times that a step left a waiting request behind, by the scheduler's reason.",
            "Counts requests × steps: many short steps count more than one long one; seconds are in the ledger.",
            reason=REFUSALS),
    counter("request", "objective_total", "requests",
            "Ended requests of a class that met or missed an objective; objective=\"all_objectives\" is goodput.",
            "Server-side latency only; aborts and errors miss every objective; rejections are not in it.",
            klass=(), objective=(), outcome=()),
)  # fmt: skip

TELEMETRY = (
    counter("telemetry", "dropped_records_total", "records", "Records that did not fit into the recorder's ring.",
            "Does not tell which."),
    counter("telemetry", "failed_records_total", "records", "Records that the disk refused.", "Does not tell which."),
    gauge("telemetry", "enabled_info", "info", "Which telemetry this server keeps, in its label; always 1.",
          "With level=\"off\" no records exist: only gauges, rejections and restarts live.", level=()),
    counter("telemetry", "core_restarts_total", "restarts", "Times that the front started a new core process.",
            "The cause is in the log."),
    counter("telemetry", "traces_total", "traces",
            "Ended requests by why their trace is kept: head (sampled), objective (missed one), error; or left_out.",
            "0 without `otlp_endpoint`.", decision=DECISIONS),
    counter("telemetry", "trace_exports_total", "traces",
            "Kept traces by what became of them: exported, dropped (the queue was full), refused (by the collector, or "
            "nobody answered).",
            "Those that still wait for the next export are in none.", outcome=EXPORTS),
    counter("telemetry", "render_seconds_total", "seconds", "Time spent writing this page, without the current one.",
            "The cost of observing steps and requests is measured by the benchmarks."),
)  # fmt: skip
