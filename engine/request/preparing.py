"""What a request waits for before it may be scheduled: the runner's work for it, and what techniques read."""

from collections.abc import Sequence
from dataclasses import dataclass

from sojourn.engine.request.plan import Preparation
from sojourn.engine.request.request import Request
from sojourn.engine.request.technique import Wait
from sojourn.metrics.ledger import Account


@dataclass(frozen=True, slots=True)
class Preparing:
    """All of it goes on beside the loop, at the same time."""

    request: Request
    work: Preparation | None
    waits: Sequence[Wait]

    @property
    def is_done(self) -> bool:
        return (self.work is None or self.work.is_done) and all(wait.is_done for wait in self.waits)

    @property
    def waits_for(self) -> str:
        """One of metrics.records.REFUSALS: of what is not done, or has failed."""
        all_of_it = [*self.waits] if self.work is None else [self.work, *self.waits]
        return next((each.waits_for for each in all_of_it if not each.is_done), all_of_it[0].waits_for)

    @property
    def error(self) -> str | None:
        """A sentence, if the runner's work failed, or a wait did."""
        if self.work is not None and self.work.is_done and self.work.error is not None:
            return self.work.error
        return next((wait.error for wait in self.waits if wait.is_done and wait.error is not None), None)

    @property
    def is_peer_error(self) -> bool:
        return any(wait.is_peer_error and self.error == wait.error for wait in self.waits)

    def accounts(self, since_ns: int, now_ns: int) -> list[tuple[Account, int]]:
        """What the request waited for, in that order, and until when. What is left of the wait belongs to a grammar.

        The loop sees a little later that a read ended. Where nothing else held the request up, that belongs to it.
        """
        ends: list[tuple[Account, int]] = []
        if self.work is not None and self.work.adapter_ready_ns is not None:
            ends.append((Account.MEMORY_ADAPTER_LOAD, self.work.adapter_ready_ns))
        for wait in self.waits:
            ends += wait.accounts(now_ns)
        if ends and self._is_one_read:
            ends[-1] = ends[-1][0], now_ns
        mark_ns, booked = since_ns, []
        for account, end_ns in ends:
            mark_ns = min(max(mark_ns, end_ns), now_ns)
            booked.append((account, mark_ns))
        return booked

    def note(self) -> None:
        """For the record of its request."""
        for wait in self.waits:
            wait.note(self.request)

    @property
    def _is_one_read(self) -> bool:
        """It waits, or waited, for one read and nothing else."""
        if self.work is None:
            return len(self.waits) == 1
        return not self.waits and self.work.waits_for == "adapter"
