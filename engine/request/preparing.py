"""What a request waits for before it may be scheduled: the runner's work for it, and reads of KV tiers."""

from dataclasses import dataclass

from msgspec.structs import replace

from sojourn.engine.request.plan import Preparation
from sojourn.engine.request.request import Request
from sojourn.engine.techniques.tiers.transfers import Prefetch
from sojourn.metrics.ledger import Account
from sojourn.metrics.memory.kv_load import NOTHING_LOADED


@dataclass(frozen=True, slots=True)
class Preparing:
    """Both run beside the loop, at the same time."""

    request: Request
    work: Preparation | None
    load: Prefetch | None

    @property
    def is_done(self) -> bool:
        return (self.work is None or self.work.is_done) and (self.load is None or self.load.is_done)

    @property
    def waits_for(self) -> str:
        """One of metrics.records.REFUSALS, while it is not done."""
        if self.work is not None and not self.work.is_done:
            return self.work.waits_for
        return "kv_transfer" if self.is_from_peer else "kv_load"

    @property
    def error(self) -> str | None:
        """A sentence, if the runner's work failed, or a prefill server whose blocks the request needs."""
        if self.work is not None and self.work.is_done and self.work.error is not None:
            return self.work.error
        return self.load.error if self.load is not None and self.load.is_done else None

    @property
    def is_peer_error(self) -> bool:
        return self.load is not None and self.load.error is not None and self.error == self.load.error

    @property
    def is_from_peer(self) -> bool:
        """What it loads, a prefill server has computed for it."""
        return self.load is not None and self.load.is_from_peer

    def accounts(self, since_ns: int, now_ns: int) -> list[tuple[Account, int]]:
        """What the request waited for, in that order, and until when. What is left of the wait belongs to a grammar.

        The loop sees a little later that a read ended. Where nothing else held the request up, that belongs to it.
        """
        ends: list[tuple[Account, int]] = []
        if self.work is not None and self.work.adapter_ready_ns is not None:
            ends.append((Account.MEMORY_ADAPTER_LOAD, self.work.adapter_ready_ns))
        if (load := self.load) is not None:
            if load.transfer_id:
                ends.append((Account.REQUEST_REMOTE_PREFILL, load.computed_ns if load.is_done else now_ns))
            account = Account.MEMORY_TRANSFER if load.is_from_peer else Account.MEMORY_LOAD
            ends.append((account, load.ready_ns if load.is_done else now_ns))
        if ends and self._is_one_read:
            ends[-1] = ends[-1][0], now_ns
        mark_ns, waits = since_ns, []
        for account, end_ns in ends:
            mark_ns = min(max(mark_ns, end_ns), now_ns)
            waits.append((account, mark_ns))
        return waits

    def note_load(self) -> None:
        """For the record of its request: how long the reads took that it waited for."""
        request, load = self.request, self.load
        if load is None or request.queued_ns is None:
            return
        found = request.kv_load or NOTHING_LOADED
        if load.is_from_peer:
            request.kv_load = replace(found, transfer_bytes=load.peer_bytes, transfer_ns=load.peer_ns)
        else:
            request.kv_load = replace(found, load_ns=max(0, load.ready_ns - request.queued_ns))

    @property
    def _is_one_read(self) -> bool:
        """It waits, or waited, for one read and nothing else."""
        if self.work is None or self.load is None:
            return self.work is None or self.work.waits_for == "adapter"
        return False
