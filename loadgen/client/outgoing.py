"""A request for the socket loop, and how it ended."""

from dataclasses import dataclass

WHOLE, CONNECT, FIRST_BYTE, BETWEEN_BYTES = "timeout_s", "connect_timeout_s", "first_byte_timeout_s", "gap_timeout_s"

STOPPED = "the load generator was stopped"  # the reason of what was in flight then


@dataclass(frozen=True, slots=True)
class Limits:
    """Time limits of a request in seconds. None: no limit of its own."""

    timeout_s: float  # from the moment it was due to its last byte
    connect_timeout_s: float | None = None
    first_byte_timeout_s: float | None = None  # from the moment it was sent
    gap_timeout_s: float | None = None  # between two reads


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request, with the time limits of the target."""

    index: int  # of the scheduled request
    due_ns: int
    wire: bytes
    limits: Limits
    keep_reply: bool = False  # the next turn of its session needs the answer
    tells_due: bool = False  # the due time depends on a reply, so only the log has it
    patience_ns: int | None = None  # from when it was due; then the client leaves
    patience_for: str = "first_token"  # or "answer"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended. `reason` is "" where it ended well."""

    ended_ns: int
    last_ns: int  # of the last bytes read, or of the end where none were
    num_bytes: int
    reason: str
    reply: bytes = b""  # only of a request that keeps it
