"""LoRA adapters, as a runner calls them."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
import torch

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import Preparation, ScheduledTokens, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.runner.batch import Batch, Results
from sojourn.engine.runner.graphs import Decoded
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.runner.stream import Task
from sojourn.engine.runner.technique import ComputingTechnique, Reserved
from sojourn.engine.techniques.lora.checkpoint.fit import AdaptedModel
from sojourn.engine.techniques.lora.host import Adapters, checked_rank, make_adapters
from sojourn.engine.techniques.lora.kernels.backend import LoraTile, decode_slots
from sojourn.engine.techniques.lora.slots import slot_of


class LoraPart(NamedTuple):
    """Of a batch."""

    tiles: list[LoraTile]  # tokens that use adapters
    loads: list[tuple[int, Any]]  # slots to fill first, and with what


class Loras(ComputingTechnique):
    name: ClassVar[str] = "lora"

    def __init__(self, config: EngineConfig):
        self._config = config

    def reserve(self, model: PlacedModel) -> Reserved:
        """All slots. On a CPU those are full only where adapters of the largest rank change every layer. Raises
        ModelError for an adapter of the settings that does not fit the model."""
        adapted = AdaptedModel(model.model)
        rank = checked_rank(self._config, adapted)
        numbers = self._config.max_loras * sum(layer.slot_parameters(rank) for layer in adapted.layers)
        return Reserved(adapter_bytes=numbers * model.activation_bytes)

    def load(self, model: PlacedModel) -> None:
        self.host: Adapters = make_adapters(self._config, model.model, model.dtype, model.device)
        self._backend = self.host.backend

    def begin(self, request: Request) -> Preparation | None:
        return None if request.adapter is None else self.host.begin(request.id, request.adapter)

    def between_steps(self, work: tuple[str, AdapterReference]) -> Preparation | None:
        """Reads an adapter into host memory, and keeps it there until its id is forgotten. None: it is there."""
        return self.host.begin(*work)

    def forget(self, request_id: str) -> None:
        self.host.forget(request_id)

    def arrange(self, items: list[ScheduledTokens]) -> None:
        """Neighbours with the same adapter, which is read once for all."""
        items.sort(key=lambda item: (item.new_tokens > 1, slot_of(item.request)))

    def prepare(self, plan: StepPlan, batch: Batch) -> None:
        loads = [(slot, self.host.packed(adapter)) for slot, adapter in plan.parts.get(self.name, ())]
        batch.parts[self.name] = LoraPart(self.host.tiles(batch.items), loads)

    def before_copies(self, task: Task, batch: Batch) -> None:
        for slot, packed in batch.parts[self.name].loads:
            self._backend.install(slot, packed)

    def before_forward(self, batch: Batch) -> None:
        self._backend.begin(batch.parts[self.name].tiles)

    def behind_forward(self, found: Results | Decoded, hidden: torch.Tensor | None) -> None:
        self._backend.begin(())  # whatever else the model computes has other tokens

    def before_capture(self, size: int) -> None:
        self._backend.begin_decodes(size)

    def before_replay(self, batch: Batch) -> None:
        slots = decode_slots(batch.parts[self.name].tiles, len(batch.query_lens))
        self._backend.set_decodes(slots, batch.graph_size)

    def share(self, plan: StepPlan, batch: Batch) -> tuple[Sequence[LoraTile], Sequence[tuple[int, AdapterReference]]]:
        return batch.parts[self.name].tiles, plan.parts.get(self.name, ())

    def follow(self, batch: Batch, shared: Any) -> None:
        """Reads this rank's parts of adapters that come into slots: rank 0 has found that their files are good."""
        tiles, loads = msgspec.convert(shared, tuple[list[LoraTile], list[tuple[int, AdapterReference]]])
        batch.parts[self.name] = LoraPart(tiles, [(slot, self.host.read(adapter)) for slot, adapter in loads])


def make(config: EngineConfig) -> Loras:
    return Loras(config)
