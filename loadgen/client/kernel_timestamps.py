"""When bytes arrived: the kernel's own stamp of a segment where it gives one, brought onto the monotonic clock.

A server that answers all streams in one step makes hundreds of sockets readable at once, and whoever stamps after
reading books the length of its own queue on the last of them. The kernel stamps when a segment comes in, however late
it is read (Linux, SO_TIMESTAMPING, receive stamps made in software). Where it stamps nothing, the moment after the
read stands for it. Bytes of several segments in one read have the stamp of the last.
"""

import struct
from time import clock_gettime_ns, monotonic_ns

try:
    from time import CLOCK_REALTIME
except ImportError:  # no such clock outside POSIX; nothing asks for it there
    CLOCK_REALTIME = 0

SO_TIMESTAMPING = 37  # asm-generic/socket.h, which x86 and ARM share; the module `socket` has no name for it
RECEIVED_IN_SOFTWARE = (1 << 3) | (1 << 4)  # linux/net_tstamp.h: RX_SOFTWARE | SOFTWARE
ANCILLARY_SIZE = 128  # three struct timespec and the header
LONGEST_BRACKET_NS = 20_000  # between the two readings of a trusted comparison of clocks
STEPPED_NS = 1_000_000  # the wall clock was set by somebody, if it moved this far against the other at once
SETTLED_NS = 1_000_000_000  # from then on until all that was stamped before is read

_timespec = struct.Struct("qq").unpack_from


class KernelClock:
    """Owns what the wall clock, in which the kernel stamps, is ahead of the monotonic one."""

    __slots__ = ("_ahead_ns", "_trusted", "_trusted_from_ns")

    def __init__(self) -> None:
        self._ahead_ns = clock_gettime_ns(CLOCK_REALTIME) - monotonic_ns()
        self._trusted, self._trusted_from_ns = True, 0

    def compare(self) -> None:
        """Reads both clocks, once a turn, after the wait in which nearly all of its time passes and before it reads.

        What is read for a second after somebody set the wall clock may have been stamped before or after that, so that
        no stamp of the kernel is taken. A comparison that was interrupted tells of a set clock, but is not kept.
        """
        before_ns = monotonic_ns()
        wall_ns = clock_gettime_ns(CLOCK_REALTIME)
        now_ns = monotonic_ns()
        bracket_ns = now_ns - before_ns
        ahead_ns = wall_ns - now_ns  # against the later reading: a stamp may be late by the bracket, never early
        if abs(ahead_ns - self._ahead_ns) >= STEPPED_NS + bracket_ns:
            self._trusted_from_ns = now_ns + SETTLED_NS
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
