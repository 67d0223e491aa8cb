"""An arrival process and a random generator → the moments of all arrivals, before anything is sent. Pure."""

import numpy as np

from loadgen.scenario_arrivals import MAX_REQUESTS
from loadgen.scenario_faults import ScenarioError
from loadgen.traces.reader import find_trace, read_trace
from loadgen.traces.row import TraceRow, Window


def draw_arrivals(arrivals, rng: np.random.Generator) -> tuple[np.ndarray, list[TraceRow | None]]:
    """Seconds from the start of each arrival, and the trace's row that it comes from, if any."""
    if arrivals.process == "trace":
        rows = _trace_slice(arrivals, rng)
        return np.array([(row.offset_s - arrivals.start_s) / arrivals.speedup for row in rows]), rows
    if arrivals.process == "times":
        offsets = np.sort(np.array(arrivals.times_s))
    elif arrivals.process == "at_once":
        offsets = np.zeros(arrivals.count)
    else:
        offsets = _renewal(arrivals, rng)
    return offsets, [None] * len(offsets)


def _renewal(arrivals, rng: np.random.Generator) -> np.ndarray:
    """Arrivals with independent gaps of mean 1/rate. The first one comes after a gap, so that the rate is unbiased."""
    mean = 1 / arrivals.rate_rps
    expected = arrivals.count or arrivals.duration_s * arrivals.rate_rps
    if expected > MAX_REQUESTS:
        raise ScenarioError([f"arrivals ask for about {expected:.0f} requests; at most {MAX_REQUESTS} fit one run"])
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
    if not len(offsets):
        raise ScenarioError(
            [f"arrivals.rate_rps {arrivals.rate_rps:g} gives no request within {arrivals.duration_s:g} s with this "
             "seed; raise the rate or arrivals.duration_s"]
        )  # fmt: skip
    return offsets


def _trace_slice(arrivals, rng: np.random.Generator) -> list[TraceRow]:
    path, end_s = find_trace(arrivals.file), arrivals.start_s + arrivals.duration_s
    window = Window(arrivals.start_s, end_s, seed=int(rng.integers(2**63)))
    found = read_trace(path, arrivals.format, window)
    if not found.timed:
        raise ScenarioError(
            [f"{path.name} is a file of the form {found.form.name} without times, so it is no arrivals.file; name it "
             "in `from_file` of a class, beside arrivals of another process"]
        )  # fmt: skip
    kept = found.rows[:: arrivals.keep_one_in][: arrivals.count]
    if not kept:
        raise ScenarioError(
            [f"arrivals take seconds {arrivals.start_s:g} to {end_s:g} of {path.name}, where it has no request; "
             f"it ends at {found.end_s:.0f} s"]
        )  # fmt: skip
    return kept
