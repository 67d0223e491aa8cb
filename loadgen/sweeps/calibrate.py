"""Measures our own client by load: real runs of it, each against a reference server in a process of its own."""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from sojourn.loadgen.record.parse import read_records
from sojourn.loadgen.reference_server.accuracy import client_fingerprint, compare
from sojourn.loadgen.reference_server.instructions import ReferenceLog, ReplyTiming
from sojourn.loadgen.run.experiment import load_url
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.target.endpoint import Endpoint, get, parse_base_url
from sojourn.loadgen.target.processes import free_port, start, stop, wait_ready
from sojourn.metrics.compute.roofline import device_name
from sojourn.metrics.machine.client_error import DEFAULT_BOUND_MS, Calibration, Point
from sojourn.metrics.machine.host import company, versions

GRID = [(streams, rate) for rate in (20.0, 50.0) for streams in (1, 16, 64, 128, 256, 512)]
QUICK_GRID = [(streams, 50.0) for streams in (16, 128, 512)]
STREAM_S = 3.0  # how long one reply streams: after it, as many streams are open as the point asks for
WINDOW_S, QUICK_WINDOW_S = 5.0, 3.0
TTFT_S = 0.1
# Fewest tokens for a p99: the early-stopping rule of MLPerf LoadGen at 99% confidence.
FEWEST_TOKENS = 662


def calibrate(
    grid: list[tuple[int, float]], window_s: float, bound_ms: float = DEFAULT_BOUND_MS,
    progress: Callable[[int, int, float], None] = lambda *_: None,
) -> Calibration:  # fmt: skip
    """Measures every point of the grid, (streams, tokens a second of each). Raises CalibrationError, ExperimentError.

    `progress` gets the number of finished points, and the point that starts.
    """
    busy, points = company(), []
    for done, (streams, tokens_per_s) in enumerate(grid):
        progress(done, streams, tokens_per_s)
        points.append(measure_point(streams, tokens_per_s, window_s))
    return Calibration(
        machine=device_name(), client=client_fingerprint(), measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions(), bound_ms=bound_ms, points=points, company=busy,
    )  # fmt: skip


def measure_point(streams: int, tokens_per_s: float, window_s: float, stream_s: float = STREAM_S) -> Point:
    """One run of the real client at one load. Only writes while all streams are open are compared."""
    window_s = max(window_s, FEWEST_TOKENS / (streams * tokens_per_s))
    scenario = open_streams(streams, tokens_per_s, window_s, stream_s, TTFT_S)
    timing = ReplyTiming(ttft_s=TTFT_S, token_s=1 / tokens_per_s, in_step=True)
    folder = Path(tempfile.mkdtemp(prefix="sojourn-calibrate-"))
    try:
        with reference_server(timing, folder / "server.log") as endpoint:
            load_url(scenario, endpoint.url, folder / "run")
            log = reference_log(endpoint)
        records = read_records(folder / "run")
    finally:
        shutil.rmtree(folder)
    begin_ns = min(record.due_ns for record in records) + round((TTFT_S + stream_s) * 1e9)
    window_ns = (begin_ns, begin_ns + round(window_s * 1e9))
    return compare(records, log.requests, window_ns, streams, tokens_per_s)


@contextmanager
def reference_server(timing: ReplyTiming, log: Path) -> Iterator[Endpoint]:
    """A reference server in a process of its own, ready. Raises ExperimentError if it does not start."""
    endpoint = parse_base_url(f"http://127.0.0.1:{free_port()}")
    fields = json.dumps(msgspec.to_builtins(timing))
    words = (fields, "--port", str(endpoint.port))
    server = start([sys.executable, "-m", "sojourn.loadgen.reference_server.server", *words], log)
    try:
        wait_ready(server, endpoint, log)
        yield endpoint
    finally:
        stop(server)


def reference_log(endpoint: Endpoint) -> ReferenceLog:
    return msgspec.json.decode(get(endpoint, "/log", timeout_s=60.0)[1], type=ReferenceLog)


def open_streams(streams: int, tokens_per_s: float, window_s: float, stream_s: float, ttft_s: float) -> Scenario:
    """Requests at a constant rate, each streaming for `stream_s`: as many are open as start in that time."""
    duration_s = stream_s / streams + ttft_s + stream_s + window_s  # the first one begins after a gap
    return Scenario(
        name=f"calibrate-{streams}x{tokens_per_s:g}",
        description="the client against a reference server",
        arrivals={"process": "constant", "rate_rps": streams / stream_s, "duration_s": duration_s},
        workload={
            "classes": [{"klass": "stream", "prompt_tokens": 32, "output_tokens": round(stream_s * tokens_per_s)}]
        },
        objectives=[{"e2e_ms": 1000 * (ttft_s + 2 * stream_s), "source": "none: the server's times are known"}],
    )  # fmt: skip
