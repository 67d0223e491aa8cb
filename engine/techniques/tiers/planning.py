"""KV tiers around the loop: reads that requests wait for, and copies that steps make."""

from typing import Any, Protocol

from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.request.technique import Technique
from sojourn.engine.techniques.tiers.tiers import KVTiers
from sojourn.engine.techniques.tiers.transfers import Prefetch, Transfers
from sojourn.metrics.records import PROMPT_KINDS, StepRecord


class Mover(Protocol):
    """Copies blocks outside of steps; while one is under way it only stores, if it may at all."""

    stores_beside_steps: bool

    def transfer(self, transfers: Transfers) -> tuple[int, int]:
        """Nanoseconds of the loads and of the stores."""
        ...


class TierPlanning(Technique):
    """The part of a plan is `Transfers`: to host memory before the copies of the step, and from there behind them."""

    name = "tiers"

    def __init__(self, tiers: KVTiers, mover: Mover):
        self.tiers = self.lower_tiers = tiers
        self.mover = mover

    def arrived(self, request: Request, message: Any) -> Prefetch | None:
        """Begins to read what slow tiers have of the prefix of a request, or a prefill server."""
        pool = self.scheduler.pool
        num_cached = len(pool.match(request.reusable_hashes(pool.block_size)))
        return self.tiers.prefetch(request, num_cached, None if message is None else message.kv_source)

    def report(self, request: Request) -> dict[str, Any]:
        return {"kv_load": request.parts.get(self.name)}

    def cancelled(self, request: Request) -> None:
        self.tiers.release(request)

    def launching(self, plan: StepPlan) -> None:
        if (transfers := self.tiers.take_transfers()) is not None:
            plan.parts[self.name] = transfers

    def collected(self, plan: StepPlan, outcome: StepOutcome) -> None:
        if (transfers := plan.parts.get(self.name)) is not None:
            self.tiers.transferred(transfers, outcome.load_ns, outcome.store_ns)
        if plan.has_prompts:
            prompt_tokens = sum(item.new_tokens for item in plan.scheduled if item.kind in PROMPT_KINDS)
            transfer_ns = outcome.load_ns + outcome.store_ns
            self.tiers.computed(prompt_tokens, outcome.device_ns - outcome.sampling_ns - transfer_ns)

    def poll(self) -> None:
        self.tiers.poll()

    def rest(self) -> None:
        self.tiers.poll()
        self.transfer()  # nobody waits for the device now

    def transfer(self) -> None:
        """Copies that no step makes."""
        if (transfers := self.tiers.take_transfers()) is not None:
            self.tiers.transferred(transfers, *self.mover.transfer(transfers))

    def record(self, record: StepRecord, plan: StepPlan, outcome: StepOutcome) -> None:
        record.load_ns, record.store_ns = outcome.load_ns, outcome.store_ns
        counts = self.tiers.take_counts()
        record.tier_blocks = {name: tier.blocks for name, tier in counts.items()}
        for name, tier in counts.items():
            for column, amount in (
                (record.tier_loaded_bytes, tier.loaded_bytes),
                (record.tier_stored_bytes, tier.stored_bytes),
                (record.tier_load_ns, tier.load_ns),
                (record.tier_store_ns, tier.store_ns),
                (record.tier_failures, tier.failures),
                (record.tier_refused, tier.refused),
            ):
                if amount:
                    column[name] = amount
            record.leases_ended.update(tier.leases_ended)

    def close(self) -> None:
        self.tiers.close()
