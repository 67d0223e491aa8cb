"""What share of the device's time was whose, and the energy for it.

A request's ledger books each step whole, as each member waits for all of it. A bill needs the shares. The device time
of a step is divided by the FLOPs of its members' own tokens: linear layers, and attention to what they see. So the
shares of all members sum to the device's time, and a batch is charged once.
"""

from collections.abc import Iterable

import numpy as np

from sojourn.metrics.compute.cost_model import ModelShape, pairs_and_reads, saved_flops
from sojourn.metrics.machine.power import SENSORS, joules_between
from sojourn.metrics.records import StepRecord, SystemRecord

NS_PER_SECOND = 1e9


class DeviceShares:
    """Owns the device nanoseconds of the sequences that are counted. Others, such as those that ended, get nothing."""

    def __init__(self) -> None:
        self.shape: ModelShape | None = None  # of the model that is loaded; until then tokens stand for FLOPs
        self._ns: dict[str, float] = {}

    def count(self, sequence_ids: Iterable[str]) -> None:
        """From now on."""
        self._ns |= dict.fromkeys(sequence_ids, 0.0)

    def take(self, sequence_ids: Iterable[str]) -> float:
        """The nanoseconds of these together, which are not counted any more."""
        return sum(self._ns.pop(sequence_id, 0.0) for sequence_id in sequence_ids)

    def add(self, step: StepRecord) -> None:
        counted = [place for place, sequence in enumerate(step.request_ids) if sequence in self._ns]
        if not counted:
            return
        weights = self._weights(step)
        each_ns = step.device_ns / max(weights.sum(), 1)
        for place in counted:
            self._ns[step.request_ids[place]] += float(weights[place]) * each_ns

    def _weights(self, step: StepRecord) -> np.ndarray:
        """FLOPs of each member."""
        new = np.array(step.new_tokens, np.int64)
        if self.shape is None:
            return new
        past = np.array(step.past_tokens, np.int64)
        pairs, _ = pairs_and_reads(self.shape, new, past)
        attention = pairs * self.shape.pair_flops - saved_flops(self.shape, new, past)
        return new * self.shape.linear_flops_per_token + attention


class PowerMeter:
    """Owns the energy of all sensors since the start. A device second is charged at its mean power."""

    def __init__(self) -> None:
        self._last: SystemRecord | None = None
        self._joules = self._seconds = 0.0  # over the stretches that have a sensor

    def add(self, sample: SystemRecord) -> None:
        if self._last is not None:
            known = [joules_between(self._last, sample, device) for device in SENSORS]
            if any(joules is not None for joules in known):
                self._joules += sum(joules for joules in known if joules is not None)
                self._seconds += (sample.ns - self._last.ns) / NS_PER_SECOND
        self._last = sample

    @property
    def reading(self) -> tuple[float, float]:
        """Joules and seconds so far."""
        return self._joules, self._seconds

    def watts_since(self, reading: tuple[float, float]) -> float | None:
        """The mean power since a reading; of the last sample where there is none since. None without a sensor."""
        joules, seconds = self._joules - reading[0], self._seconds - reading[1]
        if seconds > 0:
            return joules / seconds
        watts = [getattr(self._last, column) for column in SENSORS.values()] if self._last is not None else []
        known = [power for power in watts if power is not None]
        return sum(known) if known else None
