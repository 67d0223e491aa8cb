"""The time of all who decode, booked once a step and not once a request."""

from engine.request.request import Request
from metrics.ledger import CLOCKED


class DecodeClock:
    """Whoever decodes in a step pays what all others pay who do: the device's time, the sampler's, the host's around
    them, and in a mixed step the prompts' part. So one clock runs, in nanoseconds by CLOCKED. A request reads it when
    it joins and when it leaves; between them its ledger stands as if the clock had begun at nought, and lacks the
    reading.

    Members were all booked up to the same moment: `booked_ns` on the device, and `lag_ns` of the host's time after it.
    """

    def __init__(self) -> None:
        self.members: list[Request] = []  # in the order in which a step of theirs has them
        self.reading = (0,) * len(CLOCKED)
        self.booked_ns = self.lag_ns = 0
        self.committed_ns = 0  # the last step: who ran then is booked up to here

    def tick(self, interference_ns: int, decode_ns: int, host_ns: int, sample_ns: int) -> None:
        """Books a step to every member."""
        interference, decode, host, sample = self.reading
        self.reading = (
            interference + interference_ns, decode + decode_ns, host + host_ns, sample + sample_ns
        )  # fmt: skip

    def join(self, request: Request) -> None:
        """A request is booked up to where the members are. The caller lists it among them."""
        ledger = request.ledger
        for account, ns in zip(CLOCKED, self.reading, strict=True):
            ledger[account] -= ns
        request.clocked = request.untold = True

    def leave(self, request: Request) -> None:
        """Its ledger is whole again, and it is booked as far as the members are. The caller strikes it off the list."""
        ledger = request.ledger
        for account, ns in zip(CLOCKED, self.reading, strict=True):
            ledger[account] += ns
        request.clocked = False
        request.booked_ns, request.lag_ns = self.booked_ns, self.lag_ns

    def strike(self, request: Request) -> None:
        """`leave` for one that ends or gives way between two steps, if it is a member."""
        if request.clocked:
            self.leave(request)
            self.members = [member for member in self.members if member is not request]

    def base(self, request: Request) -> list[int]:
        """The ledger of any request less the reading: what a reader adds the reading of its own moment to."""
        ledger = list(request.ledger)
        if not request.clocked:
            for account, ns in zip(CLOCKED, self.reading, strict=True):
                ledger[account] -= ns
        return ledger
