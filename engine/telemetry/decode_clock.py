"""The time of all requests that decode, booked once a step and not once a request."""

from engine.request.request import Request
from metrics.ledger import CLOCKED


class DecodeClock:
    """All requests that decode in a step pay the same: the device, the sampler, the host around them, and in a mixed
    step the share of the prompts. So one clock runs for them, in nanoseconds by CLOCKED: a step costs O(1), not
    O(batch). A request subtracts the clock from its ledger when it joins, and adds it when it leaves.

    All members are booked up to the same moment: `booked_ns` on the device, and `lag_ns` of the host's time after it.
    """

    def __init__(self) -> None:
        self.members: list[Request] = []  # in the order of the step that they share
        self.clock_ns = (0,) * len(CLOCKED)
        self.booked_ns = self.lag_ns = 0
        self.committed_ns = 0  # of the last step: all that ran in it are booked up to here

    def tick(self, interference_ns: int, decode_ns: int, host_ns: int, sample_ns: int) -> None:
        """Books a step to every member."""
        interference, decode, host, sample = self.clock_ns
        self.clock_ns = (
            interference + interference_ns, decode + decode_ns, host + host_ns, sample + sample_ns
        )  # fmt: skip

    def join(self, request: Request) -> None:
        """A request is booked as far as the members. The caller adds it to `members`."""
        ledger = request.ledger
        for account, ns in zip(CLOCKED, self.clock_ns, strict=True):
            ledger[account] -= ns
        request.clocked = request.ledger_changed = True

    def leave(self, request: Request) -> None:
        """Makes its ledger whole. The caller takes it out of `members`."""
        ledger = request.ledger
        for account, ns in zip(CLOCKED, self.clock_ns, strict=True):
            ledger[account] += ns
        request.clocked = False
        request.booked_ns, request.lag_ns = self.booked_ns, self.lag_ns

    def remove(self, request: Request) -> None:
        """A request ends, or is preempted: `leave`, and out of `members`, if it is in them."""
        if request.clocked:
            self.leave(request)
            self.members = [member for member in self.members if member is not request]

    def base(self, request: Request) -> list[int]:
        """The ledger of any request without the clock. A reader adds the clock of its own moment."""
        ledger = list(request.ledger)
        if not request.clocked:
            for account, ns in zip(CLOCKED, self.clock_ns, strict=True):
                ledger[account] -= ns
        return ledger
