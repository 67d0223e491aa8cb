"""A lens on live servers: reads their KV events and their counts of lookups, and records the events."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from sojourn.interop.sources.page import rows_of
from sojourn.interop.sources.translate import Growth, key
from sojourn.interop.sources.view import settings_in
from sojourn.live.kv_lens.document import KvLens, Second
from sojourn.live.kv_lens.of_events import Baseline, Lookups, baseline_of, lens_of_events
from sojourn.live.kv_lens.sockets import EventReader, KvEndpoint
from sojourn.live.watch.fetch import base_of, fetch
from sojourn.live.watch.window import Window
from sojourn.metrics.errors import InputError, RunDataError, ServerError
from sojourn.metrics.machine.host import hardware
from sojourn.metrics.memory.pool_history import BlockHistory
from sojourn.metrics.records import KvEventRecord
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.recorder import Recorder
from sojourn.metrics.run.server_alone import SERVER_ALONE
from sojourn.metrics.version import own_version

SCRAPE_SECONDS = 1.0
DESCRIBE_SECONDS = 10.0  # between two writings of what run.json says of the events
TIMEOUT_S = 5.0
HISTORY_SECONDS = 600
PREFIX_TOKENS = "sojourn_memory_prefix_tokens_total"
HIT, MISS = (key(PREFIX_TOKENS, (("result", result),)) for result in ("hit", "miss"))
UNUSABLE = {"vllm": 1}  # blocks of a pool that hold nothing: vLLM's first one is a placeholder
KV_EVENTS = "kv_events"  # what run.json says of the events


class Counter:
    """What one server's /metrics counts of its lookups, since it was first read."""

    def __init__(self, url: str):
        self.url = base_of(url)
        self.problem = "its /metrics was not read yet"
        self.pool_blocks: int | None = None
        self._window = Window(30.0)

    def read(self) -> None:
        try:
            status, body = fetch(f"{self.url}/metrics", TIMEOUT_S)
            if status != 200:
                raise ServerError(f"{self.url} has no /metrics (HTTP {status}); SGLang needs --enable-metrics")
            self._window.add(time.monotonic_ns(), rows_of(body, time.monotonic_ns(), 0.0))
        except (ServerError, ValueError) as error:
            self.problem = str(error)
            return
        self.problem = ""
        source = self._window.source
        gauges = {each.gauge for each in source.setting_gauges.values()}
        shown = settings_in(source, self._window.readings(self._window.answered[-1].ns, gauges))
        blocks = str(shown.get("num_kv_blocks", "")).partition(".")[0]
        if blocks.isdigit():
            self.pool_blocks = int(blocks) - UNUSABLE.get(source.key, 0)

    def lookups(self, *, since_its_start: bool) -> Lookups | None:
        """None before the second scrape, or where the server does not count lookups."""
        if not self._window.answered or (len(self._window.answered) < 2 and not since_its_start):
            return None
        last = self._window.answered[-1]
        series = last.values if since_its_start else last.gained
        rows = pd.DataFrame(
            [(name, dict(labels), value, self._window.restarts) for (name, labels), value in series.items()],
            columns=["name", "labels", "growth", "resets"],
        )
        totals = Growth(self._window.source, rows).totals()
        if HIT not in totals or MISS not in totals:
            return None
        return Lookups(queried_tokens=totals[HIT] + totals[MISS], hit_tokens=totals[HIT])


class LensSession:
    """Owns the reader, the counters, and the record. `lens()` is what there is to say now."""

    def __init__(self, endpoints: Sequence[KvEndpoint], metrics: Sequence[str] = (), run_dir: Path | None = None):
        """Connects, and makes the run directory. Raises InputError, ServerError and RunDataError."""
        if not endpoints:
            raise InputError("no server is named; give the address of its KV events, such as tcp://127.0.0.1:5557")
        self.endpoints = list(endpoints)
        self._begin = time.monotonic()
        self._recorder: Recorder | None = None
        self._counters = [Counter(url) for url in metrics]
        self._history = BlockHistory()
        self._baseline: dict[tuple[str, str], Baseline] | None = None  # when lookups were first counted
        self._baseline_ns: int | None = None
        self._lock = threading.Lock()
        self._seconds: deque[Second] = deque(maxlen=HISTORY_SECONDS)
        self._reader = EventReader(self.endpoints, self._take)
        self._run = None if run_dir is None else self._create(run_dir)
        if self._run is not None:
            self._recorder = Recorder(self._run.path, (KV_EVENTS,))
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="kv lens", daemon=True)

    def start(self) -> "LensSession":
        self._reader.start()
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the threads, and writes what is left. May be called twice."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(2 * TIMEOUT_S)
        self._reader.stop()
        if self._recorder is not None and self._run is not None:
            self._recorder.close()
            self._describe()
            self._run.compact()

    def seconds(self) -> list[Second]:
        """One entry a second, oldest first."""
        return list(self._seconds)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._begin

    @property
    def messages(self) -> int:
        return sum(each.messages for each in self._reader.sequences.values())

    def lens(self) -> KvLens:
        with self._lock:
            return self._lens()

    def _lens(self) -> KvLens:
        lookups = self._lookups()
        whole = self._is_whole()
        return lens_of_events(
            self._history, " ".join(each.name() for each in self.endpoints), lookups=lookups,
            pool_blocks=self._pool_blocks(), baseline=None if whole else self._baseline, warnings=self._faults(),
        )  # fmt: skip

    def _take(self, events: list[KvEventRecord]) -> None:
        """In the reader's thread."""
        with self._lock:
            self._history.apply(events)
        if self._recorder is not None:
            self._recorder.extend(KV_EVENTS, events)

    def _watch(self) -> None:
        due = describe_due = time.monotonic()
        while not self._stopping.is_set():
            for counter in self._counters:
                counter.read()
            with self._lock:
                self._note()
            if time.monotonic() >= describe_due:
                self._describe()
                describe_due = time.monotonic() + DESCRIBE_SECONDS
            due = max(due + SCRAPE_SECONDS, time.monotonic())
            self._stopping.wait(due - time.monotonic())

    def _note(self) -> None:
        device = [pool for (_, medium), pool in self._history.pools.items() if medium == "GPU"]
        totals = (sum(getattr(pool, name) for pool in device) for name in ("held", "stored", "stored_again", "removed"))
        self._seconds.append(Second(time.monotonic_ns(), *totals))
        asking = any(each.is_asking for each in self._reader.sequences.values())
        if self._baseline is None and self._counters and not asking and not any(c.problem for c in self._counters):
            self._baseline, self._baseline_ns = baseline_of(self._history), time.monotonic_ns()

    def _is_whole(self) -> bool:
        """Whether counts since the start of the servers belong to the same time as the events."""
        return all(each.is_whole and not each.restarts for each in self._reader.sequences.values())

    def _lookups(self) -> Lookups | None:
        found = [each.lookups(since_its_start=self._is_whole()) for each in self._counters]
        if not found or any(each is None for each in found):
            return None
        return Lookups(
            queried_tokens=sum(each.queried_tokens for each in found if each is not None),
            hit_tokens=sum(each.hit_tokens for each in found if each is not None),
        )

    def _pool_blocks(self) -> int | None:
        """None also where one address counts for several ranks, of which it says one size."""
        named = [each.pool_blocks for each in self.endpoints]
        counted = [each.pool_blocks for each in self._counters] if len(self._counters) == len(named) else []
        sizes = next((sizes for sizes in (named, counted) if sizes and all(sizes)), [])
        return sum(size for size in sizes if size) or None

    def _faults(self) -> list[str]:
        found = [self._reader.failed] if self._reader.failed else []
        found += [f"hits are not known: {each.problem}" for each in self._counters if each.problem]
        for name, sequence in self._reader.sequences.items():
            if not sequence.messages and not sequence.malformed:
                if self.elapsed_s > 5:
                    found.append(f"no message came from {name} in {self.elapsed_s:.0f} s: it is idle, its caching is "
                                 "off, this is not its PUB socket, or it publishes under another topic")  # fmt: skip
                continue
            if sequence.begin:
                found.append(f"the first {sequence.begin:,} messages of {name} were before this record began")
            if sequence.malformed:
                found.append(f"{sequence.malformed:,} messages of {name} could not be read: {sequence.last_fault}")
            if sequence.unanswered:
                found.append(f"{name} does not answer for missed messages; is --replay its ROUTER socket?")
            for kind, count in sequence.unknown.most_common(3):
                found.append(f"{count:,} events of {name} are of the unknown type {kind!r}, and were left out")
        if self._recorder is not None and (missed := self._recorder.dropped + self._recorder.failed):
            found.append(f"{missed:,} events are not in the record: {self._recorder.last_error or 'it was too slow'}")
        return found

    def _create(self, path: Path) -> RunDirectory:
        meta = {
            "scenario": {"name": "kv-lens", "description": "whatever clients sent"}, "seed": None, "engine": {},
            "hardware": hardware(), "versions": {"sojourn": own_version()},
            "wall_anchor": self._reader.wall_anchor, "objectives": [], "client_error": None, "valid": False,
            "invalid_reasons": [SERVER_ALONE], KV_EVENTS: self._facts(),
        }  # fmt: skip
        try:
            return RunDirectory.create(path, meta)
        except OSError as error:
            self._reader.stop()
            raise RunDataError(f"{path} cannot be made: {error.strerror}; choose another with --run-dir") from None
        except RunDataError:
            self._reader.stop()
            raise

    def _facts(self) -> dict[str, Any]:
        with self._lock:
            lookups = self._lookups()
            return {
                "endpoints": [each.events for each in self.endpoints],
                "pool_blocks": self._pool_blocks(),
                "lookups": None if lookups is None else msgspec.to_builtins(lookups),
                "baseline_ns": None if self._is_whole() else self._baseline_ns,
                "warnings": self._faults(),
            }

    def _describe(self) -> None:
        """A disk that takes nothing is counted by the recorder."""
        if self._run is not None:
            try:
                self._run.update_meta(**{KV_EVENTS: self._facts()})
            except (OSError, RunDataError):
                return


def lens_once(
    endpoints: Sequence[KvEndpoint], metrics: Sequence[str] = (), seconds: float = 60.0, run_dir: Path | None = None
) -> KvLens:
    """What live servers' events show after so many seconds. Raises InputError, ServerError and RunDataError."""
    session = LensSession(endpoints, metrics, run_dir).start()
    try:
        time.sleep(seconds)
    finally:
        session.stop()
    return session.lens()
