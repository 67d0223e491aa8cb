"""Records → a file or a socket, in a thread of its own. The server never waits for it."""

import atexit
import errno
import io
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from sojourn_probe import __version__, process_times
from sojourn_probe.records import FORMAT, LENGTH, MAGIC, SUFFIX, Dropped, Record, Setting, Start

VARIABLE = "SOJOURN_PROBE"  # where the stream goes: a folder, unix:/path or tcp:127.0.0.1:PORT
OBJECTIVES_VARIABLE = "SOJOURN_PROBE_OBJECTIVES"  # such as ttft_ms=500,tpot_ms=50: for a diagnosis of the folder alone
OBJECTIVES = ("ttft_ms", "tpot_ms", "e2e_ms")
CAPACITY = 100_000  # records that may wait for the thread; more are dropped and counted
FLUSH_SECONDS = 0.2
SAMPLE_SECONDS = 1.0  # between two readings of what the process and its machine did
CONNECT_SECONDS = 2.0

log = logging.getLogger("sojourn_probe")
Maker = Callable[[], Sequence[Record]]


class Sink(Protocol):
    def write(self, content: bytes) -> None: ...

    def close(self) -> None: ...


class ProbeError(Exception):
    """The probe cannot do what it was told; the sentence says why."""


class FileSink:
    """A file of its own for each process and start."""

    def __init__(self, folder: Path, role: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{role}-{time.time_ns():020d}-{os.getpid()}{SUFFIX}"
        self._file = self.path.open("xb", buffering=0)

    def write(self, content: bytes) -> None:
        write_all(self._file, content)

    def close(self) -> None:
        self._file.close()


def write_all(file: io.FileIO, content: bytes) -> None:
    """Raises OSError also where the disk took only a part: what followed a torn record could not be read."""
    if file.write(content) != len(content):
        raise OSError(errno.ENOSPC, "the disk took only a part")


class SocketSink:
    """A connection to `sojourn-probe receive` on this host."""

    def __init__(self, address: str):
        family, target = parse_address(address)
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_SECONDS)
        self._socket.connect(target)

    def write(self, content: bytes) -> None:
        self._socket.sendall(content)

    def close(self) -> None:
        self._socket.close()


def parse_address(address: str) -> tuple[int, str | tuple[str, int]]:
    """`unix:/path` or `tcp:127.0.0.1:PORT` as a family and an address. Raises ProbeError."""
    kind, _, place = address.partition(":")
    if kind == "unix" and place:
        return socket.AF_UNIX, place
    host, _, port = place.rpartition(":")
    if kind == "tcp" and host in ("127.0.0.1", "localhost") and port.isdigit() and 0 < int(port) < 65536:
        return socket.AF_INET, ("127.0.0.1", int(port))
    raise ProbeError(f"{VARIABLE} is {address!r}; it should be a folder, unix:/path or tcp:127.0.0.1:PORT")


def sink_of(target: str, role: str) -> Sink:
    """Raises ProbeError and OSError."""
    return SocketSink(target) if target.startswith(("unix:", "tcp:")) else FileSink(Path(target), role)


class Writer:
    """Owns the queue and its thread. `put` never blocks and never raises."""

    def __init__(self, sink: Sink, start: Start, capacity: int = CAPACITY):
        self.dropped = 0
        self._has_workers = start.role == "core"
        self.capacity = capacity
        self._sink: Sink | None = sink
        self._queue: deque[Record | Maker] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._closing = threading.Event()
        self._told = 0
        self._write(MAGIC + self._framed([start]))
        self._thread = threading.Thread(target=self._run, name="sojourn-probe", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def put(self, record: Record | Maker) -> None:
        """A record, or what makes some: it is called in the writing thread."""
        if len(self._queue) < self.capacity and self._sink is not None:
            self._queue.append(record)
        else:
            self.dropped += 1

    def close(self) -> None:
        """Writes the rest. May be called twice."""
        self._closing.set()
        self._thread.join(timeout=5)
        if (sink := self._sink) is not None:
            self._flush()
            sink.close()
            self._sink = None

    def _run(self) -> None:
        due = 0.0
        while not self._closing.wait(FLUSH_SECONDS):
            if (now := time.monotonic()) >= due:
                due = now + SAMPLE_SECONDS
                if (read := process_times.sample(self._has_workers)) is not None:
                    self.put(read)
            self._flush()

    def _flush(self) -> None:
        records = [self._queue.popleft() for _ in range(len(self._queue))]
        if records or self.dropped > self._told:
            content = self._framed(records)
            if self.dropped > self._told:
                self._told = self.dropped
                content += self._framed([Dropped(time.monotonic_ns(), self.dropped)])
            try:
                self._write(content)
            except OSError as error:
                self.dropped += len(records)
                self._sink = None
                log.warning("sojourn-probe switches itself off: its stream takes no more records (%s)", error)

    def _framed(self, records: Sequence[Record | Maker]) -> bytes:
        parts = []
        for record in records:
            try:
                encoded = [self._encoder.encode(each) for each in (record() if callable(record) else (record,))]
            except Exception as error:
                self.dropped += 1
                log.warning("sojourn-probe lost a record that it could not write: %r", error)
                continue
            for content in encoded:
                parts += (LENGTH.pack(len(content)), content)
        return b"".join(parts)

    def _write(self, content: bytes) -> None:
        if self._sink is not None:
            self._sink.write(content)


def boot_id() -> str | None:
    """Which start of which kernel this is: processes that agree share a monotonic clock. None where nobody tells."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def objectives() -> dict[str, Setting]:
    """The bounds in the environment, in ms, as settings; what is no number above 0 is left out."""
    found: dict[str, Setting] = {}
    for part in os.environ.get(OBJECTIVES_VARIABLE, "").split(","):
        name, _, text = part.partition("=")
        if name in OBJECTIVES:
            with suppress(ValueError):
                if 0 < (bound := float(text)) < float("inf"):
                    found[f"objective_{name}"] = bound
    return found


def begin(
    role: str,
    engine: str,
    engine_version: str,
    settings: dict[str, Setting] | None = None,
    shape: dict[str, Setting] | None = None,
    unseen: list[str] | None = None,
) -> Writer | None:
    """The writer of this process; None with a sentence in the log where no stream is possible."""
    target = os.environ.get(VARIABLE, "")
    if not target:
        log.warning("sojourn-probe is off: %s names no folder and no socket", VARIABLE)
        return None
    start = Start(
        FORMAT, role, os.getpid(), boot_id(), time.monotonic_ns(), time.time_ns(), engine, engine_version, __version__,
        (settings or {}) | objectives(), shape or {}, unseen or [],
    )  # fmt: skip
    try:
        return Writer(sink_of(target, role), start)
    except (OSError, ProbeError) as error:
        log.warning("sojourn-probe is off: its stream cannot be opened (%s)", error)
        return None
