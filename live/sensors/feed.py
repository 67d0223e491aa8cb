"""What sources of sensors show while a run goes on: sampled in the background, on the clock of the run's records."""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pandas as pd
import psutil
import pyarrow as pa

from sojourn.live.sensors.source import HOST, WORDS, Asked, Source, asked, open_source
from sojourn.live.watch.fetch import base_of
from sojourn.metrics.errors import InputError, ServerError
from sojourn.metrics.run.segments import write_segment

INTERVAL_S = 1.0
FLUSH_S = 5.0  # a killed run loses so much
LATE_S = 10.0  # that the rows of a file may come behind those of a page
END_S = 6.0  # that a page may take
COLUMNS = ("ns", "device", "name", "value")
Rows = Sequence[dict[str, Any]]  # of the table `sensors`
REMOTE = (
    "--sensors {0} reads this machine, and {1} is another one; run this command there, or give the URL of its DCGM "
    "exporter"
)
NOTHING = "--sensors {}: it showed no reading in this run"
NO_DEVICE = "--sensors {}: it shows no device {}; it has {}"


class SensorFeed:
    """Owns a thread for each source. `ns` is of the monotonic clock of this host."""

    def __init__(self, sources: Sequence[str], servers: Sequence[str] = (), interval_s: float = INTERVAL_S):
        """`servers`: addresses that the sensors stand beside. Raises InputError, with what to give instead, for a
        source that does not exist, or that cannot be of the servers' machine."""
        self.asked = [asked(each) for each in dict.fromkeys(sources)]
        for each in self.asked:
            remote = next((url for url in servers if each.name in WORDS and not is_here(url)), None)
            if remote is not None:
                raise InputError(REMOTE.format(each.name, remote))
        self._sources: list[Source] = []
        self._problems: dict[str, str] = {}  # text of a source → why it shows nothing
        self._interval_s, self._stopping, self._lock = interval_s, threading.Event(), threading.Lock()
        self._kept: deque[dict[str, Any]] = deque()
        self._takers: list[Callable[[Rows], None]] = []
        self.keep_s = 0.0  # of `table`
        self._begin_ns = time.monotonic_ns()
        try:
            for each in self.asked:
                self._sources.append(open_source(each))
        except InputError:
            self._close()
            raise
        self._threads: list[threading.Thread] = []

    def narrow(self, visible: str) -> None:
        """To the devices that CUDA_VISIBLE_DEVICES of the server names by number, of sources that name none. Call it
        before the start."""
        numbers = frozenset(each.strip() for each in visible.split(","))
        if all(each.isdigit() for each in numbers):
            self.asked = [each if each.devices else each._replace(devices=numbers) for each in self.asked]

    def start(self) -> "SensorFeed":
        for wanted, source in zip(self.asked, self._sources, strict=True):
            thread = threading.Thread(
                target=self._run, args=(wanted, source), name=f"sensors {wanted.name}", daemon=True
            )
            thread.start()
            self._threads.append(thread)
        return self

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(END_S)
        self._close()

    def subscribe(self, take: Callable[[Rows], None]) -> None:
        """`take` gets all rows from now on, in the threads of the sources."""
        self._takers.append(take)

    def unsubscribe(self, take: Callable[[Rows], None]) -> None:
        self._takers.remove(take)

    def table(self, begin_ns: int, end_ns: int) -> pd.DataFrame:
        """The table `sensors` of a stretch of the last `keep_s` seconds."""
        with self._lock:
            near = list(takewhile(lambda each: each["ns"] >= begin_ns - LATE_S * 1e9, reversed(self._kept)))
        rows = [each for each in near if begin_ns <= each["ns"] <= end_ns]
        return pd.DataFrame(rows, columns=list(COLUMNS)).sort_values("ns", kind="stable")

    @property
    def problems(self) -> list[str]:
        """Sentences: which sources show nothing, and why."""
        return [each for each in self._problems.values() if each]

    def stated(self) -> dict[str, Any]:
        """What run.json says of it."""
        named = all(each.devices or each.name == HOST for each in self.asked)
        return {"sensors": {"sources": [each.text for each in self.asked], "devices_named": named}}

    @property
    def are_all(self) -> bool:
        """Whether which devices are the server's is not known."""
        return not self.stated()["sensors"]["devices_named"]

    def _close(self) -> None:
        for each in self._sources:
            each.close()

    def _run(self, wanted: Asked, source: Source) -> None:
        due, seen = time.monotonic(), False
        self._problems[wanted.text] = NOTHING.format(wanted.text)
        while not self._stopping.is_set():
            try:
                found = source.read()
                shift_ns = time.monotonic_ns() - time.time_ns()
                rows = [each for each in found.rows(time.monotonic_ns(), shift_ns) if each["ns"] >= self._begin_ns]
                shown = [each for each in rows if wanted.wants(each["device"])]
                if rows and not shown:
                    has = ", ".join(sorted({each["device"] for each in rows}))
                    self._problems[wanted.text] = NO_DEVICE.format(wanted.name, ", ".join(sorted(wanted.devices)), has)
                elif shown or seen:
                    self._problems[wanted.text], seen = "", True
                self._keep(shown)
            except (ServerError, InputError) as error:
                self._problems[wanted.text] = str(error)
            due = max(due + self._interval_s, time.monotonic())
            self._stopping.wait(due - time.monotonic())

    def _keep(self, rows: Rows) -> None:
        if not rows:
            return
        with self._lock:
            self._kept.extend(rows)
            while self._kept and self._kept[0]["ns"] < self._kept[-1]["ns"] - (self.keep_s + LATE_S) * 1e9:
                self._kept.popleft()
        for take in list(self._takers):
            take(rows)


class SensorWriter:
    """Writes rows into the run of a folder, as they come."""

    def __init__(self, path: Path, *, is_wall_clock: bool = False):
        """`is_wall_clock`: the run's moments are ns since 1970."""
        self._path, self._lock, self._is_wall_clock = path, threading.Lock(), is_wall_clock
        self._rows: list[dict[str, Any]] = []
        self._flushed_s = time.monotonic()
        self.problem = ""  # why the last rows could not be written; they are lost

    def add(self, rows: Rows) -> None:
        """By the monotonic clock."""
        ahead_ns = time.time_ns() - time.monotonic_ns() if self._is_wall_clock else 0
        with self._lock:
            self._rows += [row | {"ns": row["ns"] + ahead_ns} for row in rows] if ahead_ns else rows
            if time.monotonic() - self._flushed_s >= FLUSH_S:
                self._flush()

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        rows, self._rows, self._flushed_s = self._rows, [], time.monotonic()
        if not rows:
            return
        try:
            write_segment(self._path, "sensors", rows, f"{time.time_ns():020d}-{os.getpid()}")
            self.problem = ""
        except (OSError, pa.ArrowException) as error:
            self.problem = f"sensors cannot be written to {self._path}: {error}"


@contextmanager
def running(feed: SensorFeed | None) -> Iterator[None]:
    """Starts and ends a feed, if there is one."""
    if feed is not None:
        feed.start()
    try:
        yield
    finally:
        if feed is not None:
            feed.stop()


@contextmanager
def writing_into(path: Path, feed: SensorFeed | None) -> Iterator[None]:
    """Writes what a feed shows meanwhile into the run of a folder."""
    if feed is None:
        yield
        return
    writer = SensorWriter(path)
    feed.subscribe(writer.add)
    try:
        yield
    finally:
        feed.unsubscribe(writer.add)
        writer.flush()


def is_here(url: str) -> bool:
    """Whether an address is one of this machine's own."""
    host = urlsplit(base_of(url)).hostname or ""
    own = {each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found}
    with suppress(OSError):
        return any(str(each[4][0]).partition("%")[0] in own for each in socket.getaddrinfo(host, None))
    return False
