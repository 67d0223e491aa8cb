"""Places for LoRA adapters: slots on the device, and bytes of host memory. Pure bookkeeping: no tensors, no clock."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Adapted:
    """What is kept of a request with an adapter."""

    slot: int = -1  # of the device, while it runs
    loads: int = 0  # into a slot, for this request


def slot_of(request: Any) -> int:
    """-1 of a request that does not run with an adapter."""
    part = request.parts.get("lora")
    return -1 if part is None else part.slot


class AdapterSlots:
    """Which adapter is in which slot, and how many running requests use it.

    An adapter stays in its slot when its last request is gone. The least recently used one without requests gives way.
    """

    def __init__(self, count: int):
        self.count = count
        self.loads = 0  # since the start
        self.evictions = 0
        self._free = list(range(count - 1, -1, -1))  # a stack: low slots first
        self._slots: dict[str, int] = {}  # adapter key → slot
        self._users: dict[str, int] = {}  # adapter key → running requests, where there are any
        self._idle: OrderedDict[str, None] = OrderedDict()  # adapters without requests, the least recently used first

    @property
    def in_use(self) -> int:
        """Slots whose adapter has running requests."""
        return len(self._users)

    @property
    def available(self) -> int:
        """Slots that another adapter could get now."""
        return self.count - self.in_use

    @property
    def resident(self) -> Iterable[str]:
        return self._slots.keys()

    def holds(self, key: str) -> bool:
        return key in self._slots

    def slot_of(self, key: str) -> int:
        return self._slots[key]

    def users(self, key: str) -> int:
        return self._users.get(key, 0)

    def least_used(self) -> str:
        """The adapter with the fewest running requests, of those that have any; of equals the one in the lowest slot.
        Every slot must be in use."""
        return min(self._users, key=lambda key: (self._users[key], self._slots[key]))

    def take(self, key: str) -> tuple[int, bool]:
        """The slot of one more running request, and whether its adapter must be loaded into it first.

        Either the adapter has a slot, or one is available.
        """
        is_new = key not in self._slots
        if is_new:
            self._slots[key] = self._free_slot()
            self.loads += 1
        self._idle.pop(key, None)
        self._users[key] = self.users(key) + 1
        return self._slots[key], is_new

    def give_back(self, key: str) -> None:
        """A request that took the slot runs no longer."""
        self._users[key] -= 1
        if self._users[key] == 0:
            del self._users[key]
            self._idle[key] = None

    def vacate(self, key: str) -> None:
        """Nothing was loaded into the slot of an adapter without requests, and nothing will be."""
        del self._idle[key]
        self._free.append(self._slots.pop(key))
        self.loads -= 1

    def _free_slot(self) -> int:
        if self._free:
            return self._free.pop()
        assert self._idle, "a slot is taken only where one is available"
        evicted, _ = self._idle.popitem(last=False)
        self.evictions += 1
        return self._slots.pop(evicted)


class HostAdapters:
    """Bytes of adapters in host memory, within a bound. Those without requests are forgotten, the least recently used
    first."""

    def __init__(self, capacity_bytes: int):
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()  # adapter key → bytes, the least recently used first
        self._users: dict[str, set[str]] = {}  # adapter key → ids of live requests, where there are any

    def holds(self, key: str) -> bool:
        return key in self._sizes

    def admit(self, key: str, nbytes: int) -> list[str] | None:
        """Makes room; the adapters that are forgotten for it. None (and no change) where live requests need too much
        of the memory."""
        assert key not in self._sizes, "it has its room"
        missing = self.used_bytes + nbytes - self.capacity_bytes
        evicted = []
        for other, size in self._sizes.items():
            if missing <= 0:
                break
            if other not in self._users:
                evicted.append(other)
                missing -= size
        if missing > 0:
            return None
        for other in evicted:
            self.drop(other)
        self._sizes[key] = nbytes
        self.used_bytes += nbytes
        return evicted

    def use(self, key: str, request_id: str) -> None:
        self._users.setdefault(key, set()).add(request_id)
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def forget(self, key: str, request_id: str) -> None:
        """A request ended."""
        users = self._users[key]
        users.remove(request_id)
        if not users:
            del self._users[key]

    def is_used(self, key: str) -> bool:
        return key in self._users

    def drop(self, key: str) -> None:
        """Its memory is free again."""
        self.used_bytes -= self._sizes.pop(key)
