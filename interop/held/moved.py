"""A figure that two pieces of evidence have, and whether it changed. Pure."""

import math

import msgspec

CLEAR = 1.2  # a ratio of two means, or its inverse
LEAST = {"share": 0.05, "requests": 1.0}  # that a figure of this unit moves: a line of 0.05 requests is none


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A figure that both have."""

    name: str
    statistic: str
    unit: str
    before: float
    after: float
    definitions: tuple[str, str] | None = None  # whose clock, from where to where; None where both are the same
    bounds: tuple[float, float] | None = None  # of the ratio, 95%; None where neither moments nor requests give one

    @property
    def ratio(self) -> float | None:
        return self.after / self.before if self.before > 0 else None

    @property
    def is_clear(self) -> bool:
        """A change by a fifth that its interval does not leave open."""
        return self.is_large and not self.may_be_chance

    @property
    def may_be_chance(self) -> bool:
        return self.bounds is not None and self.bounds[0] <= 1 <= self.bounds[1]

    @property
    def is_large(self) -> bool:
        if abs(self.after - self.before) < LEAST.get(self.unit, 0.0):
            return False
        if self.before <= 0 or self.after <= 0:
            return max(self.before, self.after) >= LEAST.get(self.unit, 1.0)
        return max(self.after / self.before, self.before / self.after) >= CLEAR

    @property
    def longer(self) -> float | None:
        """Times as many requests, until an interval of this change would leave out 1; None without one."""
        if self.bounds is None or min(self.before, self.after, self.bounds[0]) <= 0 or self.before == self.after:
            return None
        half = math.log(self.bounds[1] / self.bounds[0]) / 2
        return max(1.2, (half / math.log(self.after / self.before)) ** 2)
