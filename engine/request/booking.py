"""What is kept of a request for its record. The loop counts, the accountant books."""

from dataclasses import dataclass, field

from sojourn.metrics.ledger import new_ledger


@dataclass(slots=True)
class Counts:
    """What was computed for a request."""

    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    first_step: int | None = None
    last_step: int | None = None


@dataclass(slots=True)
class Booking:
    """Where the time of a request went."""

    ledger: list[int] = field(default_factory=new_ledger)
    waits: dict[str, int] = field(default_factory=dict)  # reason → nanoseconds
    queued_ns: int | None = None  # the loop took it in
    scheduled_ns: int | None = None  # it got its first place in the batch
    wait_mark: tuple[int, ...] = ()  # the wait clocks when it began to wait
    waits_aside: str | None = None  # the reason of its own for which it waits, if not for what holds up the line
    booked_ns: int = 0  # while it runs: until when its time on the device is booked
    lag_ns: int = 0  # while it runs: what is booked of the host's time after `booked_ns`
    clocked: bool = False  # the decode clock runs for it, and the ledger lacks it
    ledger_changed: bool = False  # since the front saw it, beside what the decode clock adds
    rejected_ns: int = 0  # of its compute.decode: what rejected drafts took, its own and those beside it
    rejected_mark_ns: int = 0  # the decode clock's value of that when it joined
