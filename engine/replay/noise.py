"""What a run's turns took beyond what was expected, drawn again at the same moment of a replay."""

from bisect import bisect_right

import numpy as np

from engine.replay.step_fit import StepColumns, StepTimes

FEWEST_IN_A_STRATUM = 30
WINDOW_NS = 250e6  # long against a step, short against a disturbance that one would see in a run
LARGEST_RATIO = 2.0  # a step that took longer was stalled: the rest is a time of its own, whatever the step computed
LONGEST_STALL_NS = 5e9  # a longer one is an outage, which no replay repeats


class Noise:
    """Ratios of measured and expected time, device and host of one turn together, and stalls, by the size of the step.

    A replay takes the ratios of steps of like size in their order, and finds its place again where it is more than
    WINDOW_NS from its own moment: a machine that was slow for a part of the run is slow then in the replay, too.
    `shift_ns` moves the moment: another order of the same accidents.
    """

    def __init__(self, steps: StepColumns, times: StepTimes) -> None:
        device, host = np.minimum(times.device_ratio, LARGEST_RATIO), np.minimum(times.host_ratio, LARGEST_RATIO)
        stalls = (times.device_ratio - device) * times.predicted_ns + (times.host_ratio - host) * times.host_ns
        stalls = np.minimum(stalls, LONGEST_STALL_NS)
        sizes = np.floor(np.log2(np.maximum(times.predicted_ns, 1.0))).astype(int)
        self._edges: list[float] = []  # a stratum holds predictions up to its edge
        # begins, device, host, stalls
        self._strata: list[tuple[list[float], list[float], list[float], list[float]]] = []
        members: list[int] = []
        for size in range(int(sizes.min()), int(sizes.max()) + 1):
            members += np.flatnonzero(sizes == size).tolist()
            is_last = size == sizes.max()
            if len(members) >= FEWEST_IN_A_STRATUM or (is_last and members):
                chosen = np.sort(members)
                columns = (steps.begin_ns, device, host, stalls)
                self._strata.append(tuple(column[chosen].tolist() for column in columns))
                self._edges.append(2.0 ** (size + 1))
                members = []
        self._edges[-1] = float("inf")
        self._span_ns = float(steps.begin_ns[-1]) + 1.0
        self.restart()

    def restart(self, shift_ns: float = 0.0) -> None:
        """For another replay: its moment 0 is `shift_ns` after the first step."""
        self._shift_ns = shift_ns
        self._next = [0] * len(self._strata)

    def at(self, now_ns: float, expected_ns: float) -> tuple[float, float, float]:
        """The ratios of the device's time and of the host's, and a stall in ns, of a turn that begins at `now_ns`."""
        stratum = 0
        while expected_ns >= self._edges[stratum]:
            stratum += 1
        begins, device, host, stalls = self._strata[stratum]
        place = self._next[stratum]
        moment = (now_ns + self._shift_ns) % self._span_ns
        if place >= len(begins) or not -WINDOW_NS < begins[place] - moment < WINDOW_NS:
            place = max(0, bisect_right(begins, moment) - 1)
        self._next[stratum] = place + 1
        return device[place], host[place], stalls[place]
