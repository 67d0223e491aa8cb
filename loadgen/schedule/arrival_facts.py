"""What `run.json` says of when requests came: which kind of loop, and how exact a trace's times are."""

from typing import Any, Literal

from loadgen.scenario.scenario import Scenario
from loadgen.schedule.closed_loop import closed_loop

Loop = Literal["open", "closed", "open, closed within a session"]


def arrival_facts(scenario: Scenario, quantised_into_s: float | None) -> dict[str, Any]:
    """`loop`, `quantised_into_s` and `told`: what a reader has to know, in sentences. The bin is that of the trace."""
    loop, told = loop_kind(scenario), []
    if loop == "closed":
        told.append(
            f"closed loop: {_slots(scenario.arrivals)}. A request is due when its turn has come, so a slow server is "
            "asked less; do not read these latencies as those of an open load"
        )
    elif loop != "open":
        told.append(
            "sessions begin as an open load; within one, a turn is due when the answer before it has ended and the "
            "pause is over, so a slow server is asked for later turns later"
        )
    if scenario.arrivals.process in ("ramp", "phases"):
        told.append(
            "the rate was meant to change during the run: figures over all of it mix several loads, and its arrivals "
            "look burstier than those of any moment; read them over time"
        )
    if quantised_into_s is not None:
        spread = scenario.arrivals.dequantize
        told.append(
            f"the times of {scenario.arrivals.file} are rounded to bins of {quantised_into_s:g} s; "
            + ("they are spread evenly within them" if spread
               else "all requests of a bin come at once: arrivals.dequantize: true spreads them")
        )  # fmt: skip
    return {"loop": loop, "quantised_into_s": quantised_into_s, "told": told}


def loop_kind(scenario: Scenario) -> Loop:
    if closed_loop(scenario.arrivals) is not None:
        return "closed"
    has_sessions = any(klass.session is not None for klass in scenario.workload.classes)
    return "open, closed within a session" if has_sessions else "open"


def _slots(arrivals) -> str:
    if arrivals.process == "concurrency":
        return f"{arrivals.in_flight} in flight at any time"
    return f"{arrivals.users} users, who think between requests or sessions"
