"""An arrival process and a random generator → the moments of all arrivals, before anything is sent. Pure."""

import numpy as np

from loadgen.scenario.arrivals import MAX_REQUESTS
from loadgen.scenario.faults import ScenarioError
from loadgen.seeds import stable_seed
from loadgen.traces.reader import TraceSlice, find_trace, read_trace
from loadgen.traces.rounding import FEWEST_BINS, Bins
from loadgen.traces.row import TraceRow, Window


def arrivals_rng(seed: int) -> np.random.Generator:
    """What the arrivals of a run with this seed are drawn from."""
    return np.random.default_rng(stable_seed(seed, "arrivals"))


def draw_arrivals(arrivals, rng: np.random.Generator) -> tuple[np.ndarray, list[TraceRow | None]]:
    """Seconds from the start of each arrival, and the trace's row that it comes from, if any."""
    if arrivals.process == "trace":
        found = recorded_slice(arrivals, rng)
        rows = _trace_rows(arrivals, found)
        times_s = np.array([row.offset_s for row in rows])
        if arrivals.dequantize:
            times_s = np.maximum(_dequantized(times_s, found.bins, arrivals.file, rng), arrivals.start_s)
        return (times_s - arrivals.start_s) / arrivals.speedup, rows
    if arrivals.process == "times":
        offsets = np.sort(np.array(arrivals.times_s))
    elif arrivals.process == "at_once":
        offsets = np.zeros(arrivals.count)
    elif arrivals.process == "phases":
        offsets = _phases(arrivals.phases, rng)
    else:
        offsets = _offsets(arrivals, rng)
    if not len(offsets):
        raise ScenarioError(
            [f"arrivals of the process {arrivals.process} give no request with this seed; raise the rate, or "
             "arrivals.duration_s"]
        )  # fmt: skip
    return offsets, [None] * len(offsets)


def _offsets(process, rng: np.random.Generator) -> np.ndarray:
    """One process by itself, from 0 on; it may give nothing."""
    if process.process == "silence":
        return np.empty(0)
    return _ramp(process, rng) if process.process == "ramp" else _renewal(process, rng)


def _phases(phases, rng: np.random.Generator) -> np.ndarray:
    """One process after the other. Each has a generator of its own, so that changing one leaves the others alone."""
    begins_s = np.concatenate([[0.0], np.cumsum([phase.duration_s for phase in phases])])
    parts = [_offsets(phase, own) + begin_s
             for phase, own, begin_s in zip(phases, rng.spawn(len(phases)), begins_s, strict=False)]  # fmt: skip
    offsets = np.concatenate(parts)
    _check_number(len(offsets))
    return offsets


def _ramp(ramp, rng: np.random.Generator) -> np.ndarray:
    """A Poisson process whose rate moves, by inversion: points of a unit process, taken back through the cumulated
    rate (Cinlar, Introduction to Stochastic Processes, 1975, 4.7). With regular gaps the points are 1, 2, 3, ..."""
    start, end, seconds = ramp.start_rps, ramp.end_rps, ramp.duration_s
    if ramp.shape == "linear":
        total = (start + end) / 2 * seconds
    else:
        growth = np.log(end / start)
        total = start * seconds * (np.expm1(growth) / growth if growth else 1.0)
    _check_number(total)
    if ramp.gaps == "regular":
        points = np.arange(1, np.ceil(total))
    else:
        points = np.sort(rng.uniform(0.0, total, rng.poisson(total)))
    if ramp.shape == "linear":
        slope = (end - start) / seconds
        return 2 * points / (start + np.sqrt(np.maximum(start**2 + 2 * slope * points, 0.0)))
    return points / start if not growth else seconds / growth * np.log1p(points * growth / (start * seconds))


def _check_number(expected: float) -> None:
    if expected > MAX_REQUESTS:
        raise ScenarioError([f"arrivals ask for about {expected:.0f} requests; at most {MAX_REQUESTS} fit one run"])


def _renewal(arrivals, rng: np.random.Generator) -> np.ndarray:
    """Arrivals with independent gaps of mean 1/rate. The first one comes after a gap, so that the rate is unbiased."""
    mean = 1 / arrivals.rate_rps
    expected = arrivals.count or arrivals.duration_s * arrivals.rate_rps
    _check_number(expected)
    cv = {"poisson": 1.0, "constant": 0.0}.get(arrivals.process, getattr(arrivals, "cv", 1.0))
    offsets = np.empty(0)
    while (arrivals.count is None or len(offsets) < arrivals.count) and (
        arrivals.duration_s is None or not len(offsets) or offsets[-1] < arrivals.duration_s
    ):
        size = max(16, int(expected * 1.2))
        gaps = np.full(size, mean) if cv == 0 else rng.gamma(1 / cv**2, mean * cv**2, size)
        offsets = np.concatenate([offsets, np.cumsum(gaps) + (offsets[-1] if len(offsets) else 0.0)])
    offsets = offsets[: arrivals.count]
    if arrivals.duration_s is not None:
        offsets = offsets[offsets < arrivals.duration_s]
    return offsets


def recorded_slice(arrivals, rng: np.random.Generator) -> TraceSlice:
    """What `arrivals` take of their trace; some forms draw their rows, and do so from `rng`'s first number."""
    window = Window(arrivals.start_s, arrivals.start_s + arrivals.duration_s, seed=int(rng.integers(2**63)))
    return read_trace(find_trace(arrivals.file), arrivals.format, window)


def _trace_rows(arrivals, found: TraceSlice) -> list[TraceRow]:
    if not found.timed:
        raise ScenarioError(
            [f"{found.path.name} is a file of the form {found.form.name} without times, so it is no arrivals.file; "
             "name it in `from_file` of a class, beside arrivals of another process"]
        )  # fmt: skip
    kept = found.rows[:: arrivals.keep_one_in][: arrivals.count]
    if not kept:
        raise ScenarioError(
            [f"arrivals take seconds {arrivals.start_s:,.10g} to {arrivals.start_s + arrivals.duration_s:,.10g} of "
             f"{found.path.name}, where it has no request; "
             f"it ends at {found.end_s:.0f} s"]
        )  # fmt: skip
    return kept


def _dequantized(times_s: np.ndarray, bins: Bins, file: str, rng: np.random.Generator) -> np.ndarray:
    """Times spread evenly at random within their bin, from its begin on; their order stays."""
    if bins.width_s is None:
        why = f"lie in fewer than {FEWEST_BINS} bins, too few to tell" if bins.too_few else "are not rounded to any bin"
        raise ScenarioError([f"arrivals.dequantize is true, but the times of {file} {why}; leave it out"])
    return np.sort(bins.begins_s(times_s) + rng.uniform(0.0, bins.width_s, len(times_s)))
