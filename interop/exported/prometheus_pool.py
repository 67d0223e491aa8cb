"""Gauges of the batch, the queue and the KV pool, as of the last step or of what the core said after it."""

from dataclasses import dataclass

from sojourn.interop.exported.prometheus_series import Series
from sojourn.metrics.compute.weight_error import WeightError
from sojourn.metrics.memory.plan import MemoryPlan
from sojourn.metrics.steps import Steps


@dataclass(frozen=True, slots=True)
class Pool:
    """KV blocks by state; together they are the pool."""

    free: int
    active: int = 0
    reusable: int = 0

    @property
    def usage(self) -> float:
        """Share that live requests hold; what is reusable can be evicted."""
        size = self.free + self.active + self.reusable
        return self.active / size if size else 0.0


class PoolGauges:
    """Remembers the last state only; nothing is computed before a scrape."""

    def __init__(self, series: Series):
        self._numbers = series.numbers
        self.running = 0
        self.waiting = 0
        self.pool: Pool | None = None  # unknown until a core reports it
        self.block_size: int | None = None
        self._used = (0, 0)  # slots written, blocks that hold them
        self._adapter_slots = 0

    def observe_steps(self, steps: Steps) -> None:
        """The last of them left this state."""
        self.running, self.waiting = int(steps.sequences[-1]), int(steps["waiting"][-1])
        self.pool = Pool(*(int(steps[f"blocks_{state}"][-1]) for state in ("free", "active", "reusable")))
        self._used = (int(steps["slots_written"][-1]), self.pool.active)
        self._adapter_slots = int(steps["adapter_slots"][-1])

    def observe_state(self, pool: Pool | None, waiting: int = 0, running: int = 0) -> None:
        """Now, whatever the last step left: its record arrives after its tokens, and an idle core makes no steps.

        Without a pool there is no core. What slots hold, only steps tell.
        """
        self.running, self.waiting, self.pool = running, waiting, pool
        if not running:
            self._used, self._adapter_slots = (0, 0), 0

    def observe_plan(self, plan: MemoryPlan) -> None:
        """A core has started."""
        for purpose, size in plan.parts.items():
            self._numbers["sojourn_memory_planned_bytes"][(purpose,)] = size

    def observe_weight_error(self, error: WeightError | None) -> None:
        """Of a core that has started, where it was measured."""
        if error is not None:
            self._numbers["sojourn_compute_weight_error_nats"][()] = error.divergence_nats
            self._numbers["sojourn_compute_weight_greedy_agreement_ratio"][()] = error.greedy_agreement

    def refresh(self) -> None:
        """Brings the series up to date, for a scrape. An unknown value has no sample, which beats a wrong one."""
        self._numbers["sojourn_request_running"][()] = self.running
        self._numbers["sojourn_request_waiting"][()] = self.waiting
        self._numbers["sojourn_memory_adapter_slots_in_use"][()] = self._adapter_slots
        names = ("sojourn_memory_kv_blocks", "sojourn_memory_kv_usage_ratio", "sojourn_memory_slots")
        blocks, usage, slots = (self._numbers[name] for name in names)
        for samples in (blocks, usage, slots):
            samples.clear()
        if self.pool is not None:
            for state in ("active", "reusable", "free"):
                blocks[(state,)] = getattr(self.pool, state)
            usage[()] = self.pool.usage
            if self.block_size is not None:
                written, used_blocks = self._used
                slots[("allocated",)] = used_blocks * self.block_size
                slots[("written",)] = written
