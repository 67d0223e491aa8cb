"""What a run's turns took beyond what was expected, drawn again at the same moment of a replay, or in another order.

Another order keeps what follows upon each other: pieces of the run's own time, drawn with replacement (Künsch, "The
Jackknife and the Bootstrap for General Stationary Observations", 1989). So a replay may meet more of the run's slow
times than the run did, or fewer. How much its mean speed differs from the run's then follows from how the speed
wandered within the run: not at all if it was steady, and much if a neighbour came and went.
"""

import random
from bisect import bisect_left, bisect_right

import numpy as np

from sojourn.replay.step_fit import StepRatios, StepTimes

FEWEST_IN_A_STRATUM = 30
LEVEL_STEPS = 21  # in a row, over which the machine's level is taken
LARGEST_RATIO = 2.0  # a step that took longer was stalled: the rest is a time of its own, whatever the step computed
LONGEST_STALL_NS = 5e9  # a longer one is an outage, which no replay repeats
PIECES = 4  # of the run's time: shorter ones would part a spell of a neighbour, and fewer leave no other order


class Noise:
    """Ratios of measured and expected time, device and host of one turn together, and stalls.

    A ratio is a level and what is left of it. The level is that of the run at the same moment: a machine that was slow
    for a part of the run is slow then in the replay, too. What is left comes from steps of like size in their order. A
    stall takes the time that it took in the run, from whatever turn is under way, or from none while the loop sleeps.
    With a `seed` the moment lies in a piece of the run that is drawn: another order of the same accidents.
    """

    def __init__(self, begins_ns: np.ndarray, times: StepTimes | StepRatios) -> None:
        """`begins_ns` from the first step [steps], of the steps that `times` has."""
        device, host = np.minimum(times.device_ratio, LARGEST_RATIO), np.minimum(times.host_ratio, LARGEST_RATIO)
        stalls = (times.device_ratio - device) * times.predicted_ns + (times.host_ratio - host) * times.host_ns
        stalls = np.minimum(stalls, LONGEST_STALL_NS)
        device_level, host_level = _level(device, times.predicted_ns), _level(host, times.host_ns)
        self._begins = begins_ns.tolist()
        self._levels = list(zip(device_level.tolist(), host_level.tolist(), strict=True))
        stalled = np.flatnonzero(stalls > 0)
        self._stalls = list(zip(begins_ns[stalled].tolist(), stalls[stalled].tolist(), strict=True))
        rest = list(zip((device / device_level).tolist(), (host / host_level).tolist(), strict=True))
        sizes = np.floor(np.log2(np.maximum(times.predicted_ns, 1.0))).astype(int)
        self._edges: list[float] = []  # a stratum holds predictions up to its edge
        self._strata: list[tuple[list[float], list[tuple[float, float]]]] = []  # begins; device, host
        members: list[int] = []
        for size in range(int(sizes.min()), int(sizes.max()) + 1):
            members += np.flatnonzero(sizes == size).tolist()
            if len(members) >= FEWEST_IN_A_STRATUM or (size == sizes.max() and members):
                members.sort()
                self._strata.append(([self._begins[i] for i in members], [rest[i] for i in members]))
                self._edges.append(2.0 ** (size + 1))
                members = []
        self._edges[-1] = float("inf")
        self._span_ns = self._begins[-1] + 1.0
        self.restart()

    def restart(self, origin_ns: float = 0.0, seed: int | None = None) -> None:
        """For another replay: its moment 0 is `origin_ns` after the first step. Without a seed in the run's order."""
        self._origin_ns = origin_ns
        self._draws = None if seed is None else random.Random(seed)
        self._piece, self._pieces = 0, [0.0 if self._draws is None else self._draws.uniform(0, self._span_ns)]
        moment = self._before = self._pieces[0]
        self._next = [bisect_right(begins, moment) - 1 for begins, _ in self._strata]
        self._next_stall = bisect_right(self._stalls, (moment,))

    def at(self, now_ns: float, expected_ns: float) -> tuple[float, float, float]:
        """The ratios of the device's time and of the host's, and stalls in ns, of a turn that begins at `now_ns`."""
        stratum = 0
        while expected_ns >= self._edges[stratum]:
            stratum += 1
        _, rest = self._strata[stratum]
        place = self._next[stratum] + 1
        self._next[stratum] = place = 0 if place >= len(rest) else place
        device, host = rest[place]
        moment = self._moment(max(now_ns + self._origin_ns, 0.0))
        device_level, host_level = self._levels[max(0, bisect_right(self._begins, moment) - 1)]
        device *= device_level
        return device, host * host_level, self._stalled_ns(moment, expected_ns * device)

    def _moment(self, now_ns: float) -> float:
        """Of the run, for a moment of the replay."""
        if self._draws is None:
            return now_ns % self._span_ns
        piece_ns = self._span_ns / PIECES
        piece = int(now_ns // piece_ns)
        while len(self._pieces) <= piece:
            self._pieces.append(self._draws.uniform(0, self._span_ns))
        moment = (self._pieces[piece] + now_ns - piece * piece_ns) % self._span_ns
        if piece != self._piece:
            self._piece, self._before = piece, moment
            self._next_stall = bisect_left(self._stalls, (moment,))
        return moment

    def _stalled_ns(self, moment: float, turn_ns: float) -> float:
        if moment < self._before - self._span_ns / 2:  # the run begins again
            self._next_stall = 0
        self._before, total_ns = moment, 0.0
        while self._next_stall < len(self._stalls):
            begin_ns, stall_ns = self._stalls[self._next_stall]
            if begin_ns >= moment + turn_ns:
                break
            self._next_stall += 1
            total_ns += max(0.0, stall_ns - max(0.0, moment - begin_ns))
        return total_ns


def _level(ratios: np.ndarray, expected_ns: np.ndarray) -> np.ndarray:
    """The ratio of the sums of LEVEL_STEPS steps around each, [steps]."""
    half = min(LEVEL_STEPS, len(ratios)) // 2
    expected_ns = np.maximum(expected_ns, 1.0)  # a step may be expected to take nothing
    kernel = np.ones(2 * half + 1)
    measured = np.convolve(np.pad(ratios * expected_ns, half, mode="edge"), kernel, mode="valid")
    return np.maximum(measured / np.convolve(np.pad(expected_ns, half, mode="edge"), kernel, mode="valid"), 1e-9)
