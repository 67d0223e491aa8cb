"""Host memory below the device, as a runner calls it."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from sojourn.engine.compute.kv_cache import parts
from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.runner.batch import Batch
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.runner.stream import Task
from sojourn.engine.runner.technique import ComputingTechnique, Reserved
from sojourn.engine.settings.tiers import STAGING_GIB
from sojourn.engine.techniques.tiers.host_slots import HostSlots, slot_sizes
from sojourn.engine.techniques.tiers.transfers import Transfers
from sojourn.metrics.errors import ModelError
from sojourn.metrics.memory.plan import GIB, shown_bytes

Moves = Sequence[tuple[int, int]]


class HostTier(ComputingTechnique):
    """Moves the blocks of a step. A part of a batch are its Transfers.

    A plan may give up a block that it copies, and load another one into it: stores come before the copies of a step,
    and loads behind them. The plan never copies what it loads.
    """

    name: ClassVar[str] = "tiers"

    def __init__(self, config: EngineConfig):
        self._config = config
        self.slots: HostSlots | None = None  # until something says how many

    def reserve(self, model: PlacedModel) -> Reserved:
        return Reserved(tier_bytes=host_tier_bytes(self._config) if model.device.type == "cpu" else 0)

    def allocate(self, runner: Any) -> None:
        self._cache = runner.eager.kv_cache

    def agree(self, least: Callable[[int], int]) -> None:
        """Each rank has slots for its part of a block, and all have as many. Raises ModelError."""
        room = num_blocks("kv_host_gib", host_tier_bytes(self._config), sum(slot_sizes(parts(self._cache))))
        self.slots = HostSlots(self._cache, least(room))

    def prepare(self, plan: StepPlan, batch: Batch) -> None:
        if (transfers := plan.parts.get(self.name)) is not None:
            self._note(batch, transfers)

    def before_copies(self, task: Task, batch: Batch) -> None:
        if (transfers := batch.parts.get(self.name)) is not None:
            task.store_ns = self.slots.store(transfers.stores)

    def behind_copies(self, task: Task, batch: Batch) -> None:
        if (transfers := batch.parts.get(self.name)) is not None:
            task.load_ns = self.slots.load(transfers.loads)

    def collect(self, plan: StepPlan, batch: Batch, outcome: StepOutcome) -> None:
        if self.name in batch.parts:
            self.slots.finish_stores()

    def between_steps(self, work: Transfers) -> tuple[int, int]:
        """While a step is under way it only stores. Returns the nanoseconds of loads and stores."""
        return self.slots.move(work)

    def share(self, plan: StepPlan, batch: Batch) -> tuple[Moves, Moves] | None:
        transfers = batch.parts.get(self.name)
        return None if transfers is None else (transfers.stores, transfers.loads)

    def follow(self, batch: Batch, shared: tuple[Moves, Moves]) -> None:
        self._note(batch, Transfers(*shared))

    def share_between_steps(self, work: Transfers) -> tuple[Moves, Moves]:
        return work.stores, work.loads

    def follow_between_steps(self, shared: tuple[Moves, Moves]) -> None:
        self.slots.move(Transfers(*shared))

    def _note(self, batch: Batch, transfers: Transfers) -> None:
        batch.parts[self.name] = transfers
        batch.loaded_blocks = [block for _, block in transfers.loads]


def host_tier_bytes(config: EngineConfig) -> int:
    """Of one rank: the ranks of a group share what the setting gives."""
    return int((config.kv_host_gib or STAGING_GIB) * GIB) // config.num_ranks


def num_blocks(setting: str, nbytes: int, block_bytes: int) -> int:
    """That fit. Raises ModelError where none does."""
    if nbytes < block_bytes:
        raise ModelError(f"{setting} holds no block of {shown_bytes(block_bytes)}; raise it")
    return nbytes // block_bytes


def make(config: EngineConfig) -> HostTier:
    return HostTier(config)
