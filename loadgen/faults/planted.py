"""Faults of the client and of the machine, as the `around` block of a case names them. Each is a child process."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from sojourn.loadgen.scenario.distributions import Block, Number, Whole


class Timed(Block):
    """From `from_s` until `until_s`, in seconds after the first request was sent; without an end until the last."""

    from_s: Number = Field(0, ge=0, le=86_400)
    until_s: Number | None = Field(None, gt=0, le=86_400)

    @model_validator(mode="after")
    def _begins_before_its_end(self):
        if self.until_s is not None and self.until_s <= self.from_s:
            raise ValueError(f"has until_s {self.until_s:g}, which is not after from_s {self.from_s:g}; raise it")
        return self


class NoisyNeighbour(Timed):
    """Other processes on the machine compute, or move memory."""

    fault: Literal["noisy_neighbour"]
    processes: Whole = Field(1, ge=1, le=1024)
    work: Literal["cpu", "memory"] = "cpu"
    duty: Number = Field(1.0, gt=0, le=1, description="share of the time in which they work")


class Pauses(Timed):
    """A process stands still for `pause_ms`, again and again."""

    pause_ms: Number = Field(gt=0, le=60_000)
    every_ms: Number = Field(gt=0, le=600_000)

    @model_validator(mode="after")
    def _runs_at_times(self):
        if self.pause_ms >= self.every_ms:
            raise ValueError(f"pauses for {self.pause_ms:g} of every {self.every_ms:g} ms; raise every_ms")
        return self


class StarvedLoadGenerator(Pauses):
    """The load generator stands still, again and again."""

    fault: Literal["starved_load_generator"]


class StarvedRouter(Pauses):
    """The router of a fleet stands still, again and again: requests wait in front of it, and answers behind it."""

    fault: Literal["starved_router"]


class SlowRouter(Block):
    """The router of a fleet takes so long to choose a server. What the servers answer passes at once."""

    fault: Literal["slow_router"]
    ms: Number = Field(gt=0, le=60_000)


class Network(Block):
    """A network between client and server: a delay each way, its jitter, and its bandwidth towards the client.

    With `share` below 1 only so many connections have it. A small `kib_per_s` is a slow reader: the server's writes
    wait as soon as the buffers between are full.
    """

    fault: Literal["network"]
    delay_ms: Number = Field(0, ge=0, le=60_000)
    jitter_ms: Number = Field(0, ge=0, le=60_000, description="each piece waits for up to so much longer")
    kib_per_s: Number | None = Field(None, gt=0, le=10_000_000, description="that a connection carries")
    share: Number = Field(1.0, gt=0, le=1)

    @model_validator(mode="after")
    def _changes_something(self):
        if not self.delay_ms and not self.jitter_ms and self.kib_per_s is None:
            raise ValueError("changes nothing; give delay_ms, jitter_ms or kib_per_s")
        return self


OF_A_ROUTER = (StarvedRouter, SlowRouter)
SurroundingFault = Annotated[
    NoisyNeighbour | StarvedLoadGenerator | StarvedRouter | SlowRouter | Network, Field(discriminator="fault")
]
