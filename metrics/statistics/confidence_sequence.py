"""An interval for a share that stays valid however often it is looked at, so that a run may stop once it is resolved.

A confidence sequence by betting (Waudby-Smith & Ramdas, "Estimating means of bounded random variables by betting",
JRSS B 2024, hedged capital): for each candidate share a gambler bets against it; a candidate against which he has won
2 / (1 − level) times his stake is excluded, for good. By Ville's inequality the true share is excluded with a chance of
at most 1 − level, at any time.

Requests of one run are not independent: they queue behind each other. So a bet is placed on the mean of a block of
consecutive requests, several autocorrelation times of their latencies long (`effective_samples`); the length is set
from the blocks before it. What it cannot see: dependence that lasts longer than what was sent so far, and a load or a
server that changes later.
"""

import math
from collections.abc import Sequence

import numpy as np

from sojourn.metrics.statistics.dependent_samples import effective_samples, growing

GRID = 1001  # candidates from 0 to 1
BOLDEST = 0.9  # of the stake that would be lost at worst, in one bet
FIRST_REQUESTS = 50  # before the first block: dependence cannot be told from fewer
BLOCK_TIMES = 4.0  # length of a block, in requests that say as much as one independent request
LOOK_GROWTH = 1.1  # the length of a block is looked at again when there are so many times as many requests


class ConfidenceSequence:
    """The interval of the mean of observations in [0, 1] whose mean, given all before, is one number."""

    def __init__(self, level: float = 0.95):
        self._reach = math.log(2 / (1 - level))
        self._candidates = np.linspace(0.0, 1.0, GRID)
        self._log_up = np.zeros(GRID)  # capital of who bets that the mean is larger than the candidate
        self._log_down = np.zeros(GRID)
        self._number, self._sum, self._squares = 0, 0.5, 0.25  # with one observation of 1/2 made up
        self.low, self.high = 0.0, 1.0

    def add(self, value: float) -> None:
        """One observation. Raises ValueError outside [0, 1]."""
        if not 0 <= value <= 1:
            raise ValueError(f"{value} is no share; observations lie between 0 and 1")
        self._number += 1
        number = self._number
        variance = self._squares / number  # of those before: a bet knows nothing of what it is placed on
        bet = math.sqrt(2 * self._reach / (variance * number * math.log(number + 1)))
        with np.errstate(divide="ignore"):
            up = np.minimum(bet, BOLDEST / self._candidates)
            down = np.minimum(bet, BOLDEST / (1 - self._candidates))
        self._log_up += np.log1p(up * (value - self._candidates))
        self._log_down += np.log1p(-down * (value - self._candidates))
        self._sum += value
        self._squares += (value - self._sum / (number + 1)) ** 2
        # Above the mean only the gambler who bets on less can win, so each bound needs one of the two.
        won_up, won_down = self._log_up >= self._reach, self._log_down >= self._reach
        if won_up.any():
            self.low = max(self.low, float(self._candidates[np.flatnonzero(won_up)[-1]]))
        if won_down.any():
            self.high = min(self.high, float(self._candidates[np.flatnonzero(won_down)[0]]))


class SequentialShare:
    """The confidence sequence of the share of good requests, which come in the order in which they were due."""

    def __init__(self, level: float = 0.95):
        self._level = level
        self._sequence = ConfidenceSequence(level)
        self._good: list[bool] = []
        self._latencies: list[float] = []
        self._next_look = FIRST_REQUESTS
        self._begin = 0  # of the block that fills
        self.block_length = 0

    def add(self, good: Sequence[bool], latencies: Sequence[float]) -> None:
        """Further requests. The latency of a failed one is infinite."""
        self._good.extend(good)
        self._latencies.extend(latencies)
        if len(self._good) >= self._next_look:
            self._next_look = math.ceil(LOOK_GROWTH * len(self._good))
            length = block_length(self._latencies)
            if length > self.block_length:  # all bets again, on longer blocks
                self.block_length, self._begin, self._sequence = length, 0, ConfidenceSequence(self._level)
        while self.block_length and len(self._good) >= (end := self._begin + self.block_length):
            self._sequence.add(float(np.mean(self._good[self._begin : end])))
            self._begin = end

    @property
    def num_requests(self) -> int:
        return len(self._good)

    @property
    def share(self) -> float:
        return sum(self._good) / len(self._good) if self._good else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        return self._sequence.low, self._sequence.high

    @property
    def growing(self) -> bool:
        """Whether latencies still grow: what is not sent yet would be worse."""
        return growing(self._latencies)


def block_length(latencies: Sequence[float]) -> int:
    """Requests in a block: BLOCK_TIMES as many as say as much as one independent request."""
    return math.ceil(BLOCK_TIMES * len(latencies) / effective_samples(latencies))
