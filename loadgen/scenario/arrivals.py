"""The `arrivals` block: when requests come."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from loadgen.scenario.block import Block, Number, Whole
from loadgen.scenario.durations import Seconds

MAX_REQUESTS = 10_000_000


class _Bounded(Block):
    """Ends by itself: `duration_s` bounds the time, `count` the requests or sessions, whichever comes first."""

    duration_s: Number | None = Field(None, gt=0, le=604_800, description="nothing is begun later")
    count: Whole | None = Field(None, ge=1, le=MAX_REQUESTS)

    @model_validator(mode="after")
    def _bounded(self):
        if self.duration_s is None and self.count is None:
            raise ValueError("needs duration_s or count, or it would never end; add one of the two")
        return self


class _Open(_Bounded):
    """Arrivals from a rate."""

    rate_rps: Number = Field(gt=0, le=1_000_000)


class Poisson(_Open):
    """Independent arrivals: exponential gaps."""

    process: Literal["poisson"]


class Constant(_Open):
    """Equal gaps."""

    process: Literal["constant"]


class Gamma(_Open):
    """Gaps of a chosen coefficient of variation: 1 is Poisson, above is bursty, below is regular."""

    process: Literal["gamma"]
    cv: Number = Field(gt=0, le=100)


class Trace(Block):
    """A slice of recorded traffic: its times, and its lengths where a class asks for them."""

    process: Literal["trace"]
    file: str = Field(min_length=1, description="path, or the name of a file in scenarios/traces")
    format: Literal["auto", "azure", "burstgpt", "mooncake", "bailian", "servegen", "plain"] = Field(
        "auto", description="of the file; by default told by its first line"
    )
    start_s: Number = Field(0.0, ge=0, description="seconds of the trace to skip")
    duration_s: Number = Field(gt=0, description="seconds of the trace to take, before speedup")
    speedup: Number = Field(1.0, gt=0, le=1_000, description="2 replays twice as fast")
    keep_one_in: Whole = Field(1, ge=1, le=1_000_000, description="2 sends every second request of the slice")
    dequantize: bool = Field(False, description="spread times that the trace rounded to a bin, evenly within it")
    count: Whole | None = Field(None, ge=1, le=MAX_REQUESTS)


class AtOnce(Block):
    """All at the same moment."""

    process: Literal["at_once"]
    count: Whole = Field(ge=1, le=MAX_REQUESTS)


class Times(Block):
    """Exactly these moments, in seconds from the start."""

    process: Literal["times"]
    times_s: list[Annotated[Number, Field(ge=0, le=604_800)]] = Field(min_length=1, max_length=MAX_REQUESTS)


class Ramp(Block):
    """A rate that moves from one value to another. `exponential` grows by the same factor in the same time."""

    process: Literal["ramp"]
    start_rps: Number = Field(ge=0, le=1_000_000)
    end_rps: Number = Field(ge=0, le=1_000_000)
    duration_s: Number = Field(gt=0, le=604_800)
    shape: Literal["linear", "exponential"] = "linear"
    gaps: Literal["random", "regular"] = Field("random", description="random: Poisson; regular: none but the rate's")

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


class Silence(Block):
    """A phase in which nothing comes."""

    process: Literal["silence"]
    duration_s: Number = Field(gt=0, le=604_800)


class Phases(Block):
    """Processes one after the other, each for its `duration_s`."""

    process: Literal["phases"]
    phases: list[Annotated[Poisson | Constant | Gamma | Ramp | Silence, Field(discriminator="process")]] = Field(
        min_length=1, max_length=1_000
    )

    @model_validator(mode="after")
    def _timed(self):
        for place, phase in enumerate(self.phases):
            if phase.duration_s is None or getattr(phase, "count", None) is not None:
                raise ValueError(f"phases[{place}] must end by its duration_s; add it, and leave count out")
        if all(phase.process == "silence" for phase in self.phases):
            raise ValueError("phases are all silence; add one in which requests come")
        return self


class Concurrency(_Bounded):
    """Closed loop: `in_flight` requests at any time; the next one is due when one has ended, so who waits for a slow
    server sends less."""

    process: Literal["concurrency"]
    in_flight: Whole = Field(ge=1, le=100_000)


class Users(_Bounded):
    """Closed loop: `users` people, each of whom thinks after an answer (or a session) before the next one."""

    process: Literal["users"]
    users: Whole = Field(ge=1, le=100_000)
    think_time_s: Seconds
    start_over_s: Number = Field(
        0.0, ge=0, le=86_400, description="the users' first requests are spread evenly over it"
    )


Arrivals = Annotated[
    Poisson | Constant | Gamma | Ramp | Phases | Trace | AtOnce | Times | Concurrency | Users,
    Field(discriminator="process"),
]
