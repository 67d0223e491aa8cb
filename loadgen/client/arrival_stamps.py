"""Arrival times of bytes: the kernel's timestamp of the segment, converted to the monotonic clock.

A server that answers all streams in one step makes hundreds of sockets readable at once. A stamp taken after the read
would add the length of that queue. The kernel stamps a segment on arrival (Linux, SO_TIMESTAMPING, software receive
timestamps). Without such a stamp, the time after the read is used. Several segments in one read have the stamp of the
last.
"""

import struct
from time import CLOCK_REALTIME, clock_gettime_ns, monotonic_ns

SO_TIMESTAMPING = 37  # asm-generic/socket.h, which x86 and ARM share; the module `socket` has no name for it
RECEIVED_IN_SOFTWARE = (1 << 3) | (1 << 4)  # linux/net_tstamp.h: RX_SOFTWARE | SOFTWARE
ANCILLARY_SIZE = 128  # three struct timespec and the header
LONGEST_BRACKET_NS = 20_000  # longest time between the two readings of a comparison
STEPPED_NS = 1_000_000  # a larger jump of the offset is a change of the wall clock
DISTRUST_NS = 1_000_000_000  # after a change of the wall clock

_timespec = struct.Struct("qq").unpack_from


class KernelClock:
    """Owns the offset of the wall clock, which the kernel stamps with, to the monotonic clock."""

    __slots__ = ("_ahead_ns", "_trusted", "_trusted_from_ns")

    def __init__(self) -> None:
        self._ahead_ns = clock_gettime_ns(CLOCK_REALTIME) - monotonic_ns()
        self._trusted, self._trusted_from_ns = True, 0

    def compare(self) -> None:
        """Compares both clocks, once a turn between the wait and the reads.

        After a change of the wall clock, kernel stamps are ignored for a second: they may be from before it. A
        comparison that was interrupted detects a change, but does not set the offset.
        """
        before_ns = monotonic_ns()
        wall_ns = clock_gettime_ns(CLOCK_REALTIME)
        now_ns = monotonic_ns()
        bracket_ns = now_ns - before_ns
        ahead_ns = wall_ns - now_ns  # against the later reading: a stamp may be late by the bracket, never early
        if abs(ahead_ns - self._ahead_ns) >= STEPPED_NS + bracket_ns:
            self._trusted_from_ns = now_ns + DISTRUST_NS
            self._ahead_ns = ahead_ns
        elif bracket_ns <= LONGEST_BRACKET_NS:
            self._ahead_ns = ahead_ns
        self._trusted = now_ns >= self._trusted_from_ns

    def stamp(self, ancillary: list[tuple[int, int, bytes]]) -> int:
        """Monotonic time of what recvmsg returned with `ancillary`, called at once after it."""
        if ancillary and self._trusted:
            seconds, nanoseconds = _timespec(ancillary[0][2])
            if seconds:
                return seconds * 1_000_000_000 + nanoseconds - self._ahead_ns
        return monotonic_ns()
