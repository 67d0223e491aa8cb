"""What a watch says, as data: the terminal, the app, `--json` and the MCP tool all show this."""

from typing import Literal

import msgspec

from sojourn.diagnosis.verdict import Diagnosis, Finding
from sojourn.interop.sources.view import ServerView
from sojourn.metrics.exit_codes import Ended

State = Literal["healthy", "idle", "degraded", "overloaded", "stuck", "cannot tell", "unreachable"]
WORST_FIRST: tuple[State, ...] = ("stuck", "overloaded", "degraded", "unreachable", "cannot tell", "healthy", "idle")


class Met(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests of the window met an objective. A histogram knows it between two of its bounds."""

    objective: str  # "ttft ≤ 500 ms"; "all objectives" of the server's own count
    klass: str  # "" for all requests
    at_least: float  # share, 0 to 1
    at_most: float
    requests: int
    source: str  # the family that it was read from
    between_ms: tuple[float, float | None] | None = None  # bounds of the histogram: what it can judge; null where exact


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the mean request's time in the server, of the requests that ended in the window."""

    name: str  # queue, prefill, decode, others' prompts, memory, writing, host, text, rest
    mean_ms: float
    share: float  # of the mean end-to-end latency, 0 to 1


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """A latency of the window by the server's histogram. A percentile lies between two bounds of its buckets."""

    latency: str  # TTFT, TPOT, ITL or queue
    samples: int  # requests; of ITL gaps between tokens
    mean_ms: float
    between_ms: dict[str, tuple[float, float | None]]  # p50, p90, p99 → above, at most; null above the last bound


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges as of the last scrape, and rates over the last seconds. null: the server does not show it."""

    running: float | None
    waiting: float | None
    kv_use: float | None  # share of the KV blocks in use, 0 to 1
    requests_per_s: float | None
    prompt_tokens_per_s: float | None  # computed
    output_tokens_per_s: float | None

    @classmethod
    def unknown(cls) -> "Now":
        return cls(**dict.fromkeys(cls.__struct_fields__))


class WatchedServer(msgspec.Struct, frozen=True, kw_only=True):
    """One server over the window."""

    url: str
    name: str  # its address, or Prometheus' label `instance`
    source: str | None  # sojourn, vllm, sglang; null where no page could be read
    title: str
    state: State
    headline: str  # one sentence
    reads: Literal["metrics", "records"]  # what the verdict rests on
    evidence: str = ""  # where records are read: those that the verdict rests on and how fresh, or why it is the page
    window_s: float  # that the scrapes cover
    scrapes: int
    failed_scrapes: int
    restarts: int
    now: Now | None
    met: list[Met]  # [] without an objective
    parts: list[Part]  # largest first; [] where no request ended
    findings: list[Finding]
    unknown: list[str]  # what cannot be known, and which switch would show it
    ruled_out: list[str] = []  # causes that look likely, and what on the page refutes them
    warnings: list[str]
    devices: list[str] = []  # by sensors: what each did while requests were in flight, a sentence each
    hit_rate: float | None = None  # of the looked-up prompt tokens
    ttft_ms: float | None = None  # means of the window
    tpot_ms: float | None = None
    e2e_ms: float | None = None
    percentiles: list[Percentiles] = []
    goodput_rps: tuple[float, float] | None = None  # requests per second that met all objectives: at least, at most
    good_tokens_per_s: float | None = None  # output tokens of requests that met the server's own objectives
    view: ServerView | None = None  # all that its metrics show
    diagnosis: Diagnosis | None = None  # where its records are read, of the last window


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """What live servers suffer from, by their own metrics or records: no load was sent."""

    schema: str = "sojourn.watch/1"
    at: str  # ISO 8601, UTC
    state: State  # the worst of the servers
    headline: str
    servers: list[WatchedServer]


def exit_code(state: State) -> Ended:
    """Of `sojourn watch --once`, for alerts."""
    if state in ("healthy", "idle"):
        return Ended.DONE
    if state == "stuck":
        return Ended.STUCK
    return Ended.FINDING if state in ("degraded", "overloaded") else Ended.CANNOT_TELL
