"""How much a scenario sends, before it is sent: requests, tokens and seconds."""

import math
from dataclasses import dataclass

from sojourn.loadgen.scenario.arrivals import ArrivalProcess
from sojourn.loadgen.scenario.open_arrivals import Renewal
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.loadgen.schedule.build import build_schedule

CLEARLY_OTHER = 0.05  # of the asked rate, that a drawn one may differ without a word


@dataclass(frozen=True, slots=True)
class Extent:
    """Upper bounds, where the server decides how many turns come. Warm-up requests are among the `requests`.

    `prompt_tokens` are exact with a tokenizer; later turns of a session send the whole conversation again, and count
    with it. `seconds` are as declared, else from the first arrival to the last; None for a closed loop without a
    duration.
    """

    requests: int
    warmup_requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float | None
    in_flight: int | None  # of a closed loop
    asked_rps: float | None = None  # the mean rate of random arrivals, where each is one request

    def sentences(self) -> tuple[str, str]:
        """`1,110 requests in 60 s (18.5 per second; 2 of them warm-up)`; `about 401,000 prompt tokens, at most …`."""
        details = [] if not self.warmup_requests else [f"{self.warmup_requests} of them warm-up"]
        if self.in_flight is not None:
            details.insert(0, f"{self.in_flight} in flight at a time")
        elif self.seconds:
            drawn_rps = (self.requests - self.warmup_requests) / self.seconds
            details.insert(0, f"{drawn_rps:.3g} per second")
            if self.asked_rps and abs(drawn_rps - self.asked_rps) > CLEARLY_OTHER * self.asked_rps:
                details.insert(1, f"drawn at {self.asked_rps:g} per second, of which about "
                                  f"{self.asked_rps * self.seconds:,.0f} are expected")  # fmt: skip
        within = f" in {_of_time(self.seconds)}" if self.seconds else "" if self.in_flight else " at once"
        most = "at most " if self.in_flight is not None else ""
        about = f" ({'; '.join(details)})" if details else ""
        return (
            f"{most}{self.requests:,} request{'s' if self.requests != 1 else ''}{within}{about}",
            f"about {_of_tokens(self.prompt_tokens)} prompt tokens, at most {_of_tokens(self.output_tokens)} output "
            "tokens",
        )


def extent_of(scenario: Scenario, seed: int) -> Extent:
    """Raises ScenarioError for a scenario of which no schedule can be built."""
    schedule = build_schedule(scenario, seed, id_prefix="extent")
    alone = scenario.workload.each_arrival == "one_class" and all(
        klass.session is None for klass in scenario.workload.classes
    )
    is_random = isinstance(scenario.arrivals, Renewal) and scenario.arrivals.count is None
    loop = scenario.arrivals.closed_loop
    due_s = [each.due_offset_ns / 1e9 for each in schedule if each.due_offset_ns is not None and not each.prelude]
    return Extent(
        requests=len(schedule), warmup_requests=sum(each.prelude for each in schedule),
        prompt_tokens=sum(each.prompt_tokens for each in schedule),
        output_tokens=sum(each.max_tokens for each in schedule),
        seconds=loop.duration_s if loop is not None else _declared_s(scenario.arrivals)
        or max(due_s, default=0.0) - min(due_s, default=0.0),
        in_flight=None if loop is None else loop.slots,
        asked_rps=scenario.arrivals.rate_rps if is_random and alone else None,
    )  # fmt: skip


def _declared_s(arrivals: ArrivalProcess) -> float | None:
    """Of arrivals at a stated rate; the first and the last of n have but n - 1 gaps between them. None for others."""
    if not isinstance(arrivals, Renewal):
        return None
    by_count = math.inf if arrivals.count is None else arrivals.count / arrivals.rate_rps
    return min(by_count, math.inf if arrivals.duration_s is None else arrivals.duration_s)


def _of_time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _of_tokens(tokens: int) -> str:
    """To three digits: a length that is drawn is not worth more."""
    digits = max(0, len(str(tokens)) - 3)
    return f"{round(tokens, -digits):,}"
