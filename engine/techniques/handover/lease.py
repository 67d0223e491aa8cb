"""Leases: until when a prefill server holds the blocks of a prompt. Pure bookkeeping: no tensors, no clock."""

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lease:
    """Blocks that stay where they are until their reader gives them back, or until the lease expires."""

    id: str
    keys: tuple[bytes, ...]
    until_ns: int
    transfer_id: str = ""  # under which decode servers follow it


class LeaseTable:
    """Every lease ends once: released by the thread of the side channel, or expired.

    The loop grants leases, and takes the ended ones to free their blocks. All leases have the same length, so that
    they expire in the order in which they were granted.
    """

    def __init__(self) -> None:
        self._leases: dict[str, Lease] = {}
        self._released: list[Lease] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, lease: Lease) -> None:
        with self._lock:
            assert lease.id not in self._leases, "each lease has a name of its own"
            self._leases[lease.id] = lease

    def release(self, lease_id: str) -> bool:
        """The reader needs the blocks no more. False where there is no such lease, or not any more."""
        with self._lock:
            lease = self._leases.pop(lease_id, None)
            if lease is not None:
                self._released.append(lease)
            return lease is not None

    def take_released(self) -> list[Lease]:
        """Those that were given back since the last call."""
        with self._lock:
            released, self._released = self._released, []
            return released

    def take_expired(self, now_ns: int) -> list[Lease]:
        with self._lock:
            expired = []
            while self._leases:
                oldest = next(iter(self._leases.values()))
                if oldest.until_ns > now_ns:
                    break
                expired.append(self._leases.pop(oldest.id))
            return expired
