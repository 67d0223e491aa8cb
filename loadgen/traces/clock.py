"""The unit of a trace's timestamps, where its form does not fix one: by the date or the rate that each unit implies."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime

UNITS = {"seconds": 1.0, "milliseconds": 1e-3, "microseconds": 1e-6, "nanoseconds": 1e-9}
EPOCH_S = (946_684_800.0, 4_102_444_800.0)  # the years 2000 to 2100
# Requests per second that a unit implies: below the first of two bounds it is a smaller unit, above the second it is
# this one, and between them both are as likely.
SECONDS, FRACTIONS_OF_SECONDS, SMALLER = (0.05, 1.0), (0.003, 0.03), (0.003, 0.05)


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


def told_unit(seconds_per_unit: float) -> str:
    """`milliseconds`, or `units of 0.02 s`."""
    named = (name for name, second in UNITS.items() if math.isclose(second, seconds_per_unit))
    return next(named, f"units of {seconds_per_unit:g} s")
