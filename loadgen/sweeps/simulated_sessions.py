"""The most sessions that keep the objectives, by replays of one recorded closed loop: no server, no load."""

import math
from collections.abc import Callable

import msgspec

from sojourn.loadgen.errors import ScenarioError
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.prediction import Change, Prediction
from sojourn.metrics.results.load import is_closed
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.predictor import predictor_of

BOUNDS = ("low", "median", "high")  # of the attainment, within which 8 of 10 outcomes lie


class SimulatedSessions(msgspec.Struct, frozen=True, kw_only=True):
    """The largest numbers of sessions that keep an attainment; None where not even one does."""

    run: str
    attainment: float
    sessions: int | None
    at_least: int | None  # by the low bound of what is expected
    at_most: int | None  # by the high bound
    highest: int  # that was allowed: a result of this is a lower bound
    tried: dict[int, list[float]]  # number → low, median and high attainment
    doubts: list[str]  # of the replay at the result


def simulate_sessions(run: RunDirectory, attainment: float, highest: int, *, processes: int = 1) -> SimulatedSessions:
    """Doubling, then bisection down to one session. Raises ScenarioError for a run that is no closed loop, and
    ReplayError."""
    if not is_closed(run.meta()):
        raise ScenarioError(
            f"{run.name} is an open load, which has no sessions; replay a run of a closed loop, such as the scenario "
            "agents, or search on a server: sojourn capacity agents ADDRESS --sessions"
        )
    predictor = predictor_of(run, processes=processes)
    if not predictor.objectives:
        raise ScenarioError(f"{run.name} has no objectives to judge sessions by; give --slo")
    try:
        predictor.check(Change(sessions=1))
    except ReplayError as error:
        raise ScenarioError(f"{run.name}: {error}") from None
    found: dict[int, Prediction] = {}

    def keeps(sessions: int, bound: str) -> bool:
        if sessions not in found:
            found[sessions] = predictor.predict([Change(sessions=sessions)])[0]
        share = getattr(found[sessions].attainment, bound)
        return not math.isnan(share) and share >= attainment

    most = {bound: _largest(lambda number, bound=bound: keeps(number, bound), highest) for bound in BOUNDS}
    low, median, high = (most[bound] or None for bound in BOUNDS)
    return SimulatedSessions(
        run=run.name, attainment=attainment, sessions=median, at_least=low, at_most=high, highest=highest,
        tried={
            number: list(msgspec.structs.astuple(found[number].attainment)) for number in sorted(found)
        },
        doubts=found[median or min(found)].doubts,
    )  # fmt: skip


def _largest(keeps: Callable[[int], bool], highest: int) -> int:
    """The largest number below the first one that fails, by doubling and bisection; 0 if none is kept."""
    low, high = 0, 1
    while keeps(high):
        low = high
        if high == highest:
            return highest
        high = min(2 * high, highest)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
