"""Open arrival processes: the time of every arrival is fixed before anything is sent, however slow the server is."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.distributions import Block, Number, Whole
from sojourn.loadgen.traces.reader import TraceSlice, find_trace, read_trace
from sojourn.loadgen.traces.rounding import FEWEST_BINS, Bins
from sojourn.loadgen.traces.row import TraceRow, Window

MAX_REQUESTS = 10_000_000


def refuse_too_many(num_expected: float) -> None:
    """Raises ScenarioError before so many arrivals are drawn that no run can hold them."""
    if num_expected > MAX_REQUESTS:
        raise ScenarioError(f"arrivals ask for about {num_expected:.0f} requests; at most {MAX_REQUESTS} fit one run")


class OpenProcess(Block):
    """What all open processes share. A process implements `offsets_s`."""

    closed_loop: ClassVar[None] = None
    rate_changes: ClassVar[bool] = False  # whether the rate is meant to change during the run

    def offsets_s(self, rng: np.random.Generator) -> np.ndarray:
        """[num_arrivals] seconds from the start of the schedule, ascending; empty where nothing arrives."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, Sequence[TraceRow | None]]:
        """The offsets, and for each arrival the recorded request that it replays, if any. Raises ScenarioError."""
        offsets_s = self.offsets_s(rng)
        if not len(offsets_s):
            raise ScenarioError(
                f"arrivals of the process {self.process} give no request with this seed; raise the rate, or "
                "arrivals.duration_s"
            )
        return offsets_s, [None] * len(offsets_s)


class Bounded(Block):
    """Ends by itself: `duration_s` bounds the time, `count` the requests or sessions, whichever comes first."""

    duration_s: Number | None = Field(None, gt=0, le=604_800, description="nothing starts later")
    count: Whole | None = Field(None, ge=1, le=MAX_REQUESTS, description="no more requests, or sessions, than this")

    @model_validator(mode="after")
    def _bounded(self):
        if self.duration_s is None and self.count is None:
            raise ValueError("needs duration_s or count, or it would never end; add one of the two")
        return self


class Renewal(Bounded, OpenProcess):
    """Independent gaps of mean 1/rate. The first arrival comes after a gap, so that the rate is unbiased."""

    rate_rps: Number = Field(gt=0, le=1_000_000, description="mean rate")

    def offsets_s(self, rng: np.random.Generator) -> np.ndarray:
        mean_s = 1 / self.rate_rps
        expected = self.count or self.duration_s * self.rate_rps
        refuse_too_many(expected)
        offsets = np.empty(0)
        while (self.count is None or len(offsets) < self.count) and (
            self.duration_s is None or not len(offsets) or offsets[-1] < self.duration_s
        ):
            gaps = self._gaps_s(mean_s, max(16, int(expected * 1.2)), rng)
            offsets = np.concatenate([offsets, np.cumsum(gaps) + (offsets[-1] if len(offsets) else 0.0)])
        offsets = offsets[: self.count]
        return offsets if self.duration_s is None else offsets[offsets < self.duration_s]

    def _gaps_s(self, mean_s: float, size: int, rng: np.random.Generator) -> np.ndarray:
        return rng.gamma(1 / self.cv**2, mean_s * self.cv**2, size)


class Poisson(Renewal):
    """Independent arrivals: exponential gaps."""

    process: Literal["poisson"]
    cv: ClassVar[float] = 1.0


class Constant(Renewal):
    """Equal gaps."""

    process: Literal["constant"]

    def _gaps_s(self, mean_s: float, size: int, rng: np.random.Generator) -> np.ndarray:
        return np.full(size, mean_s)


class Gamma(Renewal):
    """Gaps of a chosen coefficient of variation: 1 is Poisson, above is bursty, below is regular."""

    process: Literal["gamma"]
    cv: Number = Field(gt=0, le=100, description="standard deviation of the gaps over their mean; 1 is Poisson")


class Ramp(OpenProcess):
    """A rate that moves from one value to another. `exponential` grows by the same factor in the same time."""

    rate_changes: ClassVar[bool] = True
    process: Literal["ramp"]
    start_rps: Number = Field(ge=0, le=1_000_000, description="rate at the beginning; above 0 if `exponential`")
    end_rps: Number = Field(ge=0, le=1_000_000, description="rate at the end; above 0 if `exponential`")
    duration_s: Number = Field(gt=0, le=604_800, description="from the first rate to the last")
    shape: Literal["linear", "exponential"] = Field("linear", description="how the rate moves")
    gaps: Literal["random", "regular"] = Field(
        "random", description="a Poisson process of that rate, or arrivals as even as it allows"
    )

    @model_validator(mode="after")
    def _moves(self):
        if self.start_rps == self.end_rps == 0:
            raise ValueError("has start_rps 0 and end_rps 0, so nothing would come; raise one of them")
        if self.shape == "exponential" and not (self.start_rps and self.end_rps):
            raise ValueError(
                f"has shape exponential from {self.start_rps:g} to {self.end_rps:g}, but nothing grows from or to 0 by "
                "a factor; raise it, or set shape to linear"
            )
        return self

    def offsets_s(self, rng: np.random.Generator) -> np.ndarray:
        """By inversion: points of a unit process, mapped through the inverse of the cumulated rate (Cinlar,
        Introduction to Stochastic Processes, 1975, 4.7). With regular gaps the points are 1, 2, 3, ..."""
        start, end, seconds = self.start_rps, self.end_rps, self.duration_s
        growth = np.log(end / start) if self.shape == "exponential" else 0.0
        total = start * seconds * (np.expm1(growth) / growth) if growth else (start + end) / 2 * seconds
        refuse_too_many(total)
        if self.gaps == "regular":
            points = np.arange(1, np.ceil(total))
        else:
            points = np.sort(rng.uniform(0.0, total, rng.poisson(total)))
        if growth:
            return seconds / growth * np.log1p(points * growth / (start * seconds))
        slope = (end - start) / seconds
        return 2 * points / (start + np.sqrt(np.maximum(start**2 + 2 * slope * points, 0.0)))


class Silence(OpenProcess):
    """A phase without arrivals."""

    process: Literal["silence"]
    duration_s: Number = Field(gt=0, le=604_800, description="time without arrivals")

    def offsets_s(self, rng: np.random.Generator) -> np.ndarray:
        return np.empty(0)


class Phases(OpenProcess):
    """Processes one after the other, each for its `duration_s`."""

    rate_changes: ClassVar[bool] = True
    process: Literal["phases"]
    phases: list[Annotated[Poisson | Constant | Gamma | Ramp | Silence, Field(discriminator="process")]] = Field(
        min_length=1, max_length=1_000, description="`silence`, or another process with a `duration_s` and no `count`"
    )

    @model_validator(mode="after")
    def _timed(self):
        for place, phase in enumerate(self.phases):
            if phase.duration_s is None or getattr(phase, "count", None) is not None:
                raise ValueError(f"phases[{place}] must end by its duration_s; add it, and leave count out")
        if all(phase.process == "silence" for phase in self.phases):
            raise ValueError("phases are all silence; add one in which requests come")
        return self

    def offsets_s(self, rng: np.random.Generator) -> np.ndarray:
        """Each phase has a generator of its own, so that a change of one leaves the others alone."""
        starts_s = np.cumsum([0.0, *(phase.duration_s for phase in self.phases[:-1])])
        generators = rng.spawn(len(self.phases))
        offsets = np.concatenate([
            phase.offsets_s(own) + start_s
            for phase, own, start_s in zip(self.phases, generators, starts_s, strict=True)
        ])  # fmt: skip
        refuse_too_many(len(offsets))
        return offsets


class AtOnce(OpenProcess):
    """All at the same moment."""

    process: Literal["at_once"]
    count: Whole = Field(ge=1, le=MAX_REQUESTS, description="all at the same moment")

    def offsets_s(self, rng: np.random.Generator) -> np.ndarray:
        return np.zeros(self.count)


class Times(OpenProcess):
    """Exactly these moments, in seconds from the start."""

    process: Literal["times"]
    times_s: list[Annotated[Number, Field(ge=0, le=604_800)]] = Field(
        min_length=1, max_length=MAX_REQUESTS, description="exactly these moments from the start"
    )

    def offsets_s(self, rng: np.random.Generator) -> np.ndarray:
        return np.sort(np.array(self.times_s))


class Trace(OpenProcess):
    """A slice of recorded traffic: its times, and its lengths where a class asks for them."""

    process: Literal["trace"]
    file: str = Field(min_length=1, description="path, or the name of a file in `scenarios/traces`")
    format: Literal["auto", "azure", "burstgpt", "mooncake", "bailian", "servegen", "plain"] = Field(
        "auto", description="detected from the file's first line, unless set"
    )
    start_s: Number = Field(0.0, ge=0, description="of the trace to skip, from its first request")
    duration_s: Number = Field(gt=0, description="of the trace to take, before `speedup`")
    speedup: Number = Field(1.0, gt=0, le=1_000, description="2 replays twice as fast")
    keep_one_in: Whole = Field(1, ge=1, le=1_000_000, description="2 sends every second request of the slice")
    dequantize: bool = Field(False, description="spread rounded times evenly within their bin")
    count: Whole | None = Field(None, ge=1, le=MAX_REQUESTS, description="no more arrivals than this")
    seconds_per_unit: Number | None = Field(
        None,
        gt=0,
        le=1_000_000,
        description="of the timestamps of a `mooncake` file (0.001: milliseconds); by default their rate implies it",
    )
    hash_tokens: Whole | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="that one hash id of a `mooncake` file stands for; by default inferred from the lengths",
    )

    def recorded(self, rng: np.random.Generator) -> TraceSlice:
        """The slice of the trace. A form without single requests draws them, with a seed from `rng`'s first number."""
        return read_trace(find_trace(self.file), self.format, self.window(int(rng.integers(2**63))))

    def window(self, seed: int = 0) -> Window:
        end_s = self.start_s + self.duration_s
        return Window(self.start_s, end_s, seed, self.seconds_per_unit, self.hash_tokens)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, Sequence[TraceRow | None]]:
        found = self.recorded(rng)
        rows = self._rows(found)
        times_s = np.array([row.offset_s for row in rows])
        if self.dequantize:
            times_s = np.maximum(self._dequantized(times_s, found.bins, rng), self.start_s)
        return (times_s - self.start_s) / self.speedup, rows

    def _rows(self, found: TraceSlice) -> list[TraceRow]:
        if not found.timed:
            raise ScenarioError(
                f"{found.path.name} is a file of the form {found.form.name} without times, so it is no arrivals.file; "
                "name it in `from_file` of a class, beside arrivals of another process"
            )
        rows = found.rows[:: self.keep_one_in][: self.count]
        if not rows:
            raise ScenarioError(
                f"arrivals take seconds {self.start_s:,.10g} to {self.start_s + self.duration_s:,.10g} of "
                f"{found.path.name}, where it has no request; it ends at {found.end_s:.0f} s"
            )
        return rows

    def _dequantized(self, times_s: np.ndarray, bins: Bins, rng: np.random.Generator) -> np.ndarray:
        """Times at random within their bin, uniform from its start on; their order stays."""
        if bins.width_s is None:
            why = (f"lie in fewer than {FEWEST_BINS} bins, too few to tell" if bins.too_few
                   else "are not rounded to any bin")  # fmt: skip
            raise ScenarioError(f"arrivals.dequantize is true, but the times of {self.file} {why}; leave it out")
        return np.sort(bins.begins_s(times_s) + rng.uniform(0.0, bins.width_s, len(times_s)))


OPEN_PROCESSES = (Poisson, Constant, Gamma, Ramp, Phases, Trace, AtOnce, Times)
