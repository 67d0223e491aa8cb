"""What moves between the tiers, what a request waits for of that, and the counts. Data only."""

from dataclasses import dataclass, field

from msgspec.structs import replace

from sojourn.engine.techniques.tiers.request import TierReader
from sojourn.engine.techniques.tiers.store import Moved
from sojourn.metrics.ledger import Account
from sojourn.metrics.memory.kv_load import NOTHING_LOADED


@dataclass(slots=True)
class Transfers:
    """What a step copies between the device and slots of host memory, before it computes."""

    stores: list[tuple[int, int]] = field(default_factory=list)  # device block → slot
    loads: list[tuple[int, int]] = field(default_factory=list)  # slot → device block, behind the copies of the step
    stored_keys: list[bytes] = field(default_factory=list)
    loaded_keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Prefetch:
    """Reads into host memory that a request waits for: a `Wait` of the loop."""

    reads_left: int = 0
    is_cancelled: bool = False
    patience_ns: int = 0  # its request waits so long
    until_ns: int = 0  # the end of its patience
    is_late: bool = False  # its patience ended before it had all
    reads: bool = False  # that was cheaper than to compute
    held: list[bytes] = field(default_factory=list)  # pinned in host memory for its request
    ready_ns: int = 0  # when the last read ended
    is_from_peer: bool = False  # what another server computed for the request
    is_strict: bool = False  # a read that fails is an error of the request; else its tokens are computed
    error: str | None = None  # a sentence
    transfer_id: str = ""  # of what another server still computes
    computed_ns: int = 0  # until when it computed what was read
    peer_bytes: int = 0  # that were read from there
    peer_ns: int = 0  # the time of these reads

    @property
    def is_done(self) -> bool:
        return self.reads_left == 0 or self.is_late

    @property
    def waits_for(self) -> str:
        return "kv_transfer" if self.is_from_peer else "kv_load"

    @property
    def is_peer_error(self) -> bool:
        return self.error is not None

    def accounts(self, now_ns: int) -> list[tuple[Account, int]]:
        ends = []
        if self.transfer_id:
            ends.append((Account.REQUEST_REMOTE_PREFILL, self.computed_ns if self.is_done else now_ns))
        account = Account.MEMORY_TRANSFER if self.is_from_peer else Account.MEMORY_LOAD
        return [*ends, (account, self.ready_ns if self.is_done else now_ns)]

    def note(self, request: TierReader) -> None:
        """How long the reads took that it waited for."""
        queued_ns = request.booking.queued_ns
        if queued_ns is None:
            return
        found = request.parts.get("tiers") or NOTHING_LOADED
        if self.is_from_peer:
            request.parts["tiers"] = replace(found, transfer_bytes=self.peer_bytes, transfer_ns=self.peer_ns)
        else:
            request.parts["tiers"] = replace(found, load_ns=max(0, self.ready_ns - queued_ns))

    def has_read(self, read: Moved) -> None:
        """A read that it waited for ended."""
        self.ready_ns = max(self.ready_ns, read.ended_ns)
        if not self.is_from_peer:
            return
        self.computed_ns = max(self.computed_ns, read.announced_ns)
        if read.ok:
            self.peer_bytes += read.nbytes
            self.peer_ns += read.ended_ns - read.began_ns
        elif not read.is_absent and (self.is_strict or read.is_refusal):
            self.error = self.error or read.error

    def give_up(self, now_ns: int) -> None:
        """It has waited for too long."""
        self.is_late, self.ready_ns, self.computed_ns = True, now_ns, now_ns
        if self.is_strict:
            self.error = self.error or "the KV blocks of the prefill server did not come in time"


@dataclass(slots=True)
class TierCounts:
    """Of one tier, since the last `take_counts`; `blocks` is the state."""

    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_ns: int = 0
    store_ns: int = 0
    failures: int = 0  # reads and writes that failed, and damaged blocks
    refused: int = 0  # stores for which there was no room
    blocks: int = 0
    leases_ended: dict[str, int] = field(default_factory=dict)  # of what other servers read: how → how many
