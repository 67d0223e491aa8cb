"""One server as it is watched: takes its scrapes, and says at any moment what the window shows."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pandas as pd

from sojourn.diagnosis.sensor_facts import SensorFacts
from sojourn.diagnosis.statements.sensors import device_lines, unsaid
from sojourn.interop.sources.courses import (
    HIT,
    MISS,
    PREEMPTIONS,
    PREFIX,
    Courses,
    courses_of,
    gauges_followed,
    names_followed,
)
from sojourn.interop.sources.gain import gap_gain
from sojourn.interop.sources.pressure import GAPS, GENERATED, KV_USE, RUNNING, WAITING
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.translate import Growth, names_of_ours, no_shares, of_family, over_time
from sojourn.interop.sources.view import FINISHED, Means, ServerView, own_latency_ms, settings_in, view_of
from sojourn.live.watch.devices import Devices
from sojourn.live.watch.document import Now, WatchedServer
from sojourn.live.watch.episodes import late_requests, names_judged, over_since
from sojourn.live.watch.expectation import HISTOGRAMS, losses_of
from sojourn.live.watch.figures import now_of, parts_of
from sojourn.live.watch.moments import (
    PROMPT_TOKENS,
    STEP_SECONDS,
    TOKENS_STEP_BY_STEP,
    Moment,
    gaps_of,
    hit_change_of,
    modelled_gain,
    rates_of,
    seen_gain,
    steps_of,
)
from sojourn.live.watch.percentiles import (
    OVER_S,
    POINT_S,
    LatencyPoint,
    good_tokens_per_s,
    goodput_rps,
    names_read,
    percentiles_of,
    point,
)
from sojourn.live.watch.progress import ADVICE, Progress
from sojourn.live.watch.steady import clock
from sojourn.live.watch.verdict import NOTHING_CAME, Verdict, verdict
from sojourn.live.watch.window import Window

WINDOW_S = 60.0
HISTORY_S = 600.0
GAUGES = (RUNNING, WAITING, KV_USE)  # that a verdict reads
BALANCED = (
    "Several processes answer at this address in turn (a load balancer, or workers without a shared registry): their "
    "counters cannot be told apart; watch each server at its own address, or all by a Prometheus"
)
ROUTED = "This is the page of a router, not of an engine: it shows no queue and no latency; watch the engines behind it"
BACKLOG = ": what is late or waits is its backlog"
UNREACHABLE_AFTER = 3  # failed scrapes in a row: one may be a hiccup
LATE = 0.5  # of an interval, that a scrape may come late before it counts as failed


class Observer:
    """Owns the window and the history of one server. Every time is ns of the monotonic clock of this host."""

    def __init__(self, url: str, name: str, objectives: Mapping[str, float], window_s: float = WINDOW_S,
                 *, is_now: bool = True, devices: Devices | None = None):  # fmt: skip
        """`is_now`: its last scrape is the present, and what was late before and is over counts no more."""
        self.url, self.name = url, name
        self.window = Window(window_s + 5.0)
        self.progress = Progress()
        self.history: deque[Moment] = deque()
        self.latencies: deque[LatencyPoint] = deque()  # over the same time
        self._events: list[str] = []
        self._is_now, self._devices = is_now, devices
        self.objectives, self.window_s = dict(objectives), window_s
        self._stand_in: dict[str, float] = {}
        self._judged: tuple[int, Verdict] | None = None  # end of the window, and what was said of it
        self._failures, self._problem = 0, "no scrape was made yet"
        self._seen = False

    def add(self, ns: int, rows: Sequence[dict[str, Any]], on_page: Iterable[str] = ()) -> None:
        """An answered scrape; `on_page`: see `Window.add`. A page of an unknown server counts as a failure."""
        restarts = self.window.restarts
        try:
            self.window.add(ns, rows, on_page)
        except ValueError as error:
            self.add_failure(ns, str(error))
            return
        if self._failures >= UNREACHABLE_AFTER and self._seen:
            self._events.append("the server answers again")
        if self.window.restarts > restarts:
            self.progress, self._judged = Progress(), None  # what was seen, was of another process
            if not self.window.alternates:
                self._events.append("the server began anew: its counters fell")
        stalls = self.progress.stalls()
        self.progress.add(ns, self.window.source, self.window.answered[-1].values)
        if self.progress.stalls() != stalls and (stall := self.progress.stall(ns)) is not None:
            self._events.append(stall.sentence(clock(stall.end_ns)))
        self._failures, self._problem, self._seen = 0, "", True
        self._remember()

    def add_failure(self, ns: int, why: str) -> None:
        self.window.add_failure(ns)
        self._failures += 1
        self._problem = why
        if self._failures == UNREACHABLE_AFTER:
            self._events.append(why)

    def count_missed(self, now_ns: int, every_s: float, why: str) -> bool:
        """Counts scrapes that others made, are due since the last one, and have not come, as failed; whether there are
        new ones. `every_s`: between two of them, until the window shows it."""
        last_ns = self.window.last_ns
        if last_ns is None:
            return False
        missed = int((now_ns - last_ns) / 1e9 / (self.window.interval_s or every_s) - LATE)
        new = range(self._failures, missed)
        for _ in new:
            self.add_failure(now_ns, why)
        return bool(new)

    def take_events(self) -> list[str]:
        """Sentences of what happened to the server itself since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def bounds(self) -> dict[str, float]:
        """The objectives; without some, those that stand in for them where time is lost, in ms."""
        return self.objectives or self._stand_in

    @property
    def problem(self) -> str:
        """Why the last scrape failed; "" where it did not."""
        return self._problem

    def _remember(self) -> None:
        """Adds the last scrape to the history, with what counters gained since the one before."""
        scrapes, source = self.window.answered, self.window.source
        last, mixed = scrapes[-1], self.window.alternates
        if mixed:
            self.history.clear()
            self.latencies.clear()
        gauges = {} if mixed else self._gauges(last.ns)
        rates: dict[str, float | None] = {}
        looked_up: dict[str, float | None] = {}
        late = 0.0
        if len(scrapes) > 1 and not mixed and not last.reset:
            before = scrapes[-2].ns
            grown = Growth(
                source, self.window.growth(before, _counters(source) | names_judged(source, self.objectives))
            )
            late = late_requests(grown, self.objectives)
            seconds = (last.ns - before) / 1e9
            totals = grown.totals()
            looked_up = {"hits": totals.get(HIT), "misses": totals.get(MISS)}
            looked_up["preemptions"] = of_family(totals, PREEMPTIONS) or 0.0
            rates = rates_of(totals, seconds) | steps_of(grown) | (gaps_of(grown, seconds) if source.live_gaps else {})
        self.history.append(
            Moment(
                ns=last.ns, running=gauges.get(RUNNING), waiting=gauges.get(WAITING), kv_use=gauges.get(KV_USE),
                output_tokens_per_s=rates.get("output"), prompt_tokens_per_s=rates.get("prompt"),
                requests_per_s=rates.get("requests"), tokens_per_step=rates.get("tokens_per_step"),
                seconds_per_step=rates.get("seconds_per_step"), gap_s=rates.get("gap_s"),
                late=late, decoding=rates.get("decoding"), **looked_up,
            )
        )  # fmt: skip
        if not mixed and (not self.latencies or last.ns - self.latencies[-1].ns >= POINT_S * 1e9):
            self._add_point(last.ns)
        for kept in (self.history, self.latencies):
            while kept and kept[0].ns < last.ns - HISTORY_S * 1e9:
                kept.popleft()

    def _add_point(self, ns: int) -> None:
        begin_ns, source = self.window.begin_of(OVER_S), self.window.source
        if begin_ns < ns:
            grown = Growth(source, self.window.growth(begin_ns, names_read(source)))
            self.latencies.append(point(ns, grown, self.objectives, (ns - begin_ns) / 1e9, self._running(begin_ns)))

    def _running(self, begin_ns: int) -> tuple[float, float]:
        """Requests that ran at a moment, and that run now; infinity where the server does not say."""
        source = self.window.source
        rows = self.window.readings(begin_ns, names_of_ours(source, (RUNNING,)))
        shown = over_time(source, "gauge", rows, "value").get(RUNNING)
        return (math.inf, math.inf) if shown is None or shown.empty else (shown.iloc[0], shown.iloc[-1])

    def _gauges(self, begin_ns: int) -> dict[str, float]:
        source = self.window.source
        shown = over_time(source, "gauge", self.window.readings(begin_ns, names_of_ours(source, GAUGES)),
                          "value")  # fmt: skip
        return {name: float(series.iloc[-1]) for name, series in shown.items() if len(series)}

    def batch_gain(self) -> float | None:
        """What twice the batch gives, as a ratio of tokens/s: by the gaps between tokens at several batches. Of a
        server that does not count them as they come: the tokens/s at the largest batch over those at about half of it;
        else what twice the tokens per step give, as the times of steps say. None where none of them varied."""
        source, seen = self.window.source, self._own_history()
        if source is not None and source.live_gaps:
            return gap_gain([(moment.gap_s, moment.decoding) for moment in seen])
        return seen_gain(seen) or modelled_gain(seen)

    def _own_history(self) -> list[Moment]:
        """The moments of the server that answers now: what another one gave before a restart says nothing of it."""
        return [moment for moment in self.history if moment.ns >= (self.window.first_ns or 0)]

    def _begin_ns(self) -> int | None:
        """Of the window: it reaches back neither before a restart nor into an episode of late requests that is over."""
        begin_ns = self.window.begin_of(self.window_s)
        if begin_ns is None or self.window.alternates or not self._is_now:
            return begin_ns
        moments, interval_s = self._own_history(), self.window.interval_s or 1.0
        return max(begin_ns, over_since(moments, interval_s, self.progress.stalls()) or 0)

    def view(self) -> tuple[ServerView, Growth] | None:
        """What the window shows; None before the second scrape."""
        begin_ns = self._begin_ns()
        source, scrapes = self.window.source, self.window.answered
        if begin_ns is None or source is None or begin_ns == scrapes[-1].ns:
            return None
        grown = Growth(source, self.window.growth(begin_ns))
        own_ms = own_latency_ms(source, grown)
        ttft_ms = self._ttft_ms(grown)
        settings = {each.gauge for each in source.setting_gauges.values()}
        shown = self.window.readings(begin_ns, names_of_ours(source, GAUGES) | gauges_followed(source))
        view = view_of(
            source,
            self.window.summary(begin_ns),
            grown,
            over_time(source, "gauge", shown, "value"),
            seconds=(scrapes[-1].ns - begin_ns) / 1e9,
            clients=Means(latency_ms=own_ms, ttft_ms=ttft_ms),
            agreement=[],
            reported_settings=settings_in(source, self.window.readings(scrapes[-1].ns, settings)),
            wrong=no_shares(source, shown),
            courses=self._courses(source, shown, begin_ns),
            is_now=self._is_now,
        )
        return view, grown

    def _courses(self, source: Source, shown: pd.DataFrame, begin_ns: int) -> Courses:
        """Those of the window. A hit rate may have fallen before it: the line that follows comes later."""
        found = courses_of(source, shown, self.window.growth_over_time(begin_ns, names_followed(source)))
        if found.hit_change is not None:
            return found
        return msgspec.structs.replace(found, hit_change=hit_change_of(self._own_history()))

    def _ttft_ms(self, grown: Growth) -> float | None:
        """What the phases before the first token are shares of: the same requests' time, also where a line grows."""
        source, ttft = self.window.source, grown.distribution_of(HISTOGRAMS["ttft_ms"])
        phases = [
            (grown.total(span.to_first_token), grown.total(span.first_tokens))
            for span in source.spans if span.to_first_token
        ]  # fmt: skip
        if source.phases_at_end and all(requests for _, requests in phases):
            return 1e3 * sum(seconds / requests for seconds, requests in phases)
        return 1e3 * ttft.mean if ttft is not None else None

    @property
    def is_filling(self) -> bool:
        """The scrapes do not cover the whole window yet."""
        first, last = self.window.first_ns, self.window.last_ns
        return first is None or last - first < self.window_s * 1e9

    @property
    def is_in_question(self) -> bool:
        """The last page failed, or an engine does not move."""
        return self._failures > 0 or bool(self.progress.still())

    def refresh(self, server: WatchedServer) -> WatchedServer:
        """What was said of the server, with the figures of the last scrape."""
        return msgspec.structs.replace(server, now=self._now()) if server.now is not None else server

    def watched(self) -> WatchedServer:
        """The server as of the last scrape."""
        found = self.view() if self._failures < UNREACHABLE_AFTER else None
        if found is None:
            return self._unseen()
        view, grown = found
        if self.window.alternates or self.window.is_router:
            return self._no_engine(view, BALANCED if self.window.alternates else ROUTED)
        begin_ns, end_ns = self._begin_ns(), self.window.last_ns
        before_ns, before = self._judged or (end_ns, None)
        if begin_ns > self.window.begin_of(self.window_s):  # what it said is over
            before = None
        sensors = self._devices.facts(self.window, begin_ns) if self._devices is not None else None
        judged = verdict(view, grown, self.objectives, self.batch_gain(), before, (end_ns - before_ns) / 1e9, sensors)
        self._judged, self._stand_in = (end_ns, judged), judged.stand_in
        return self._document(view, grown, self._with_progress(judged), sensors)

    def _with_progress(self, judged: Verdict) -> Verdict:
        """A hung engine is what there is to say, whatever else the window shows."""
        still = self.progress.still()
        stuck = [each for each in still if each.is_stuck]
        if stuck:
            said = "; ".join(each.sentence(clock(each.since_ns)) for each in stuck)
            return replace(judged, state="stuck", headline=f"Stuck: {said}: {ADVICE}")
        stall = self.progress.stall(self._begin_ns())
        if self.has_stall:
            return replace(
                judged, state="degraded", findings=[], headline=f"{stall.sentence(clock(stall.end_ns))}{BACKLOG}"
            )
        if not still:
            return judged
        said = [f"{each.sentence(clock(each.since_ns))}: {each.doubt}" for each in still]
        if judged.state not in ("healthy", "idle") and judged.headline != NOTHING_CAME:
            return replace(judged, unknown=[*said, *judged.unknown])
        return replace(judged, state="cannot tell", headline=said[0], unknown=[*said[1:], *judged.unknown])

    @property
    def has_stall(self) -> bool:
        """Whether a stall that is over is what the page says."""
        stall, judged = self.progress.stall(self._begin_ns() or 0), self._judged[1] if self._judged else None
        named = (
            [each for each in judged.findings if each.key != "slow_front"] if judged else []
        )  # a stop looks like one
        explains = stall and judged and judged.lost and (stall.is_hang or not named)
        return bool(explains or (stall and stall.has_just_ended(self.window.last_ns, self.window_s / 2)))

    def _no_engine(self, view: ServerView, why: str) -> WatchedServer:
        """A page that is not of one process: no figure of it means anything."""
        return WatchedServer(
            url=self.url, name=self.name, source=view.source, title=view.title, state="cannot tell",
            headline=why, reads="metrics", window_s=view.seconds, scrapes=view.scrapes,
            failed_scrapes=view.failed_scrapes, restarts=0, now=Now.unknown(), met=[], parts=[], findings=[],
            unknown=[f"{name.removesuffix('_ms')} is unknown" for name in self.objectives], warnings=[],
        )  # fmt: skip

    def _document(self, view: ServerView, grown: Growth, judged: Verdict, sensors: SensorFacts | None) -> WatchedServer:
        begin_ns = self._begin_ns() or 0
        means = {name: view.latencies.get(family) for name, family in HISTOGRAMS.items()}
        return WatchedServer(
            url=self.url, name=self.name, source=view.source, title=view.title, state=judged.state,
            headline=judged.headline, reads="metrics", window_s=view.seconds, scrapes=view.scrapes,
            failed_scrapes=view.failed_scrapes, restarts=self.window.restarts, now=self._now(), met=judged.met,
            parts=parts_of(view), findings=judged.findings, unknown=judged.unknown, ruled_out=judged.ruled_out,
            warnings=[*self._warnings(view), *unsaid(sensors, judged.findings)], devices=device_lines(sensors),
            hit_rate=view.hit_rate, view=view, percentiles=percentiles_of(grown),
            goodput_rps=goodput_rps(grown, self.objectives, view.seconds, self._running(begin_ns)),
            good_tokens_per_s=good_tokens_per_s(grown, view.seconds),
            **{name: 1e3 * shown.mean if shown is not None else None for name, shown in means.items()},
        )  # fmt: skip

    def _unseen(self) -> WatchedServer:
        waits = self._failures < UNREACHABLE_AFTER
        looks = f"Looking: {self._problem}" if self._problem else "Looking: rates need a second scrape"
        headline = looks if waits else f"Cannot be read: {self._problem}"
        source = self.window.source
        return WatchedServer(
            url=self.url, name=self.name, source=source.key if source else None,
            title=source.title if source else "unknown server", state="cannot tell" if waits else "unreachable",
            headline=headline, reads="metrics", window_s=0.0, scrapes=len(self.window.answered),
            failed_scrapes=self._failures, restarts=self.window.restarts, now=None, met=[], parts=[], findings=[],
            unknown=[], warnings=[],
        )  # fmt: skip

    def _now(self) -> Now:
        return now_of(self._own_history() or [self.history[-1]])

    def _warnings(self, view: ServerView) -> list[str]:
        found = []
        if view.failed_scrapes:
            found.append(f"{view.failed_scrapes} scrapes of the window failed")
        if self.window.restarts and not self.window.alternates and self.is_filling:
            found.append(f"the server began anew {view.seconds:.0f} s ago: nothing of before is counted")
        found += [f"{lost.missed:,} of {lost.sent:,} requests were lost: {lost.error}" for lost in losses_of(view)]
        if self.window.first_ns is not None and view.seconds < 0.9 * self.window_s:
            found.append(f"the window has {view.seconds:.0f} of {self.window_s:.0f} s yet")
        return found


def _counters(source: Source) -> set[str]:
    steps = {f"{name}{suffix}" for name in names_of_ours(source, (STEP_SECONDS, GAPS)) for suffix in ("_sum", "_count")}
    return names_of_ours(source, (TOKENS_STEP_BY_STEP, PROMPT_TOKENS, GENERATED, FINISHED, PREFIX, PREEMPTIONS)) | steps
