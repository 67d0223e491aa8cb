"""Transport of one host: a peer reads our slots from a segment of memory without a name.

The segment is a memfd: the kernel frees it with the last process that has it open, also after a kill, and no file is
left over. A peer opens it as /proc/PID/fd/FD, which needs the same user and a shared PID namespace. It never maps it:
nothing that an owner does can end its reader.
"""

import fcntl
import mmap
import os
import stat
from collections.abc import Callable, Sequence

import msgspec

from sojourn.engine.techniques.handover.headers import HEADER_BYTES
from sojourn.engine.techniques.handover.transport import TransferError
from sojourn.metrics.errors import ModelError

_GET_SEALS = getattr(fcntl, "F_GET_SEALS", 1034)  # only a memfd answers it


class SharedSegment:
    """Slots [num_slots, block_bytes] and their headers behind them, in pages that take memory as they fill."""

    def __init__(self, num_slots: int, block_bytes: int):
        """Raises ModelError where the system has no such memory."""
        if not hasattr(os, "memfd_create"):
            raise ModelError("kv_transport=shm needs Linux; leave kv_role out")
        self.num_slots, self.block_bytes = num_slots, block_bytes
        self.num_bytes = num_slots * (block_bytes + HEADER_BYTES)
        try:
            self.fd = os.memfd_create("sojourn-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.num_bytes)
            self._pages = mmap.mmap(self.fd, self.num_bytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise ModelError(f"the slots for KV transfers do not fit; lower kv_host_gib ({error.strerror})") from None

    @property
    def slots(self) -> memoryview:
        return memoryview(self._pages)[: self.num_slots * self.block_bytes]

    @property
    def headers(self) -> memoryview:
        return memoryview(self._pages)[self.num_slots * self.block_bytes :]


class SegmentDescriptor(msgspec.Struct, frozen=True):
    """Where a segment is, and how to know it again: a process id may be another process by now."""

    pid: int
    fd: int
    inode: int
    num_slots: int
    block_bytes: int


class SharedMemoryTransport:
    """Reads with `preadv`: the kernel copies, and Python's other threads go on meanwhile."""

    name = "shm"

    def __init__(self, segment: SharedSegment, slot_bytes: Callable[[int], memoryview]):
        """`slot_bytes`: the memory of one of our slots, to read into."""
        self._segment = segment
        self._slot_bytes = slot_bytes

    def descriptor(self) -> bytes:
        segment = self._segment
        inode = os.fstat(segment.fd).st_ino
        own = SegmentDescriptor(os.getpid(), segment.fd, inode, segment.num_slots, segment.block_bytes)
        return msgspec.msgpack.encode(own)

    def connect(self, descriptor: bytes) -> "SharedPeer":
        try:
            return SharedPeer(msgspec.msgpack.decode(descriptor, type=SegmentDescriptor), self._slot_bytes)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TransferError(f"its descriptor cannot be read: {error}", is_refusal=True) from None

    def close(self) -> None:
        """The segment goes with its process: the views of it are still in use."""


class SharedPeer:
    """The segment of a peer on this host."""

    def __init__(self, place: SegmentDescriptor, slot_bytes: Callable[[int], memoryview]):
        self._place, self._slot_bytes = place, slot_bytes
        try:
            self._fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            reason = f"its memory cannot be opened: {error.strerror}"
            raise TransferError(f"{reason}; both servers need one user, one host and one PID namespace") from None
        try:
            found = os.fstat(self._fd)
            is_segment = stat.S_ISREG(found.st_mode) and found.st_ino == place.inode
            fcntl.fcntl(self._fd, _GET_SEALS)
        except OSError:
            is_segment = False
        size = place.num_slots * (place.block_bytes + HEADER_BYTES)
        if not is_segment or found.st_size != size:
            self.close()
            raise TransferError("what it names is not its memory for KV transfers")

    def headers(self, slots: Sequence[int]) -> list[bytes]:
        begin = self._place.num_slots * self._place.block_bytes
        return [self._pread(HEADER_BYTES, begin + self._checked(slot) * HEADER_BYTES) for slot in slots]

    def read(self, slots: Sequence[tuple[int, int]]) -> None:
        size = self._place.block_bytes
        for remote, local in slots:
            if os.preadv(self._fd, [self._slot_bytes(local)], self._checked(remote) * size) != size:
                raise TransferError("a block of its memory is not whole")

    def close(self) -> None:
        os.close(self._fd)

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self._place.num_slots:
            raise TransferError(f"it has no slot {slot}")
        return slot

    def _pread(self, count: int, offset: int) -> bytes:
        found = os.pread(self._fd, count, offset)
        if len(found) != count:
            raise TransferError("a header of its memory is not whole")
        return found
