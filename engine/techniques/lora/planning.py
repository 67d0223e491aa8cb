"""LoRA around the loop: requests wait for a slot of their adapter, and steps fill slots."""

from collections.abc import Iterable
from typing import Any, Protocol

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.messages import AdapterLoaded, LoadAdapter
from sojourn.engine.request.plan import Preparation, StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.request.technique import Technique
from sojourn.engine.techniques.lora.line import AdapterLine
from sojourn.engine.techniques.lora.slots import AdapterSlots
from sojourn.metrics.records import StepRecord
from sojourn.metrics.records.step import Adapters


class AdapterReader(Protocol):
    """A runner, whose half of LoRA has the adapters in host memory."""

    def between_steps(self, name: str, work: tuple[str, AdapterReference]) -> Preparation | None:
        """Reads an adapter for a request id, and keeps it until `forget`. None: it is there."""
        ...

    def forget(self, request_id: str) -> None: ...


class LoraPlanning(Technique):
    """The part of a plan is [(slot, adapter)]: what the step fills before it computes."""

    name = "lora"

    def __init__(self, max_loras: int, reader: AdapterReader | None = None):
        self.slots = AdapterSlots(max_loras)
        self._reader = reader
        self._loading: list[tuple[str, Preparation | None]] = []  # keys of adapters that the front wants to know of
        self._evictions = 0  # up to the last record

    def join(self, scheduler: Any) -> None:
        super().join(scheduler)
        self.side_queue = self.line = AdapterLine(self.slots, scheduler.policy.rank, patience=scheduler.max_num_seqs)

    @property
    def is_waiting(self) -> bool:
        return bool(self._loading)

    def take(self, message: Any) -> None:
        if isinstance(message, LoadAdapter):
            assert self._reader is not None, "a server has a runner"
            key = message.adapter.key
            self._loading.append((key, self._reader.between_steps(self.name, (f"load {key}", message.adapter))))

    def answers(self) -> Iterable[AdapterLoaded]:
        loading, self._loading = self._loading, []
        for key, preparation in loading:
            if preparation is not None and not preparation.is_done:
                self._loading.append((key, preparation))
                continue
            self._reader.forget(f"load {key}")
            yield AdapterLoaded(key, None if preparation is None else preparation.error)

    def report(self, request: Request) -> dict[str, Any]:
        return {"adapter_loads": request.parts[self.name].loads} if self.name in request.parts else {}

    def entered(self, request: Request) -> None:
        if request.adapter is not None:
            self.line.enter(request)

    def left(self, request: Request) -> None:
        if request.adapter is not None:
            self.line.give_back(request)

    def planned(self, plan: StepPlan) -> None:
        if plan.scheduled and self.line.has_loads:
            plan.parts[self.name] = self.line.take_loads()

    def record(self, record: StepRecord, plan: StepPlan, outcome: StepOutcome) -> None:
        """Two products of a step's tokens with the matrices of their adapters; each matrix is read once."""
        if not self.slots.loads:
            return
        used, flops = {}, 0
        for item in plan.scheduled:
            if (adapter := item.request.adapter) is not None:
                used[adapter.key] = adapter
                flops += 2 * item.new_tokens * adapter.parameters
        record.adapters = Adapters(
            adapter_slots=len(used),
            adapter_loads=len(plan.parts.get(self.name, ())),
            adapter_evictions=self.slots.evictions - self._evictions,
            flops_adapters=flops,
            adapter_bytes=sum(adapter.nbytes for adapter in used.values()),
        )
        self._evictions = self.slots.evictions
