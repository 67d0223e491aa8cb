"""The unit of a trace's timestamps, where its form does not fix one: by the date or the rate that each unit implies."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np

from sojourn.loadgen.errors import ScenarioError

UNITS = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}
EPOCH_S = (946_684_800.0, 4_102_444_800.0)  # the years 2000 to 2100
# Requests per second that a unit implies: below the first of two bounds it is a smaller unit, above the second it is
# this one, and between them both are as likely.
SECONDS, FRACTIONS_OF_SECONDS, SMALLER = (0.05, 1.0), (0.003, 0.03), (0.003, 0.05)
# A change of the unit: a leap of the time by this factor, or a fall; more of them than MOST_PLACES have no order. The
# times that are looked at on each side, the fewest gaps there, and of how many gaps the time may leap ahead.
LEAP, MOST_PLACES, AROUND, FEWEST_GAPS, AHEAD = 10.0, 50, 200, 12, 50.0
NEAR = math.log10(2.5)  # how far the gaps may be from a power of a thousand


class UnknownUnit(ValueError):
    """Its text says what each unit would imply."""


def seconds_of(stamp: float | str) -> float:
    """A number as it is; of an ISO 8601 time the seconds since 1970, without a zone as UTC. Raises ValueError."""
    if not isinstance(stamp, str):
        return stamp
    when = datetime.fromisoformat(stamp)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def unit_of(stamps: Sequence[float], has_hashes: bool) -> str:
    """The name of the unit. `has_hashes`: the rows have ids of blocks, as Mooncake's, which is in whole milliseconds.

    Raises UnknownUnit where two units are as likely.
    """
    low, high = min(stamps), max(stamps)
    for name, second in UNITS.items():
        if EPOCH_S[0] <= low * second and high * second <= EPOCH_S[1]:
            return name
    if high <= low:
        return "milliseconds"  # it does not matter: all come at once
    rate = (len(stamps) - 1) / (high - low)  # as seconds
    is_whole = all(float(stamp).is_integer() for stamp in stamps)
    first = FRACTIONS_OF_SECONDS if not is_whole else (SECONDS[1],) * 2 if has_hashes else SECONDS
    names = list(UNITS)
    for name, smaller, bounds in zip(names, names[1:], (first, SMALLER, SMALLER), strict=False):
        implied = rate / UNITS[name]
        if implied > bounds[1]:
            return name
        if implied >= bounds[0]:
            raise UnknownUnit(
                f"{len(stamps):,} requests lie within {high - low:g} units of their timestamps: in {name} that is "
                f"{implied:.3g} requests per second, in {smaller} {implied * 1e3:.3g}"
            )
    return names[-1]


def refuse_another_unit(name: str, stamps: Sequence[float]) -> None:
    """Raises ScenarioError where the times of a file, in its order, count in another unit from a request on."""
    if (change := change_of_unit(stamps)) is not None:
        place, factor = change
        size = f"{1 / factor:,.0f} times as long" if factor < 1 else f"a {factor:,.0f}th of it"
        raise ScenarioError(
            f"{name}: its times change their unit part-way. From request {place + 1:,} on ({stamps[place]:.16g}, after "
            f"{stamps[place - 1]:.16g}) a unit is {size}; write them in one unit, or set seconds_per_unit if they are"
        )


def change_of_unit(stamps: Sequence[float]) -> tuple[int, float] | None:
    """The place of the first time in another unit, and how many of those units are one of the old; None where nothing
    says so.

    The gaps change there by a power of a thousand, by all their quartiles. The time goes on where it was, in the new
    unit, or begins anew. Behind a mere pause the gaps stay as they were. Times that are all dates have one unit.
    """
    times = np.asarray(stamps, dtype="float64")
    if not len(times) or (times.min() >= EPOCH_S[0] and times.max() <= EPOCH_S[1]):
        return None
    later, earlier = times[1:], times[:-1]
    places = np.flatnonzero((later < earlier) | ((later >= LEAP * earlier) & (earlier > 0))) + 1
    if len(places) > MOST_PLACES:  # a file that is not in order
        return None
    for place in places.tolist():
        before, after = (_gaps(part) for part in (times[:place][-AROUND:], times[place:][:AROUND]))
        if before is None or after is None:
            continue
        sizes = np.log10(after / before)
        powers = np.round(sizes / 3)
        if (np.abs(sizes - 3 * powers) > NEAR).any():
            continue
        factor = 10.0 ** (3 * powers[0])
        goes_on = abs(times[place] / factor - times[place - 1]) <= AHEAD * before[1]
        if powers[0] and (powers == powers[0]).all() and (goes_on or times[place] < times[place - 1]):
            return place, factor
    return None


def _gaps(times: np.ndarray) -> np.ndarray | None:
    """Their quartiles; None where there are too few."""
    gaps = np.abs(np.diff(times))
    gaps = gaps[gaps > 0]
    return np.quantile(gaps, (0.25, 0.5, 0.75)) if len(gaps) >= FEWEST_GAPS else None


def told_unit(seconds_per_unit: float) -> str:
    """`milliseconds`, or `units of 0.02 s`."""
    named = (name for name, second in UNITS.items() if math.isclose(second, seconds_per_unit))
    return next(named, f"units of {seconds_per_unit:g} s")
