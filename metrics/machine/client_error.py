"""The error of our own client, measured against a server of known write times and stored for this machine.

`sojourn calibrate client` measures over a grid of streams at once and tokens per second; a run's own load is looked up
in it. What is compared are stamps of one monotonic clock: when the client says that a chunk came, and when the server
wrote it. Part of the difference is the kernel's way from one to the other, so that the error is an upper bound.

What this cannot tell: the error over a network card, of TLS, or of a machine that was busier during the run.
"""

import math
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich import box
from rich.table import Table

from sojourn.metrics.errors import CalibrationError
from sojourn.metrics.machine.store import store, store_path

DEFAULT_BOUND_MS = 5.0
KINDS = ("stamp", "ttft", "itl")
WORST = "worst"  # of the three: what a bound is held against
# Share of a point's tokens that the server must have written. Below it the server was the limit, not the client.
SMALLEST_DELIVERED = 0.95


class Error(msgspec.Struct, frozen=True):
    """Of one kind of measurement: the mean of what was added to the truth, and the 99th percentile of its size."""

    bias_ms: float
    p99_ms: float


class Point(msgspec.Struct, frozen=True):
    """The client's error with so many streams at once, one token a chunk, all streams in step."""

    streams: int
    tokens_per_s: float  # of each stream
    requests: int
    tokens: int
    wrong_counts: int  # requests that failed, or whose tokens are not those of the server
    delivered: float  # share of the tokens that the server should have written in the time, and did
    stamp: Error  # a chunk's stamp − the server's write of it
    ttft: Error  # the same of first chunks: time to first token from the intended send, less `send`
    itl: Error  # gap between two stamps − gap between the two writes
    send: Error  # sent − due
    server_late_p99_ms: float  # a write − when it was due: how far the server kept its own schedule


class Calibration(msgspec.Struct, frozen=True):
    """What was measured of one machine's client."""

    machine: str
    client: str  # fingerprint of the code and of the libraries that were measured
    measured_at: str  # ISO 8601, UTC
    versions: dict[str, str]
    bound_ms: float  # the p99 error of a stamp, of a TTFT or of an ITL above which figures are not trusted
    points: list[Point]
    company: str | None = None  # what else ran here meanwhile

    def rates(self) -> list[float]:
        """Tokens a second of a stream that were measured, ascending."""
        return sorted(rate for rate in {point.tokens_per_s for point in self.points} if self._sound(rate))

    def curve(self, tokens_per_s: float, kind: str = WORST) -> tuple[np.ndarray, np.ndarray]:
        """(streams, p99 error in ms) of a measured rate, ascending. An error never falls as streams are added: where a
        point with fewer streams was worse, its error counts."""
        points = self._sound(tokens_per_s)
        kinds = KINDS if kind == WORST else (kind,)
        errors = [max(getattr(point, each).p99_ms for each in kinds) for point in points]
        return np.array([point.streams for point in points], dtype=float), np.maximum.accumulate(errors)

    def _sound(self, tokens_per_s: float) -> list[Point]:
        """The points of a rate up to the first that counted wrongly, without those whose limit was the server."""
        points = [point for point in self.points if point.tokens_per_s == tokens_per_s]
        right = takewhile(lambda point: not point.wrong_counts, sorted(points, key=attrgetter("streams")))
        return [point for point in right if point.delivered >= SMALLEST_DELIVERED]

    def capacity(self) -> Point | None:
        """The point with the most tokens a second whose p99 error, and that of all with fewer streams, is in bounds."""
        in_bound = []
        for rate in self.rates():
            streams, errors = self.curve(rate)
            in_bound += [(count * rate, count, rate) for count in streams[errors <= self.bound_ms]]
        if not in_bound:
            return None
        _, count, rate = max(in_bound)
        return next(each for each in self.points if (each.streams, each.tokens_per_s) == (count, rate))

    def error_ms(self, streams: float, chunks_per_s: float, kind: str = WORST) -> float | None:
        """The p99 error at a load of one client process, interpolated; None above what was measured.

        Streams that are faster than the fastest measured ones count as more of them: the work is the chunks'. Slower
        than the slowest, they count as those: all streams in step are as much work at once.
        """
        rates = self.rates()
        if not rates:
            return None
        if chunks_per_s > rates[-1]:
            streams, chunks_per_s = streams * chunks_per_s / rates[-1], rates[-1]
        upper = min((rate for rate in rates if rate >= chunks_per_s), default=rates[-1])
        lower = max((rate for rate in rates if rate <= chunks_per_s), default=rates[0])
        found = []
        for rate in (lower, upper):
            counts, errors = self.curve(rate, kind)
            if streams > counts[-1]:
                return None
            found.append(float(np.interp(streams, counts, errors)))
        weight = (chunks_per_s - lower) / (upper - lower) if upper > lower else 0.0
        return found[0] + weight * (found[1] - found[0])


def store_calibration(calibration: Calibration, path: Path | None = None) -> Path:
    """Writes it, all or nothing; by default where every run looks for it."""
    return store(calibration, path or store_path("client", calibration.machine))


def load_calibration(machine: str, client: str, path: Path | None = None) -> Calibration:
    """The stored calibration of this machine and of this client. Raises CalibrationError with the way out."""
    path = path or store_path("client", machine)
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration)
    except FileNotFoundError:
        raise CalibrationError("not calibrated; run `sojourn calibrate client`") from None
    except (OSError, msgspec.DecodeError) as error:
        raise CalibrationError(
            f"not calibrated: {path} cannot be read ({error}); run `sojourn calibrate client` again"
        ) from None
    if found.client != client:
        raise CalibrationError(
            f"not calibrated: what was measured on {found.measured_at[:10]} is another version of the client; "
            "run `sojourn calibrate client` again"
        )
    return found


def stream_load(first_ns: np.ndarray, last_ns: np.ndarray, num_chunks: np.ndarray) -> tuple[float, float]:
    """(streams at once, chunks a second of each) of replies, by the first and last chunk of each: [num_replies].

    For at least 99% of the time with a stream, no more streams were open. (0, 0) where nothing streamed.
    """
    spans = last_ns - first_ns
    if not len(spans) or not spans.sum() > 0:
        return 0.0, 0.0
    moments = np.concatenate([first_ns, last_ns])
    steps = np.concatenate([np.ones(len(first_ns)), -np.ones(len(last_ns))])
    order = np.argsort(moments, kind="stable")
    at_once = np.cumsum(steps[order])[:-1]
    lasting_ns = np.diff(moments[order]).astype(float)
    lasting_ns[at_once <= 0] = 0.0
    by_count = np.argsort(at_once, kind="stable")
    share = np.cumsum(lasting_ns[by_count]) / lasting_ns.sum()
    streams = at_once[by_count][np.searchsorted(share, 0.99)]
    return float(streams), float((num_chunks - 1).sum() / (spans.sum() / 1e9))


def error_at_load(calibration: Calibration, streams: float, chunks_per_s: float, processes: int = 1) -> dict[str, Any]:
    """What `run.json` keeps below `client_error.calibration`: the load, the errors there, and the measured capacity."""
    each = streams / processes
    capacity = calibration.capacity()
    return {
        "measured_at": calibration.measured_at,
        "company": calibration.company,
        "streams": round(streams, 1),
        "chunks_per_s": round(chunks_per_s, 2),
        "processes": processes,
        **{f"{kind}_p99_ms": _rounded(calibration.error_ms(each, chunks_per_s, kind)) for kind in (*KINDS, WORST)},
        "bound_ms": calibration.bound_ms,
        "capacity_streams": capacity.streams if capacity else 0,
        "capacity_tokens_per_s": capacity.tokens_per_s if capacity else 0.0,
    }


def beyond_capacity(found: dict[str, Any] | None) -> str | None:
    """Why a run's stamps are not trusted, by its `client_error.calibration`; None where they are, or not calibrated."""
    if not found or "unknown" in found:
        return None
    error_ms = found["worst_p99_ms"]
    if error_ms is not None and error_ms <= found["bound_ms"]:
        return None
    reached = "more than was measured" if error_ms is None else f"an error of {error_ms:.1f} ms (p99)"
    return (
        f"the load generator is beyond its capacity: {_load(found)} is {reached}, but it keeps within "
        f"{found['bound_ms']:g} ms up to {found['capacity_streams']} streams of {found['capacity_tokens_per_s']:g} "
        "tokens/s a process (`sojourn calibrate client`); lower the load, or give it more processes"
    )


def client_error_sentence(client_error: dict[str, Any] | None) -> str:
    """What is printed beside the figures of a run. Without a leading capital: it follows a label."""
    found = (client_error or {}).get("calibration")
    if not found:
        return "not calibrated; run `sojourn calibrate client`"
    if "unknown" in found:
        return found["unknown"]
    if found["worst_p99_ms"] is None:
        sentence = f"not known: {_load(found)} is above what was calibrated"
    else:
        kinds = f"TTFT ±{_ms(found['ttft_p99_ms'])}, ITL ±{_ms(found['itl_p99_ms'])}"
        sentence = f"±{_ms(found['worst_p99_ms'])} ms (p99) at this load, {_load(found)}; {kinds}"
    return sentence + (f"; calibrated beside other work: {found['company']}" if found["company"] else "")


def calibration_table(calibration: Calibration) -> Table:
    """For a terminal: one line a point, and the capacity."""
    capacity = calibration.capacity()
    if capacity is None:
        caption = f"no point stayed within {calibration.bound_ms:g} ms: this machine is too busy, or too slow"
    else:
        caption = (
            f"capacity of one process: {capacity.streams} streams of {capacity.tokens_per_s:g} tokens/s "
            f"within {calibration.bound_ms:g} ms (p99)"
        )
    if any(point.delivered < SMALLEST_DELIVERED for point in calibration.points):
        caption += "\n* not counted: the server itself was the limit"
    table = Table(
        title=f"{calibration.machine}: error of the client, ms", caption=caption, box=box.SIMPLE, title_justify="left",
        caption_justify="left",
    )  # fmt: skip
    heads = ("streams", "tok/s\neach", "stamp\nmean", "stamp\np99", "TTFT\np99", "ITL\np99", "sent\nlate",
             "wrong\ncounts", "server\nlate")  # fmt: skip
    for head in heads:
        table.add_column(head, justify="right")
    for point in calibration.points:
        errors = (point.stamp.bias_ms, *(each.p99_ms for each in (point.stamp, point.ttft, point.itl, point.send)))
        late = f"{point.server_late_p99_ms:.2f}{'' if point.delivered >= SMALLEST_DELIVERED else '*'}"
        cells = (*(f"{error:.2f}" for error in errors), str(point.wrong_counts), late)
        table.add_row(str(point.streams), f"{point.tokens_per_s:g}", *cells)
    return table


def _load(found: dict[str, Any]) -> str:
    processes = f" over {found['processes']} processes" if found["processes"] > 1 else ""
    return f"{found['streams']:.0f} streams of {found['chunks_per_s']:.0f} chunks/s{processes}"


def _ms(value: float) -> str:
    return f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)
