"""Headers of the slots that other processes read: what a slot holds, and whether it is held.

A reader reads the header, the block, and the header again. Only where both headers are the expected one the block was
held all the time: a slot gets its header when its lease begins, and loses it before it may be written again.
"""

import struct

HEADER = struct.Struct("<16s16sQ")  # fingerprint of the model, key of the block, number of the seal
HEADER_BYTES = 64  # of one slot


class SlotHeaders:
    """The headers of all slots, in memory that others read."""

    def __init__(self, memory: memoryview, fingerprint: bytes):
        """`memory` [num_slots * HEADER_BYTES] uint8."""
        self._memory = memory
        self._fingerprint = fingerprint
        self._leases: dict[int, int] = {}  # slot → leases that hold it
        self._seals = 0

    @property
    def num_sealed(self) -> int:
        return len(self._leases)

    def seal(self, slot: int, key: bytes) -> None:
        """One more lease holds the slot, which has this block."""
        count = self._leases.get(slot, 0)
        self._leases[slot] = count + 1
        if not count:
            self._seals += 1
            HEADER.pack_into(self._memory, slot * HEADER_BYTES, self._fingerprint, key, self._seals)

    def unseal(self, slot: int) -> None:
        """One lease less holds it."""
        self._leases[slot] -= 1
        if not self._leases[slot]:
            del self._leases[slot]
            HEADER.pack_into(self._memory, slot * HEADER_BYTES, b"", b"", 0)


def is_of(header: bytes, fingerprint: bytes, key: bytes) -> bool:
    """Whether a slot with this header holds that block of that model."""
    return HEADER.unpack_from(header)[:2] == (fingerprint, key)
