"""Requests that wait for a slot of their LoRA adapter, and when another adapter has to give its slot up."""

from collections.abc import Callable

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.request.policies.policy import RankedQueue
from sojourn.engine.request.request import Request
from sojourn.engine.techniques.lora.slots import Adapted, AdapterSlots


class AdapterLine:
    """Requests whose adapter has no slot wait here, and block nobody: requests of other adapters overtake them.

    So that none waits for ever, at most `patience` requests overtake the first in rank. Then the adapter with the
    fewest running requests is closed: no request behind the first in rank gets its slot, until it is empty.
    """

    name = "adapter"

    def __init__(self, slots: AdapterSlots, rank: Callable[[Request], tuple], patience: int):
        self.slots = slots
        self._rank, self._patience = rank, patience
        self._waiting: dict[str, RankedQueue] = {}  # adapter key → its requests
        self._loads: dict[str, Request] = {}  # adapter key → who brought it, until a step is launched
        self._overtaken = 0
        self._closed: str | None = None
        self.count = 0

    def may_enter(self, request: Request) -> bool:
        """Whether a slot has the request's adapter, or can get it now."""
        if request.adapter is None:
            return True
        key = request.adapter.key
        if not self.slots.holds(key):
            return self.slots.available > 0
        return key != self._closed or not self._is_behind(request)

    def enter(self, request: Request) -> None:
        """The request runs: it gets a slot, which the next launched step fills where its adapter is new there."""
        if self.count and self._is_behind(request):
            self._overtaken += 1
        part = request.parts.setdefault("lora", Adapted())
        part.slot, is_new = self.slots.take(request.adapter.key)
        if is_new:
            self._overtaken, self._closed = 0, None
            self._loads[request.adapter.key] = request
            part.loads += 1
        self._close_when_due()

    def give_back(self, request: Request) -> None:
        """A running request ended, or was preempted. Where no step was launched that fills its slot, none will be:
        its adapter may be gone from host memory by then."""
        key = request.adapter.key
        request.parts["lora"].slot = -1
        self.slots.give_back(key)
        if key in self._loads and not self.slots.users(key):
            self._loads.pop(key).parts["lora"].loads -= 1
            self.slots.vacate(key)

    @property
    def has_loads(self) -> bool:
        return bool(self._loads)

    def take_loads(self) -> list[tuple[int, AdapterReference]]:
        """The slots that the step fills which is launched now, and with what."""
        loads, self._loads = self._loads, {}
        return [(self.slots.slot_of(key), request.adapter) for key, request in loads.items()]

    def wait(self, request: Request) -> None:
        self._waiting.setdefault(request.adapter.key, RankedQueue(self._rank)).push(request)
        self.count += 1
        self._close_when_due()

    def leave(self, request: Request) -> None:
        """The request ended, or it may try again."""
        key = request.adapter.key
        self._waiting[key].remove(request)
        if not len(self._waiting[key]):
            del self._waiting[key]
        self.count -= 1
        if not self.count:
            self._overtaken, self._closed = 0, None

    def returning(self) -> list[Request]:
        """The requests that may try again, by rank: those whose adapter has a slot that is open, and those of as many
        other adapters as can get one."""
        if not self.count:
            return []
        if self._closed is not None and not self.slots.users(self._closed):
            self._closed = None  # its slot is available
        heads = sorted((queue.head() for queue in self._waiting.values()), key=self._rank)
        available, chosen = self.slots.available, []
        for head in heads:
            if self.slots.holds(head.adapter.key):
                if self.may_enter(head):
                    chosen.append(head)
            elif available:
                available -= 1
                chosen.append(head)
        found = [request for head in chosen for request in self._waiting[head.adapter.key].members()]
        return sorted(found, key=self._rank)

    def _first(self) -> Request | None:
        heads = [queue.head() for key, queue in self._waiting.items() if not self.slots.holds(key)]
        return min(heads, key=self._rank, default=None)

    def _is_behind(self, request: Request) -> bool:
        first = self._first()
        return first is not None and self._rank(first) < self._rank(request)

    def _close_when_due(self) -> None:
        due = self._closed is None and self._overtaken >= self._patience
        if due and self._first() is not None and not self.slots.available:
            self._closed = self.slots.least_used()
