"""The `arrivals` block: when requests come. PROCESSES registers all arrival processes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol, Union

import numpy as np
from pydantic import Field

from sojourn.loadgen.scenario.distributions import Number, Seconds, Whole
from sojourn.loadgen.scenario.open_arrivals import OPEN_PROCESSES, Bounded
from sojourn.loadgen.traces.row import TraceRow


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of slots, each of which sends its next request or session after the end of its last one.

    A slot first waits `think_time_s` (None: no time). Nothing is sent `duration_s` after the start or later.
    """

    slots: int
    duration_s: float | None
    think_time_s: Seconds | None = None
    start_over_s: float = 0.0  # the first requests of the slots are spread evenly over this time
    description: str = ""  # for the reader of a report


class ArrivalProcess(Protocol):
    """What an arrival process offers. It is a block of the scenario: its fields are what a file may say."""

    process: str  # its name in a scenario file
    rate_changes: ClassVar[bool]  # whether the rate is meant to change during the run
    closed_loop: ClosedLoop | None  # None for an open process

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, Sequence[TraceRow | None]]:
        """Of an open process: seconds from the start of each arrival, ascending, and the recorded request that the
        arrival replays, if any. Only `rng` may be random. Raises ScenarioError."""
        ...


class Concurrency(Bounded):
    """Closed loop: `in_flight` requests at any time. The next one is due when one has ended, so a slow server is sent
    fewer."""

    rate_changes: ClassVar[bool] = False
    process: Literal["concurrency"]
    in_flight: Whole = Field(ge=1, le=100_000, description="requests at any time")

    @property
    def closed_loop(self) -> ClosedLoop:
        return ClosedLoop(self.in_flight, self.duration_s, description=f"{self.in_flight} in flight at any time")


class Users(Bounded):
    """Closed loop: `users` people. Each thinks after an answer, or after a session, before the next request."""

    rate_changes: ClassVar[bool] = False
    process: Literal["users"]
    users: Whole = Field(ge=1, le=100_000, description="each has at most one request in flight")
    think_time_s: Seconds = Field(description="from the end of an answer, or of a session, to the next")
    start_over_s: Number = Field(0.0, ge=0, le=86_400, description="their first requests are spread evenly over it")

    @property
    def closed_loop(self) -> ClosedLoop:
        described = f"{self.users} users, who think between requests or sessions"
        return ClosedLoop(self.users, self.duration_s, self.think_time_s, self.start_over_s, described)


PROCESSES: tuple[type[ArrivalProcess], ...] = (*OPEN_PROCESSES, Concurrency, Users)
Arrivals = Annotated[Union[PROCESSES], Field(discriminator="process")]  # noqa: UP007 - made of a tuple


def process_name(process: type[ArrivalProcess]) -> str:
    return process.model_fields["process"].annotation.__args__[0]


CLOSED_PROCESSES = {process_name(each) for each in PROCESSES if each.closed_loop is not None}
PROCESSES_WITH_RATE = [process_name(each) for each in PROCESSES if "rate_rps" in each.model_fields]
