"""A request for the socket loop, and how it ended."""

from dataclasses import dataclass

from sojourn.loadgen.scenario.scenario import Target

# Time limits of a target.
WHOLE, CONNECT, FIRST_BYTE, BETWEEN_BYTES = "timeout_s", "connect_timeout_s", "first_byte_timeout_s", "gap_timeout_s"

STOPPED = "the load generator was stopped"  # the reason of what was in flight then


@dataclass(frozen=True, slots=True)
class Outgoing:
    index: int  # of the scheduled request
    due_ns: int
    wire: bytes
    target: Target
    keep_reply: bool = False  # the next turn of its session needs the answer
    logs_due: bool = False  # the due time depends on a reply, so only the log has it
    patience_ns: int | None = None  # from when it was due; then the client leaves
    patience_for: str = "first_token"  # or "answer"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended. `reason` is "" where it ended well."""

    ended_ns: int
    last_ns: int  # of the last bytes read, or of the end where none were
    num_bytes: int
    reason: str
    reads: tuple[tuple[int, bytes], ...] = ()  # (ns, bytes) of the reply; only of a request that keeps it
    sent_ns: int | None = None
    kind: int | None = None  # one of `event_log.TERMINAL`; None of a request that was never sent

    @property
    def reply(self) -> bytes:
        return b"".join(data for _, data in self.reads)
