"""What follows from the figures of one benchmark. Rules are data: what they look at, their cause, their rivals.

A summary has no time and no server in it. A rule states what is certain by the figures' own definitions. It names a
cause only where no other cause gives the same figures, and is silent on the edge.
"""

from collections.abc import Callable
from typing import NamedTuple

from sojourn.interop.held.held import BenchmarkFigures
from sojourn.interop.imported.result import number

FEWEST = 20  # requests, for a percentile or a rate to mean something
LATE_MS, LATE_SHARE = 100.0, 0.2  # by which a client is late: more than jitter, and a share of what it measures
FEW_SENT = 0.9  # of the planned rate
FAILED_SHARE = 0.01
TAIL = 5.0  # p99 over the median
LINE_SHARE, LINE_MS = 0.5, 1000.0  # of E2E before the first token, and how long at least
OFTEN = 0.02  # preemptions, as a share of the requests
CHUNK = 1.5  # tokens in a chunk
AGAIN = 0.7  # of the TPOT that E2E and TTFT give: below it the tool divided by more than the tokens
BURSTS_MS = 0.2  # no token takes so little: several came at once


class Fact(NamedTuple):
    """What a rule found."""

    certain: str
    confidence: float | None = None  # of the rule's cause; None: the figures do not carry it
    evidence: str = ""
    is_problem: bool = True


class Rule(NamedTuple):
    key: str
    looks: Callable[[BenchmarkFigures], Fact | None]
    cause: str = ""
    rivals: tuple[str, ...] = ()
    next: str = ""
    unknown: str = ""  # what the fact leaves open
    is_shape: bool = False  # of latencies: no problem where requests meet their objectives


def ms(value: float) -> str:
    return f"{value / 1000:,.1f} s" if value >= 1000 else f"{value:,.0f} ms" if value >= 10 else f"{value:.2g} ms"


def e2e_ms(found: BenchmarkFigures) -> float | None:
    """The mean; where the file has none, as its parts give it."""
    stated, ttft, tpot = found.value("e2e_ms"), found.value("ttft_ms"), found.value("tpot_ms")
    total, made = found.value("output_tokens", "total"), found.value("succeeded", "total")
    tokens = found.value("output_tokens") or (total / made if total and made else None)
    if stated is not None or ttft is None or tpot is None or not tokens:
        return stated
    return ttft + tpot * max(0.0, tokens - 1)


def is_server(found: BenchmarkFigures) -> bool:
    """Whether the figures are of the server's own metrics."""
    return any(not each.clock.startswith("client") for each in found.figures)


def late_client(found: BenchmarkFigures) -> Fact | None:
    mean, p99 = found.value("send_lag_ms"), found.value("send_lag_ms", "p99")
    e2e = found.value("e2e_ms") or found.value("response_ms")
    wanted, got = number(found.load.get("request_rate")), found.value("offered_requests_per_s", "rate")
    if mean is None or mean < LATE_MS or (e2e is not None and mean < LATE_SHARE * e2e):
        return None
    worst = f" (p99 {ms(p99)})" if p99 is not None else ""
    rate = f"; {got:,.1f} of {wanted:,.1f} requests/s were sent" if wanted and got and got < FEW_SENT * wanted else ""
    fact = f"The client sent requests {ms(mean)} late on average{worst}{rate}"
    return Fact(fact, 0.8, f"mean send delay {ms(mean)}; latencies begin at the late send and leave it out")


def dropped(found: BenchmarkFigures) -> Fact | None:
    lost, made = found.value("dropped", "total"), found.value("requests", "total")
    if not lost or not made or lost / (lost + made) < FAILED_SHARE:
        return None
    return Fact(f"The client dropped {lost:,.0f} iterations that were due: it had no free user", 0.8,
                f"{lost:,.0f} dropped beside {made:,.0f} that were sent")  # fmt: skip


def failed(found: BenchmarkFigures) -> Fact | None:
    lost, good = found.value("failed", "total"), found.value("succeeded", "total")
    made = found.value("requests", "total") or (lost or 0) + (good or 0)
    if not lost or not made or lost / made < FAILED_SHARE:
        return None
    some = "All" if lost >= made else f"{lost:,.0f} of {made:,.0f} ({lost / made:.1%})"
    of_http = found.value("response_ms") is not None or found.value("response_ms", "median") is not None
    if of_http:  # Locust, k6 and oha time an answer whatever its status is
        return Fact(f"{some} requests failed; latencies and rates hold failed ones, too, which may be quick")
    return Fact(f"{some} requests failed; latencies are of the others, rates count only those")


def no_answers(found: BenchmarkFigures) -> Fact | None:
    good, total = found.value("succeeded", "total"), found.value("output_tokens", "total")
    mean = found.value("output_tokens") or (total / good if total is not None and good else None)
    if mean is None or mean >= 2 or (good or 1) < 1:
        return None
    return Fact(f"Answers have {mean:.2g} tokens on average: they are empty or cut, and TPOT means nothing")


def at_once(found: BenchmarkFigures) -> Fact | None:
    made = found.value("succeeded", "total") or 0
    if found.load.get("request_rate") != "inf" or "max_concurrency" in found.load or made < FEWEST:
        return None
    return Fact(f"All {made:,.0f} requests were sent at once: their TTFT is the wait in that line, by design",
                is_problem=False)  # fmt: skip


def burst(found: BenchmarkFigures) -> Fact | None:
    """Of a file that does not state its load."""
    p99, duration = found.value("ttft_ms", "p99"), found.value("duration_s", "total")
    if found.load or not p99 or not duration or p99 < 500 * duration or p99 < 10 * LINE_MS:
        return None
    share = f"{p99 / 1e3 / duration:.0%} of the whole benchmark"
    return Fact(f"1% of the requests waited {share} for their first token: many were sent at its start",
                is_problem=False)  # fmt: skip


def line_grew(found: BenchmarkFigures) -> Fact | None:
    """More was sent than ended, beyond what the last answers take. What held the line gives no other figures."""
    rate, served = number(found.load.get("request_rate")), found.value("requests_per_s", "rate")
    made, e2e = found.value("succeeded", "total") or 0.0, e2e_ms(found)
    ttft, limit = found.value("ttft_ms"), found.load.get("max_concurrency")
    duration = found.value("duration_s", "total")
    if not (rate and served and e2e and ttft and duration) or made < FEWEST or limit or is_server(found):
        return None
    sending = made / rate
    waits = ttft >= max(LINE_MS, LINE_SHARE * e2e, 100 * sending)
    if served >= FEW_SENT * rate or not waits or duration < sending + 0.5 * e2e / 1e3:
        return None
    return Fact(
        f"{rate:,.3g} requests/s were sent for {sending:,.0f} s, and {served:,.3g} per second were served; "
        f"mean TTFT {ms(ttft)} of {ms(e2e)} E2E: a line grew"
    )


def waits_before_token(found: BenchmarkFigures) -> Fact | None:
    """Most of a request is before its first token. A line, a long prompt and a cold cache give the same percentiles."""
    ttft, e2e = found.value("ttft_ms"), e2e_ms(found)
    if not ttft or not e2e or ttft < LINE_MS or ttft < LINE_SHARE * e2e or line_grew(found) or at_once(found):
        return None
    if _queue_share(found) is not None:
        return None
    if ttft > e2e:  # a share of it would be of other requests
        return Fact(f"TTFT {ms(ttft)} is over E2E {ms(e2e)}: some that began were aborted, or still run")
    return Fact(f"{ttft / e2e:.0%} of E2E is before the first token: TTFT {ms(ttft)} of {ms(e2e)}")


def server_line(found: BenchmarkFigures) -> Fact | None:
    waiting = found.value("waiting")
    if waiting is None or waiting < 1 or not is_server(found) or found.value("waiting", "last") is not None:
        return None  # with a last value it is a log, whose series says more than its mean
    ttft = found.value("ttft_ms")
    beside = f"; its mean TTFT is {ms(ttft)}" if ttft else ""
    return Fact(f"On average {waiting:,.0f} requests waited in the server's line{beside}", 0.9 if waiting >= 5 else 0.6,
                f"waiting {waiting:,.0f}, by the server's gauge")  # fmt: skip


def preempted(found: BenchmarkFigures) -> Fact | None:
    times = found.value("preemptions", "total")
    made = found.value("requests", "total") or found.value("succeeded", "total")
    if not times or times < 1 or not is_server(found):
        return None
    often, queue = made is not None and times >= OFTEN * made, _queue_share(found)
    waits = f"; {queue:.0%} of TTFT is its queue" if often and queue is not None else ""
    return Fact(f"The server preempted requests {times:,.0f} times: their KV was dropped and computed again{waits}",
                0.7 if often else None, f"{times:,.0f} preemptions beside {made or 0:,.0f} requests that ended",
                is_problem=often or made is None)  # fmt: skip


def queued(found: BenchmarkFigures) -> Fact | None:
    """By the server's own clock: what a request waited before it was scheduled. Preemptions name what it waits for."""
    queue, ttft, share = found.value("queue_ms"), found.value("ttft_ms"), _queue_share(found)
    short = preempted(found)
    if share is None or (short is not None and short.confidence is not None):
        return None
    return Fact(f"{share:.0%} of TTFT is the server's queue: {ms(queue)} of {ms(ttft)} on average", 0.85,
                f"queue {ms(queue)}, by the server's own clock")  # fmt: skip


def _queue_share(found: BenchmarkFigures) -> float | None:
    """Of the time to first token; None where it is no long wait, or is not known."""
    queue, ttft = found.value("queue_ms"), found.value("ttft_ms")
    if not queue or not ttft or queue < LATE_MS or queue < LINE_SHARE * ttft:
        return None
    return min(1.0, queue / ttft)


def waiting_now(found: BenchmarkFigures) -> Fact | None:
    """Of a page or a log's end: one moment, which carries no cause."""
    waiting, running = found.value("waiting", "last"), found.value("running", "last")
    if not waiting or found.value("waiting", "mean") is not None:
        return None
    beside = f" beside {running:,.0f} that run" if running is not None else ""
    return Fact(f"At the moment of the page {waiting:,.0f} requests wait{beside}")


def stands_still(found: BenchmarkFigures) -> Fact | None:
    running, tokens = found.value("running", "last"), found.value("output_tokens_per_s", "last")
    if not running or tokens is None or tokens > 0 or found.value("prompt_tokens_per_s", "last"):
        return None
    waiting = found.value("waiting", "last") or 0.0
    return Fact(f"At the log's last line {running:,.0f} requests run, {waiting:,.0f} wait, and no token comes")


def tail(found: BenchmarkFigures) -> Fact | None:
    for name, shown in (("ttft_ms", "TTFT"), ("response_ms", "Response time")):
        p99, median = found.value(name, "p99"), found.value(name, "median")
        made = found.value("succeeded", "total")
        if p99 and median and p99 > TAIL * median and p99 > LATE_MS and (made is None or made >= 5 * FEWEST):
            return Fact(
                f"{shown} p99 is {p99 / median:,.1f} times its median: {ms(p99)} against {ms(median)}", is_problem=False
            )  # an idle server that gets two prompts at once has such a tail
    return None


def chunks(found: BenchmarkFigures) -> Fact | None:
    itl, tpot, middle = found.value("itl_ms"), found.value("tpot_ms"), found.value("itl_ms", "median")
    if not itl or not tpot:
        return None
    if (twice := _counted_again(found)) is not None:
        return twice
    if middle is not None and middle < BURSTS_MS < itl:
        half = ms(max(middle, 0.01))
        return Fact(f"Half of the gaps between chunks are below {half}, their mean is {ms(itl)}: they come in bursts")
    if itl > CHUNK * tpot:
        return Fact(f"A chunk carries about {itl / tpot:.1f} tokens: ITL {ms(itl)} against TPOT {ms(tpot)}",
                    is_problem=False)  # fmt: skip
    return None


def _counted_again(found: BenchmarkFigures) -> Fact | None:
    """A tool that counts more chunks than tokens, such as inference-perf before it left empty ones out, divides by too
    many: then gaps near 0 are its own."""
    e2e, ttft, tpot = found.value("e2e_ms"), found.value("ttft_ms"), found.value("tpot_ms")
    tokens = found.value("output_tokens")
    if not (e2e and ttft and tpot and tokens and tokens > 2) or tpot > AGAIN * (e2e - ttft) / (tokens - 1):
        return None
    times = (e2e - ttft) / (tokens - 1) / tpot
    return Fact(f"The tool counted about {times:.1f} chunks a token: TPOT and ITL are {times:.1f} times as long as it "
                "says", is_problem=False)  # fmt: skip


def closed_loop(found: BenchmarkFigures) -> Fact | None:
    limit, per_s = number(found.load.get("max_concurrency")), found.value("requests_per_s", "rate")
    e2e = found.value("e2e_ms")
    if not limit or not per_s or not e2e or not 0.8 * limit <= per_s * e2e / 1e3 <= 1.1 * limit:
        return None
    loop = f"A closed loop of {limit:,.0f}: the server decided when requests were sent, so a slow one was asked less"
    return Fact(loop, is_problem=False)


WATCH = "sojourn watch http://SERVER:8000 --once --for 60"
MEASURE = "sojourn load http://SERVER:8000 --rate RATE --duration 60"
LOG = "sojourn triage SERVER.log"
RULES: tuple[Rule, ...] = (
    Rule("failed_requests", failed, next=LOG, unknown="why requests failed: the server's log, or its status codes"),
    Rule("no_answers", no_answers, next=LOG, unknown="who ended the answers: finish_reason of one of them shows it"),
    Rule("late_client", late_client, "the client could not send as planned, so the server saw less load, and later",
         ("the server was full, and the client's limit of requests in flight held it back",), MEASURE),
    Rule("dropped_iterations", dropped, "the client had too few users for its rate",
         ("the server was slow, and users waited for it",), MEASURE),
    Rule("line_grew", line_grew, next=WATCH,
         unknown="what held the line: overload, a limit on the batch, a full KV cache, slow prompts, a stall or a "
         "proxy; a watch separates most of them"),
    Rule("server_line", server_line, "more arrives than is served at once: a line stands before the batch",
         ("a short burst within the mean",), WATCH,
         "what holds the line: a limit on the batch, a full device or a full KV cache; a watch separates them"),
    Rule("preempted", preempted, "the KV cache is too small for the requests that run at once",
         ("a few very long requests",), WATCH),
    Rule("queued", queued, "requests wait in the server's queue before they are scheduled",
         ("a burst that is over",), WATCH, "what holds the queue: a limit on the batch, the device or the KV cache"),
    Rule("waiting_now", waiting_now, next=WATCH, unknown="whether that line stands: one page is one moment"),
    Rule("stands_still", stands_still, next="py-spy dump --pid PID",
         unknown="whether the engine hangs or computes a long prompt: the next lines show it"),
    Rule("waits_before_token", waits_before_token, next=WATCH,
         unknown="whether requests wait in a line, have long prompts or miss a cache: see the server's queue time",
         is_shape=True),
    Rule("at_once", at_once, next=MEASURE, unknown="how the server does under a steady load: all came at once"),
    Rule("burst", burst, next=MEASURE, unknown="with which load it was measured: the file does not state it"),
    Rule("tail", tail, next=WATCH, unknown="what the slow requests have in common: it takes a row for each request",
         is_shape=True),
    Rule("chunks", chunks, next=WATCH, unknown="whether the server, a proxy or the client's reader joins chunks"),
    Rule("closed_loop", closed_loop, next=WATCH),
)  # fmt: skip
