"""Watches live servers: one thread a server that reads its /metrics once a second, or one that asks a Prometheus.

It stands here and not beside the load generator's scraper, because the terminal, the app and the tools all need it, and
the app may import nothing but `metrics`.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from sojourn.interop.sources.page import Page, own_rows, read_page
from sojourn.interop.sources.registry import TITLES
from sojourn.live.sensors.feed import SensorFeed
from sojourn.live.watch.addresses import addresses
from sojourn.live.watch.devices import devices_of
from sojourn.live.watch.document import WORST_FIRST, State, Watch, WatchedServer
from sojourn.live.watch.fetch import fetch
from sojourn.live.watch.observer import UNREACHABLE_AFTER, WINDOW_S, Moment, Observer
from sojourn.live.watch.percentiles import LatencyPoint
from sojourn.live.watch.prometheus import HISTORY_S, clock_ns, held_scrapes, interval_s
from sojourn.live.watch.recorder import Recorders
from sojourn.live.watch.records import Reading, Records
from sojourn.live.watch.steady import LOOKS_FIRST_S, Change, Steady, clock
from sojourn.live.watch.verdict import MORE_RECORDS, NO_CAUSE
from sojourn.metrics.errors import RunDataError, ServerError

INTERVAL_S = 1.0
TIMEOUT_S = 5.0
JUDGED_EVERY_S = 5.0
RECORDS_EVERY_S = 10.0  # at most: a diagnosis of records takes a second or two
MOST_LESS, FEWEST_LESS = 4, 2  # parts of the window that records leave out, so that none gets older than the window
RECORDS_SHARE = 0.05  # of a core for those of a server, on whose host a watch with records runs
SCRAPES_OF_A_WINDOW = 5  # at least, of a Prometheus that scrapes seldom
MOST_CHANGES = 200
STATE_OF: Mapping[str, State] = {"healthy": "healthy", "degraded": "degraded", "overloaded": "overloaded"}
NO_RECORDS, OLD_RECORDS = "no records are read yet", "its records are older than the window"
NO_METRICS = (
    "{} answers, and has no /metrics (HTTP {}); SGLang needs --enable-metrics, and behind a gateway the address of the "
    "server itself is needed"
)
NO_SCRAPE = "the Prometheus at {} has no scrape of it since {}"
NO_ENGINES = f"the Prometheus at {{}} holds no metric of {TITLES} of the last {{:.0f}} s"


class Watched:
    """One server with what was last said of it."""

    def __init__(self, observer: Observer, records: Path | None = None):
        self.observer = observer
        self.records = None if records is None else Records(records, observer.window_s)
        self.steady = Steady(min(LOOKS_FIRST_S, observer.window_s))
        self.raw: WatchedServer = observer.watched()
        self.shown: WatchedServer = self.raw
        self.no_records = ""  # why the records cannot be read
        self._judged_ns = 0
        self._reading: Reading | None = None
        self._less_s = min(RECORDS_EVERY_S, observer.window_s / MOST_LESS)  # of the window, until the next reading
        self._due_s = -math.inf  # of the next one
        self._diagnosing: threading.Thread | None = None

    def judge(self, ns: int) -> list[Change]:
        """Judges the window anew, where that is due; the change, if there is one."""
        if not self._is_due(ns):
            self.shown, self.raw = self.observer.refresh(self.shown), self.observer.refresh(self.raw)
            return []
        self._judged_ns = ns
        self.raw = self._with_records(self.observer.watched())
        self.shown, changes = self.steady.take(ns, self.raw)
        return changes

    def _is_due(self, ns: int) -> bool:
        """A verdict that stands is looked at every JUDGED_EVERY_S: judging costs more than reading the page. One that
        is new, or would change, is looked at with each page, and so is a server whose pages fail or that stands still.
        """
        return (
            not self.steady.is_settled
            or self.observer.is_filling
            or self.observer.is_in_question
            or self.raw.state in ("unreachable", "stuck")
            or ns - self._judged_ns >= JUDGED_EVERY_S * 1e9
        )

    def _with_records(self, server: WatchedServer) -> WatchedServer:
        if self.records is None or server.state in ("unreachable", "stuck"):
            return server
        self._diagnose_beside()
        warnings, now_ns = [*server.warnings, *filter(None, [self.no_records])], time.monotonic_ns()
        reading = self._fresh_reading(now_ns)
        found = reading.diagnosis if reading is not None else None
        words = reading.words(now_ns) if reading is not None else OLD_RECORDS if self._reading else NO_RECORDS
        if server.state == "idle" or self.observer.has_stall or found is None or found.state not in STATE_OF:
            unknown = [each for each in server.unknown if each not in MORE_RECORDS.values()]
            headline = server.headline
            if reading is not None and headline.endswith(nothing := NO_CAUSE.format(server.title)):
                headline = (
                    f"{headline.removesuffix(nothing)}neither {nothing.replace('name no', 'nor its records name a')}"
                )
            return msgspec.structs.replace(
                server, headline=headline, unknown=unknown, warnings=warnings, evidence=f"/metrics; {words}"
            )
        return msgspec.structs.replace(
            server, state=STATE_OF[found.state], headline=found.headline, findings=found.findings, reads="records",
            unknown=[], ruled_out=[], warnings=warnings, diagnosis=found, evidence=words,
        )  # fmt: skip

    def _fresh_reading(self, now_ns: int) -> Reading | None:
        """The last one, where none of its records is older than the window or of before a restart."""
        reading, begin_ns = self._reading, now_ns - int(self.observer.window_s * 1e9)
        fresh = reading is not None and reading.begin_ns >= max(begin_ns, self._since_ns())
        return reading if fresh else None

    def _since_ns(self) -> int:
        """The restart of the server within the watch; 0 without one."""
        return (self.observer.window.first_ns or 0) if self.observer.window.restarts else 0

    def _diagnose_beside(self) -> None:
        """Diagnoses the records in a thread of its own: it takes seconds, in which no scrape may be missed."""
        if self._diagnosing is not None and self._diagnosing.is_alive():
            return
        if time.monotonic() >= self._due_s:
            self._diagnosing = threading.Thread(target=self._diagnose, name="watch records", daemon=True)
            self._diagnosing.start()

    def _diagnose(self) -> None:
        begin_s, began = time.monotonic(), time.thread_time()
        try:
            self._reading = self.records.read(self.observer.bounds(), self._less_s, self._since_ns())
            self.no_records = ""
        except RunDataError as error:
            self._reading, self.no_records = None, f"the records cannot be read: {error}"
        finally:
            least_s, most_s = (self.observer.window_s / part for part in (MOST_LESS, FEWEST_LESS))
            wanted_s = (time.thread_time() - began) / RECORDS_SHARE
            every_s = min(max(min(RECORDS_EVERY_S, least_s), wanted_s), most_s)
            self._due_s = begin_s + every_s
            # The next reading takes as long again, and until then this one is shown
            self._less_s = min(every_s + 2 * (time.monotonic() - begin_s), most_s)


class Watcher:
    """Owns the threads. `watch()` is what there is to say now; `changes` what was said until now."""

    def __init__(
        self,
        urls: Sequence[str],
        objectives: Mapping[str, float] | None = None,
        *,
        window_s: float = WINDOW_S,
        interval_s: float = INTERVAL_S,
        records: Sequence[Path] = (),
        prometheus: Sequence[str] = (),
        select: str = "",
        unasked_s: float | None = None,
        record: Recorders | None = None,
        sensors: SensorFeed | None = None,
    ):
        """Raises InputError for an address that is none. `records`: folders on this host, one a server. `record`: takes
        every scrape. `sensors`: read beside the servers, and ended with the watch.

        With `unasked_s` the threads end by themselves once `watch()` was not called for so long.
        """
        servers, asked = addresses(urls, prometheus, len(records), bool(select))
        self._changes: deque[Change] = deque(maxlen=MOST_CHANGES)
        self._num_changes = 0
        self._objectives, self._window_s, self._interval_s = dict(objectives or {}), window_s, interval_s
        self._select, self._lock, self._stopping = select, threading.Lock(), threading.Event()
        self._servers: dict[str, Watched] = {}
        self._record, self.record_problem = record, ""  # why nothing is recorded any more
        self.sensors = sensors
        self._unasked_s, self._asked_s = unasked_s, time.monotonic()
        self._problems = dict.fromkeys(asked, "")  # of each Prometheus
        for place, base in enumerate(servers):
            self._servers[base] = Watched(self._observer(base, base), records[place] if place < len(records) else None)
        self.bases = [*self._servers, *asked]
        loops: list[tuple[Callable[[str], None], str]] = [(self._scrape, base) for base in self._servers]
        loops += [(self._ask, base) for base in asked]
        self._threads = [
            threading.Thread(target=loop, args=(base,), name=f"watch {base}", daemon=True) for loop, base in loops
        ]

    def start(self) -> "Watcher":
        if self.sensors is not None:
            self.sensors.keep_s = self._window_s
            if self._record is not None:
                self.sensors.subscribe(self._record.add_sensors)
            self.sensors.start()
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        if self.sensors is not None:
            self.sensors.stop()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(TIMEOUT_S)

    @property
    def is_over(self) -> bool:
        """Whether it watches no more. It stays over: a later reader needs a new one."""
        if self._unasked_s is not None and time.monotonic() - self._asked_s > self._unasked_s:
            self._stopping.set()
        return self._stopping.is_set()

    def watch(self, *, steady: bool = True) -> Watch:
        """What the windows show. `steady` False: the verdict of this moment, without waiting whether it stands."""
        self._asked_s = time.monotonic()
        with self._lock:
            servers = [each.shown if steady else each.raw for each in self._servers.values()]
            servers += [_unreachable(base, why) for base, why in self._problems.items() if why]
        worst = min(servers, key=lambda each: WORST_FIRST.index(each.state), default=None)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        if worst is None:
            return Watch(at=at, state="cannot tell", headline="No answer has come yet", servers=[])
        alone = len(servers) == 1
        return Watch(at=at, state=worst.state, servers=servers,
                     headline=worst.headline if alone else f"{worst.name}: {worst.headline}")  # fmt: skip

    def wait_for(self, seconds: float) -> None:
        """Returns when each window has so many seconds: at once of a Prometheus with a history, and soon where nothing
        answers."""
        until = time.monotonic() + seconds + 2 * self._interval_s
        while time.monotonic() < until:
            servers = self.watch(steady=False).servers
            if servers and all(_is_silent(each) or each.window_s >= 0.98 * seconds for each in servers):
                return
            time.sleep(0.2)

    def changes(self) -> list[Change]:
        """The last of what was said, oldest first."""
        return list(self._changes)

    def changes_after(self, number: int) -> tuple[list[Change], int]:
        """What was said after so many changes, and how many there are now."""
        new = self._num_changes - number
        return (list(self._changes)[-new:] if new else []), self._num_changes

    def histories(self) -> dict[str, list[Moment]]:
        """Name of a server → its moments, oldest first."""
        with self._lock:
            return {name: list(each.observer.history) for name, each in self._servers.items()}

    def latencies(self) -> dict[str, list[LatencyPoint]]:
        """Name of a server → percentiles and goodput over the last minutes, oldest first."""
        with self._lock:
            return {name: list(each.observer.latencies) for name, each in self._servers.items()}

    def observer(self, name: str) -> Observer:
        return self._servers[name].observer

    def _observer(self, base: str, name: str, window_s: float | None = None) -> Observer:
        devices = devices_of(self.sensors, is_wall_clock=window_s is not None)
        return Observer(base, name, self._objectives, window_s or self._window_s, devices=devices)

    def _scrape(self, base: str) -> None:
        """The loop of a server that is read directly."""
        server, due = self._servers[base], time.monotonic()
        while not self.is_over:
            began_ns = time.monotonic_ns()
            page, problem = _page(base, began_ns, server.observer.window.wants if self._record is None else None)
            now_ns = time.monotonic_ns()
            rows = own_rows(now_ns, up=0, took_s=(now_ns - began_ns) / 1e9) if page is None else page.rows
            self._keep(base, base, rows, answered=page is not None)
            with self._lock:
                if page is None:
                    server.observer.add_failure(now_ns, problem)
                else:
                    server.observer.add(now_ns, *page)
                self._note(server, now_ns)
            self._say(server.judge(now_ns))
            due = max(due + self._interval_s, time.monotonic())
            self._stopping.wait(due - time.monotonic())

    def _keep(
        self, name: str, url: str, rows: Sequence[dict], *, answered: bool = True, is_wall_clock: bool = False
    ) -> None:
        """Records a scrape, where that is wanted. What cannot be written ends the record, and no watch."""
        if self._record is None or self.record_problem:
            return
        try:
            self._record.add(name, url, rows, answered=answered, is_wall_clock=is_wall_clock)
        except RunDataError as error:
            self.record_problem = f"nothing is recorded any more: {error}"

    def _note(self, server: Watched, ns: int) -> None:
        """What happened to the server itself is said at once."""
        self._say([Change(ns, server.observer.name, "event", each) for each in server.observer.take_events()])

    def _say(self, changes: Sequence[Change]) -> None:
        self._changes.extend(changes)
        self._num_changes += len(changes)

    def _ask(self, base: str) -> None:
        """The loop of a Prometheus: its history first, then what is new."""
        last: dict[str, int] = {}
        window_s, wait_s, ask_s, every_s = self._window_s, self._interval_s, float(HISTORY_S), 0.0
        ahead_ns = 0  # by which its clock is ahead of ours
        while not self.is_over:
            try:
                ahead_ns = clock_ns(base) - time.time_ns()
                held = held_scrapes(base, ask_s, self._select)
                self._problems[base] = "" if held or last else NO_ENGINES.format(base, ask_s)
            except ServerError as error:
                held, self._problems[base] = [], str(error)
            if held and not last:
                every_s = interval_s(held)
                window_s = max(window_s, SCRAPES_OF_A_WINDOW * every_s)
                wait_s, ask_s = max(self._interval_s, every_s / 2), 3 * every_s + 5
            fresh = set()
            for scrape in held:
                job, instance = scrape.target
                name = f"{instance} ({job})" if job else instance
                with self._lock:
                    server = self._servers.setdefault(name, Watched(self._observer(base, name, window_s)))
                    if scrape.ns > last.get(name, 0):
                        self._keep(name, base, scrape.rows, is_wall_clock=True)
                        server.observer.add(scrape.ns, scrape.rows)
                        last[name] = scrape.ns
                        fresh.add(name)
            now_ns = time.time_ns() + ahead_ns
            for name in sorted(last):
                server = self._servers[name]
                why = self._problems[base] or NO_SCRAPE.format(base, clock(last[name]))
                with self._lock:
                    is_late = server.observer.count_missed(now_ns, every_s, why)
                    ns = now_ns if is_late else last[name]
                    self._note(server, ns)
                if is_late or name in fresh:
                    self._say(server.judge(ns))
            self._stopping.wait(wait_s)


def _page(base: str, began_ns: int, wants: Callable[[str], bool] | None) -> tuple[Page | None, str]:
    """What is wanted of a page (None: all), or None and why it cannot be read, in a sentence."""
    try:
        status, body = fetch(f"{base}/metrics", TIMEOUT_S)
        if status != 200:
            return None, NO_METRICS.format(base, status) if status == 404 else f"{base}/metrics answers HTTP {status}"
        now_ns = time.monotonic_ns()
        return read_page(body, now_ns, (now_ns - began_ns) / 1e9, wants), ""
    except ServerError as error:
        return None, str(error)
    except ValueError as error:
        return None, f"{base}/metrics is no Prometheus text ({error})"


def _is_silent(server: WatchedServer) -> bool:
    return server.state == "unreachable" and server.failed_scrapes >= UNREACHABLE_AFTER


def _unreachable(base: str, why: str) -> WatchedServer:
    return WatchedServer(
        url=base, name=base, source=None, title="Prometheus", state="unreachable", headline=f"Cannot be read: {why}",
        reads="metrics", window_s=0.0, scrapes=0, failed_scrapes=UNREACHABLE_AFTER, restarts=0, now=None, met=[],
        parts=[], findings=[], unknown=[], warnings=[],
    )  # fmt: skip


def watch_once(
    urls: Sequence[str], seconds: float = WINDOW_S, objectives: Mapping[str, float] | None = None,
    interval_s: float = INTERVAL_S,
) -> Watch:  # fmt: skip
    """The verdict on live servers after so many seconds of scrapes, or at once from a Prometheus. Raises InputError."""
    watcher = Watcher(urls, objectives, window_s=seconds, interval_s=interval_s).start()
    try:
        watcher.wait_for(seconds)
        return watcher.watch(steady=False)
    finally:
        watcher.stop()
