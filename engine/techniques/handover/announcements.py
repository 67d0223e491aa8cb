"""What decode servers may read of prompts that are being computed: written by the loop, read by the side channel."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MOST_ENDED = 1024  # transfers without a lease that are remembered, for decode servers that ask late


@dataclass(slots=True)
class Announcement:
    """One transfer. Its slots hold the prompt's blocks from the first on."""

    owner: int  # arrival index of the request that computes it
    slots: list[int] = field(default_factory=list)
    is_over: bool = False
    lease_id: str = ""
    error: str = ""


class Announcements:
    """By the transfer's name. A request with the name of an earlier one takes its place."""

    def __init__(self, changed: Callable[[], None] = lambda: None):
        """`changed` is called by the loop behind each change, without the lock."""
        self.on_change = changed
        self._transfers: dict[str, Announcement] = {}
        self._changed: set[str] = set()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._transfers)

    def begin(self, transfer_id: str, owner: int) -> None:
        """Its request has come."""
        with self._lock:
            self._transfers[transfer_id] = Announcement(owner)
            self._changed.add(transfer_id)
        self.on_change()

    def add(self, transfer_id: str, owner: int, slots: Sequence[int]) -> None:
        """The next blocks of the prompt can be read in these slots."""
        with self._lock:
            found = self._transfers.get(transfer_id)
            if found is None or found.owner != owner:
                return
            found.slots += slots
            self._changed.add(transfer_id)
        self.on_change()

    def end(
        self, transfer_id: str, owner: int, slots: Sequence[int] = (), *, lease_id: str = "", error: str = ""
    ) -> None:
        """These blocks are the last. A lease holds all of them from now on; or, without one, nothing is held."""
        with self._lock:
            found = self._transfers.get(transfer_id)
            if found is None or found.owner != owner:
                return
            found.is_over, found.lease_id, found.error = True, lease_id, error
            self._changed.add(transfer_id)
            found.slots = [*found.slots, *slots] if lease_id else []
            if not lease_id:
                self._forget_old()
        self.on_change()

    def forget(self, transfer_id: str, lease_id: str) -> None:
        """Its lease is over."""
        with self._lock:
            found = self._transfers.get(transfer_id)
            if found is not None and found.lease_id == lease_id:
                del self._transfers[transfer_id]

    def take_changed(self) -> set[str]:
        """The transfers with news since the last call."""
        with self._lock:
            changed, self._changed = self._changed, set()
            return changed

    def since(self, transfer_id: str, first: int) -> Announcement | None:
        """A copy, with the slots from the block `first` on; None where the transfer is not known (any more)."""
        with self._lock:
            found = self._transfers.get(transfer_id)
            if found is None:
                return None
            return Announcement(found.owner, found.slots[first:], found.is_over, found.lease_id, found.error)

    def _forget_old(self) -> None:
        ended = [name for name, each in self._transfers.items() if each.is_over and not each.lease_id]
        for name in ended[: max(0, len(ended) - MOST_ENDED)]:
            del self._transfers[name]
