"""Gauges of the batch, the queue and the KV pool, as of the last step or of the moment when the engine fell idle."""

from dataclasses import dataclass

from metrics.records import StepRecord
from metrics.series import Series


@dataclass(frozen=True, slots=True)
class Pool:
    """KV blocks by state; together they are the pool."""

    free: int
    active: int
    reusable: int
    pinned: int

    @property
    def usage(self) -> float:
        """Share that live requests hold; what is reusable can be evicted."""
        size = self.free + self.active + self.reusable + self.pinned
        return (self.active + self.pinned) / size if size else 0.0


class PoolGauges:
    """Remembers the last state only; nothing is computed before a scrape."""

    def __init__(self, series: Series):
        self._running = series.numbers["sojourn_request_running"]
        self._waiting = series.numbers["sojourn_request_waiting"]
        self._blocks = series.numbers["sojourn_memory_kv_blocks"]
        self._slots = series.numbers["sojourn_memory_slots"]
        self._usage = series.numbers["sojourn_memory_kv_usage_ratio"]
        self._step: StepRecord | None = None
        self.running = 0
        self.waiting = 0
        self.pool: Pool | None = None  # unknown until a core tells of it
        self.block_size: int | None = None
        self._slots_written = 0

    def observe_step(self, step: StepRecord) -> None:
        self._step = step

    def observe_idle(self, pool: Pool | None, waiting: int = 0, running: int = 0) -> None:
        """No step tells; without a pool there is no core either."""
        self._step, self.running, self.waiting, self.pool, self._slots_written = None, running, waiting, pool, 0

    def settle(self) -> None:
        """Brings the series up to date, for a scrape. No value is better than a wrong one: what is unknown is out."""
        if self._step is not None:
            step = self._step
            self.running, self.waiting = len(step.request_ids), step.waiting
            self._slots_written = step.slots_written
            self.pool = Pool(step.blocks_free, step.blocks_active, step.blocks_reusable, step.blocks_pinned)
        self._running[()], self._waiting[()] = self.running, self.waiting
        self._blocks.clear()
        self._usage.clear()
        self._slots.clear()
        if self.pool is not None:
            for state in ("active", "pinned", "reusable", "free"):
                self._blocks[(state,)] = getattr(self.pool, state)
            self._usage[()] = self.pool.usage
            if self.block_size is not None:
                self._slots[("allocated",)] = (self.pool.active + self.pool.pinned) * self.block_size
                self._slots[("written",)] = self._slots_written
