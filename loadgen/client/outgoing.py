"""What the socket loop is given to send, and what it says when that has ended."""

from dataclasses import dataclass

WHOLE, CONNECT, FIRST_BYTE, BETWEEN_BYTES = "timeout_s", "connect_timeout_s", "first_byte_timeout_s", "gap_timeout_s"

STOPPED = "the load generator was stopped"  # the reason of what was in flight then


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to wait, in seconds, before a request is given up. None is without a limit of its own."""

    timeout_s: float  # from the moment it was due to its last byte
    connect_timeout_s: float | None = None
    first_byte_timeout_s: float | None = None  # from the moment it was sent
    gap_timeout_s: float | None = None  # between two reads


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One request. `limits` are those of the target, unless a class has its own."""

    index: int  # of the scheduled request
    due_ns: int
    wire: bytes
    limits: Limits
    keep_reply: bool = False  # for a conversation that goes on with it
    tells_due: bool = False  # its moment hung on a reply, so that only the log can tell it
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
