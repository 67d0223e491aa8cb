"""What the scrapes of a run show of its server: totals, gauges and latencies in the catalogue's names, and accounts.

Everything here is an aggregate over all requests that the server finished while it was scraped. It says nothing
of one request, nor of the late ones; that takes the server's own records.
"""

import math
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pandas as pd

from sojourn.interop.sources import scrapes
from sojourn.interop.sources.courses import Courses, courses_of, gauges_followed, names_followed
from sojourn.interop.sources.pressure import (
    KV_USE,
    PROMPTS,
    RUNNING,
    Stalls,
    Waiting,
    prompt_share,
    stalls_of,
    waiting_of,
)
from sojourn.interop.sources.registry import recognise
from sojourn.interop.sources.source import EXTERNAL_LOOKUPS, Sight, Source, Span, Visibility, unseen
from sojourn.interop.sources.translate import (
    Distribution,
    Growth,
    key,
    names_of,
    names_that_grow,
    no_shares,
    of_family,
    over_time,
)
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory

BY_CLIENT = Sight("seen", "measured by the load generator, of each request")
FINISHED, DEVICE = "sojourn_request_finished_total", "sojourn_compute_device_seconds_total"
PREFIX, PREEMPTIONS = "sojourn_memory_prefix_tokens_total", "sojourn_memory_preemptions_total"


class Gauge(msgspec.Struct, frozen=True, kw_only=True):
    """What a gauge showed at the scrapes. Between them it is not known."""

    mean: float
    largest: float
    samples: int
    last: float = 0.0


class SpanView(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of the requests' time as the server measured it, on average over all of them."""

    name: str
    accounts: list[str]
    meaning: str
    requests: float
    mean_ms: float
    share: float | None  # of the client's mean latency; None where no request was served
    ttft_ms: float | None  # the part up to the first token
    ttft_share: float | None  # of the client's mean time to first token


class AccountView(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an account can be seen, and where its time is."""

    account: str
    visibility: Visibility
    why: str


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """One number as client and server counted it over the whole run."""

    what: str
    client: float
    server: float


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """One run's server as its own metrics show it."""

    source: str
    title: str
    scrapes: int  # answered
    failed_scrapes: int
    slowest_scrape_s: float | None
    longest_gap_s: float
    restarts: int
    alternates: bool  # several processes answered in turn: then nothing was summed
    seconds: float  # from the scrape before the first measured request to the last one
    finished: float | None  # requests that the server finished in that time, whoever sent them
    spans: list[SpanView]
    accounts: list[AccountView]  # all, in the order of the ledger
    server_ms: float | None  # the server's own mean end-to-end latency
    inside_ms: float | None  # of it, in no span
    outside_ms: float | None  # of the client's mean latency, beyond the server's and the client's own lag
    outside: list[str]  # accounts that lie there
    totals: dict[str, float]  # catalogue name with labels → growth over the measured time
    gauges: dict[str, Gauge]
    latencies: dict[str, Distribution]  # in the catalogue's units
    agreement: list[Agreement]
    waiting: Waiting | None
    stalls: Stalls | None  # None where no gap is so long, or the server counts none
    device_busy: float | None  # device time / time in which the samples show requests; None where the server lacks it
    differs: dict[str, str]  # catalogue name with labels → how the server's figure differs from ours
    settings: dict[str, str]  # object of a cause → the server's own settings for it
    reported_settings: dict[str, str]  # what the server says of itself, by our names: block_size, prefix_caching …
    longest_prompt: float | None = (
        None  # tokens, at most, of the requests that ended; None: unknown, or without a bound
    )
    courses: Courses = Courses()
    further: dict[str, float] = {}  # as `Growth.further`
    no_shares: list[str] = []  # a sentence for each gauge of a share that showed something else

    def span(self, account: str) -> SpanView | None:
        """The first span that an account lies in."""
        return next((span for span in self.spans if account in span.accounts), None)

    @property
    def queue(self) -> SpanView | None:
        """The stretch in the waiting line, where it is measured apart from what follows."""
        span = self.span("request.queue")
        return span if span is not None and "compute.prefill" not in span.accounts else None

    @property
    def hit_rate(self) -> float | None:
        """Share of the looked-up prompt tokens that the prefix cache had."""
        hit, miss = (self.totals.get(key(PREFIX, (("result", result),))) for result in ("hit", "miss"))
        return hit / (hit + miss) if hit is not None and miss is not None and hit + miss > 0 else None

    @property
    def preemptions(self) -> float | None:
        return of_family(self.totals, PREEMPTIONS)

    @property
    def kv_largest(self) -> float | None:
        return self.gauges[KV_USE].largest if KV_USE in self.gauges else None


@dataclass(frozen=True, slots=True)
class Means:
    """Mean latencies in ms that shares of time are taken of: those of the clients, or the server's own."""

    latency_ms: float | None
    ttft_ms: float | None
    lag_ms: float | None = None  # sent after it was due; None without a client


def observe(run: RunDirectory, requests: pd.DataFrame, measured: pd.DataFrame) -> ServerView | None:
    """The view of a run; None where nothing was scraped, or of a server that is not known.

    `requests` are all of `RunDirectory.requests()`, `measured` those after the warm-up. Raises RunDataError.
    """
    source = recognise(scrapes.names(run))
    if source is None:
        return None
    scraped = scrapes.scrape_summary(run)
    first, last = int(scraped.answered_ns[0]), int(scraped.answered_ns[-1])
    begin, names = _begin(scraped.answered_ns, measured), names_that_grow(source)
    if alternates := scrapes.alternate(run, names):
        names = set()  # there is no sum of processes that answer in turn
    grown = Growth(source, scrapes.growth(run, names, begin, last))
    whole = grown if begin == first else Growth(source, scrapes.growth(run, names, first, last))
    shown = scrapes.readings(run, names_of(source, "gauge") | gauges_followed(source), begin, last)
    served = measured[measured.status == "ok"]
    clients = Means(
        latency_ms=_mean_ms(served.last_byte_ns, served.due_ns),
        ttft_ms=_mean_ms(served.first_token_ns, served.due_ns),
        lag_ms=_mean_ms(served.sent_ns, served.due_ns),
    )
    return view_of(
        source,
        replace(scraped, restarts=0 if alternates else max(scraped.restarts, whole.resets), alternates=alternates),
        grown,
        {} if alternates else _gauges(run, source, begin, last),
        seconds=(last - begin) / 1e9,
        clients=clients,
        agreement=_agreement(whole, requests),
        reported_settings=_reported_settings(run, source, first, last),
        wrong=no_shares(source, shown),
        courses=Courses()
        if alternates
        else courses_of(source, shown, scrapes.growth_over_time(run, names_followed(source), begin, last)),
    )


def hit_rate_of_run(run: RunDirectory) -> float | None:
    """`ServerView.hit_rate` of a run; None where its server's counters do not show it."""
    try:
        requests = run.requests()
        view = observe(run, requests, measured(requests, run.meta()))
    except RunDataError:
        return None
    return view.hit_rate if view is not None else None


def view_of(
    source: Source,
    scraped: scrapes.ScrapeSummary,
    grown: Growth,
    gauges: dict[str, pd.Series],
    *,
    seconds: float,
    clients: Means,
    agreement: list[Agreement],
    reported_settings: dict[str, str],
    wrong: list[str],
    courses: Courses,
    is_now: bool = False,
) -> ServerView:
    """The view of some seconds, from what its counters grew by and what its gauges showed in them."""
    totals, latencies = grown.totals(), grown.distributions()
    latency_ms, lag_ms, further = clients.latency_ms, clients.lag_ms, grown.further()
    if source.shares_grammar_line and further.get(EXTERNAL_LOOKUPS):
        courses = msgspec.structs.replace(courses, grammar_share=None)
    spans = [view for span in source.spans if (view := _span(span, grown, latency_ms, clients.ttft_ms)) is not None]
    server_ms = own_latency_ms(source, grown)
    comparable = None not in (server_ms, latency_ms, lag_ms)
    return ServerView(
        source=source.key,
        title=source.title,
        scrapes=len(scraped.answered_ns),
        failed_scrapes=scraped.failed,
        slowest_scrape_s=scraped.slowest_s,
        longest_gap_s=scraped.longest_gap_s,
        restarts=scraped.restarts,
        alternates=scraped.alternates,
        seconds=seconds,
        finished=of_family(totals, FINISHED),
        spans=spans,
        accounts=[_account(info.name, source) for info in ACCOUNTS],
        server_ms=server_ms,
        inside_ms=server_ms - sum(span.mean_ms for span in spans) if server_ms is not None else None,
        outside_ms=latency_ms - lag_ms - server_ms if comparable else None,
        outside=list(source.latency.outside),
        totals=totals,
        gauges={
            name: Gauge(
                mean=float(shown.mean()), largest=float(shown.max()), samples=len(shown), last=float(shown.iloc[-1])
            )
            for name, shown in gauges.items()
            if len(shown)
        },
        latencies=latencies,
        agreement=agreement,
        stalls=stalls_of(grown),
        waiting=waiting_of(gauges, prompt_share(latencies.get(PROMPTS), reported_settings), is_now=is_now),
        device_busy=_device_busy(of_family(totals, DEVICE), gauges, seconds),
        differs={key(item.ours, item.labels): item.differs for item in source.translations if item.differs},
        settings=dict(source.settings),
        reported_settings=reported_settings,
        longest_prompt=_longest(grown.below(PROMPTS)),
        courses=courses,
        further=further,
        no_shares=wrong,
    )


def _longest(below: dict[float, float]) -> float | None:
    bound = next((bound for bound, count in below.items() if count >= max(below.values())), math.inf)
    return float(bound) if math.isfinite(bound) else None


def own_latency_ms(source: Source, grown: Growth) -> float | None:
    """The server's own mean end-to-end latency; None where it finished nothing."""
    return _mean(grown.total(source.latency.seconds), grown.total(source.latency.requests))


def timeline(run: RunDirectory) -> pd.DataFrame:
    """What the server showed at each scrape, in catalogue names: gauges, and what counters grew by since the last one.

    Index `ns`. What the server does not tell has no column; a family with labels has a column a series. Empty where
    nothing was scraped, of a server that is not known, and where several processes answered in turn. Raises
    RunDataError.
    """
    source = recognise(scrapes.names(run))
    if source is None or scrapes.alternate(run, names_that_grow(source)):
        return pd.DataFrame()
    scraped = scrapes.scrape_summary(run).answered_ns
    first, last = int(scraped[0]), int(scraped[-1])
    rows = scrapes.growth_over_time(run, names_of(source, "counter"), first, last)
    grown = over_time(source, "counter", rows, "growth")
    return pd.DataFrame(_gauges(run, source, first, last) | grown, index=pd.Index(scraped, name="ns"))


def _begin(answered_ns: np.ndarray, measured: pd.DataFrame) -> int:
    """The last scrape before the first measured request was due, else the first of all."""
    before = answered_ns[answered_ns <= measured.due_ns.min()] if len(measured) else answered_ns[:1]
    return int(before[-1] if len(before) else answered_ns[0])


def _gauges(run: RunDirectory, source: Source, begin_ns: int, end_ns: int) -> dict[str, pd.Series]:
    rows = scrapes.readings(run, names_of(source, "gauge"), begin_ns, end_ns)
    return over_time(source, "gauge", rows, "value")


def reported_settings(run: RunDirectory) -> dict[str, str]:
    """What the server of a run says it was set to, by our names of settings; {} where it says nothing."""
    source = recognise(scrapes.names(run))
    if source is None:
        return {}
    answered_ns = scrapes.scrape_summary(run).answered_ns
    return _reported_settings(run, source, int(answered_ns[0]), int(answered_ns[-1]))


def _reported_settings(run: RunDirectory, source: Source, begin_ns: int, end_ns: int) -> dict[str, str]:
    gauges = {each.gauge for each in source.setting_gauges.values()}
    return settings_in(source, scrapes.readings(run, gauges, begin_ns, end_ns))


def settings_in(source: Source, rows: pd.DataFrame) -> dict[str, str]:
    """The settings in what gauges showed; `rows` as `scrapes.readings` gives them."""
    last = rows.drop_duplicates("name", keep="last").set_index("name")
    found = {}
    for name, where in source.setting_gauges.items():
        if where.gauge in last.index:
            shown = last.loc[where.gauge]
            value = shown.labels.get(where.label) if where.label else f"{shown.value:g}"
            found |= {name: value} if value is not None else {}
    return found


def _device_busy(device_s: float | None, gauges: dict[str, pd.Series], seconds: float) -> float | None:
    running = gauges.get(RUNNING)
    if device_s is None or running is None or not len(running):
        return None
    present_s = seconds * float((running > 0).mean())
    return min(1.0, device_s / present_s) if present_s > 0 else None


def _span(span: Span, grown: Growth, latency_ms: float | None, client_ttft_ms: float | None) -> SpanView | None:
    requests = grown.total(span.requests)
    mean_ms = _mean(grown.total(span.seconds), requests)
    if mean_ms is None:
        return None
    ttft_ms = _mean(grown.total(span.to_first_token), grown.total(span.first_tokens))
    return SpanView(
        name=span.name,
        accounts=list(span.accounts),
        meaning=span.meaning,
        requests=requests,
        mean_ms=mean_ms,
        share=mean_ms / latency_ms if latency_ms else None,
        ttft_ms=ttft_ms,
        ttft_share=ttft_ms / client_ttft_ms if ttft_ms is not None and client_ttft_ms else None,
    )


def _account(account: str, source: Source) -> AccountView:
    sight = BY_CLIENT if account == "client.lag" else source.sights.get(account)
    sight = sight or unseen(f"{source.title} has no metric of it")
    return AccountView(account=account, visibility=sight.visibility, why=sight.why)


def _agreement(grown: Growth, requests: pd.DataFrame) -> list[Agreement]:
    """Counts of the whole run, warm-up included: they differ where others used the server, too, or requests failed."""
    served, totals = requests[requests.status == "ok"], grown.totals()
    pairs = {
        "finished requests": (float(len(served)), _finished(totals)),
        "prompt tokens": (_sum(served.prompt_tokens), of_family(totals, "sojourn_token_prompt_tokens_total")),
        "output tokens": (_sum(served.output_tokens), of_family(totals, "sojourn_token_generated_tokens_total")),
    }
    return [
        Agreement(what=what, client=client, server=server)
        for what, (client, server) in pairs.items()
        if client is not None and server is not None
    ]


def _finished(totals: dict[str, float]) -> float | None:
    """Requests served to their end: without aborts and errors, where the server tells them apart."""
    served = [totals.get(key(FINISHED, (("outcome", outcome),))) for outcome in ("stop", "length")]
    return sum(served) if None not in served else of_family(totals, FINISHED)


def _sum(column: pd.Series) -> float | None:
    """None where one of them is unknown."""
    numbers = column.astype("float64")
    return float(numbers.sum()) if len(numbers) and numbers.notna().all() else None


def _mean_ms(until: pd.Series, since: pd.Series) -> float | None:
    spent = (until.astype("float64") - since.astype("float64")).dropna()
    return float(spent.mean()) / 1e6 if len(spent) else None


def _mean(seconds: float | None, requests: float | None) -> float | None:
    """Milliseconds a request; None where the server has no sum or finished nothing."""
    return seconds / requests * 1e3 if seconds is not None and requests else None
