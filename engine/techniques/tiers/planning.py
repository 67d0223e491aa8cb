"""KV tiers around the loop: reads that requests wait for, and copies that steps make."""

from typing import Any, Protocol

from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.request.technique import Technique
from sojourn.engine.techniques.tiers.tiers import KVTiers
from sojourn.engine.techniques.tiers.transfers import Prefetch, Transfers
from sojourn.metrics.records import PROMPT_KINDS, StepRecord
from sojourn.metrics.records.step import Tiers


class Mover(Protocol):
    """Copies blocks outside of steps; while one is under way it only stores, if it may at all."""

    stores_beside_steps: bool

    def between_steps(self, name: str, work: Transfers) -> tuple[int, int]:
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
            self.tiers.transferred(transfers, *self.mover.between_steps(self.name, transfers))

    def record(self, record: StepRecord, plan: StepPlan, outcome: StepOutcome) -> None:
        counts = self.tiers.take_counts()

        def by_tier(field: str) -> dict[str, int]:
            return {name: amount for name, tier in counts.items() if (amount := getattr(tier, field))}

        record.tiers = Tiers(
            load_ns=outcome.load_ns,
            store_ns=outcome.store_ns,
            tier_loaded_bytes=by_tier("loaded_bytes"),
            tier_stored_bytes=by_tier("stored_bytes"),
            tier_load_ns=by_tier("load_ns"),
            tier_store_ns=by_tier("store_ns"),
            tier_failures=by_tier("failures"),
            tier_refused=by_tier("refused"),
            tier_blocks={name: tier.blocks for name, tier in counts.items()},
            leases_ended={end: number for tier in counts.values() for end, number in tier.leases_ended.items()},
        )

    def close(self) -> None:
        self.tiers.close()
