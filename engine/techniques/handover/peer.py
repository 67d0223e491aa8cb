"""One prefill server, as a decode server reads it: a thread that reads leases, and prompts as they are computed."""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import zmq

from sojourn.engine.kv_source import KVSource
from sojourn.engine.techniques.handover import wire
from sojourn.engine.techniques.handover.connection import Connection, Model, Place
from sojourn.engine.techniques.handover.headers import is_of
from sojourn.engine.techniques.handover.transport import PeerSlots, TransferError
from sojourn.engine.techniques.handover.wakeup import Wakeup
from sojourn.engine.techniques.tiers.store import Moved
from sojourn.engine.techniques.tiers.worker import Complaints

log = logging.getLogger(__name__)

RETRY_S = 10.0  # after a failure the peer is left alone
SILENCE_S = 3.0  # of a prefill server that computes what is waited for: then it counts as dead
UNKNOWN_S = 10.0  # so long a call may reach its prefill server later than its decode server
BATCH_BLOCKS = 16  # between two readings of their headers
LOOK_MS = 500  # between two looks for silence


class Read(NamedTuple):
    """A block that is wanted."""

    key: bytes
    place: int  # the peer's slot; of a transfer, which block of the prompt it is
    slot: int  # ours


@dataclass(slots=True)
class _Transfer:
    """A prompt that the peer computes while it is read."""

    source: KVSource
    reads: deque[Read]  # those to come, in the order of the prompt
    began_s: float
    is_known: bool = False  # to the peer
    slots: list[int] = field(default_factory=list)  # the peer's, from the prompt's first block on
    announced_ns: int = 0  # when the peer said last which slots it has


class Peer:
    """Reads from one side channel in a thread of its own, so that a dead peer holds up its own requests only."""

    def __init__(
        self, place: Place, model: Model, connection: Connection, finished: deque[Moved], heard_ns: dict[str, int],
        context: zmq.Context,
    ):  # fmt: skip
        """`finished` takes what was read, and what could not be read. `heard_ns`: by transfer, when the peer last said
        that it computes it."""
        self.place, self._model, self._connection = place, model, connection
        self._finished, self._heard_ns = finished, heard_ns
        self._fetches: deque[tuple[KVSource, Sequence[Read]]] = deque()
        self._transfers: dict[str, _Transfer] = {}
        self._failure: tuple[str, float, TransferError] = "", 0.0, TransferError("")  # of which life, and when
        self._heard_s = 0.0  # the last word of the peer
        self._complaints = Complaints()
        self._wakeup = Wakeup(context)
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"kv-peer-{place.port}", daemon=True)
        self._thread.start()
        self.used_s = time.monotonic()

    def fetch(self, source: KVSource, reads: Sequence[Read]) -> None:
        """Reads these blocks, in the order of the prompt, and gives the lease back."""
        self.used_s = time.monotonic()
        self._fetches.append((source, reads))
        self._wakeup.ring()

    def close(self, timeout_s: float = 0.0) -> None:
        """What is queued fails. Waits so long for what is under way."""
        self._is_closing = True
        self._wakeup.ring()
        self._thread.join(timeout_s)
        self._wakeup.close()

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._turn()
            except Exception as error:  # a read that never ended would hold its request for ever
                log.exception("reading from the prefill server %s failed", self.place.name)
                self._fail_all(error)
                self._connection.disconnect()
        over = TransferError("this server ends")
        self._fail_all(over)
        while self._fetches:
            self._failed(self._fetches.popleft()[1], over)
        self._connection.disconnect()
        self._wakeup.socket.close()

    def _turn(self) -> None:
        self._wait()
        while self._fetches and not self._is_closing:
            source, reads = self._fetches.popleft()
            if source.transfer_id:
                self._follow(source, reads)
            else:
                self._fetch(source, reads)
        for progress in self._connection.receive():
            is_last = not self._advance(progress)
            self._heard_s = time.monotonic()  # behind the reads: what they took is no silence of the peer
            if is_last:
                break
        self._look_for_silence(time.monotonic())

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.socket, zmq.POLLIN)
        if (socket := self._connection.socket) is not None:
            poller.register(socket, zmq.POLLIN)
        if not self._fetches and not self._connection.inbox:
            poller.poll(LOOK_MS)
        self._wakeup.clear()

    def _fetch(self, source: KVSource, reads: Sequence[Read]) -> None:
        self._read_all(source.engine_id, reads)
        if source.lease_id and not self._has_failed(source.engine_id):
            self._give_back(source.lease_id)

    def _follow(self, source: KVSource, reads: Sequence[Read]) -> None:
        if (known := self._transfers.get(source.transfer_id)) is not None:  # a second call for the same prompt
            known.reads = deque(sorted((*known.reads, *reads), key=lambda read: read.place))
            self._read_announced(known)
            return
        try:
            self._connected(None)
            self._check_engine(source)
            self._connection.send(wire.Follow(source.transfer_id))
        except Exception as error:
            self._failed(reads, error)
            return
        self._transfers[source.transfer_id] = _Transfer(source, deque(reads), time.monotonic())

    def _check_engine(self, source: KVSource) -> None:
        if source.engine_id != self._model.fingerprint.hex():
            raise TransferError(
                f"the call names the engine {source.engine_id[:80]}, and its /query answers another one; whoever asked "
                "for it has to ask again",
                is_refusal=True,
            )

    def _advance(self, progress: wire.Progress) -> bool:
        """News of a prompt, or of the server that computes it. False: what came behind it is of no use."""
        transfer = self._transfers.get(progress.transfer_id)
        if transfer is None:
            return True
        if progress.engine_id != self._connection.engine_id:
            self._restarted()
            return False
        if transfer.is_known and not progress.is_known:
            self._fail(progress.transfer_id, TransferError("its lease was over before all was read"))
            return True
        if progress.first > len(transfer.slots):  # messages were lost
            self._follow_again()
            return False
        if progress.is_known:
            transfer.is_known, transfer.announced_ns = True, time.monotonic_ns()
            self._heard_ns[progress.transfer_id] = transfer.announced_ns
            transfer.slots += progress.slots[len(transfer.slots) - progress.first :]
            self._read_announced(transfer)
        if progress.is_over:
            self._end(progress)
        return True

    def _read_announced(self, transfer: _Transfer) -> None:
        ready = []
        while transfer.reads and transfer.reads[0].place < len(transfer.slots):
            read = transfer.reads.popleft()
            ready.append(read._replace(place=transfer.slots[read.place]))
        self._read_all(self._connection.engine_id, ready, transfer.announced_ns)

    def _end(self, progress: wire.Progress) -> None:
        """The prompt is computed, or given up. Blocks that were not announced do not come."""
        if progress.error:
            self._fail(progress.transfer_id, TransferError(progress.error))
            return
        transfer, now_ns = self._transfers.pop(progress.transfer_id), time.monotonic_ns()
        self._heard_ns.pop(progress.transfer_id, None)
        absent = Moved(b"", True, False, 0, now_ns, now_ns, is_absent=True, announced_ns=now_ns)
        self._finished.extend(absent._replace(key=read.key) for read in transfer.reads)
        if progress.lease_id:
            self._give_back(progress.lease_id)

    def _restarted(self) -> None:
        """What it computed is lost. Calls that it did not know yet may reach its next life."""
        for transfer_id, transfer in list(self._transfers.items()):
            if transfer.is_known:
                self._fail(transfer_id, TransferError("it was restarted while it computed the prompt"))
        self._follow_again()

    def _follow_again(self) -> None:
        """Over a new connection, from the beginning."""
        self._connection.disconnect()
        try:
            self._connected(None)
            for transfer in self._transfers.values():
                transfer.slots = []
                self._connection.send(wire.Follow(transfer.source.transfer_id))
        except Exception as error:
            self._fail_all(error)

    def _look_for_silence(self, now_s: float) -> None:
        for transfer_id, transfer in list(self._transfers.items()):
            if now_s - max(self._heard_s, transfer.began_s) > SILENCE_S:
                error = TransferError(f"it has said nothing for {SILENCE_S:g} s while it computed the prompt")
                self._failure = "", now_s, error
                self._connection.disconnect()
                self._fail_all(error)
                return
            if not transfer.is_known and now_s - transfer.began_s > UNKNOWN_S:
                self._fail(transfer_id, TransferError(f"no call with this transfer_id reached it in {UNKNOWN_S:g} s"))

    def _fail_all(self, error: Exception) -> None:
        for transfer_id in list(self._transfers):
            self._fail(transfer_id, error)

    def _fail(self, transfer_id: str, error: Exception) -> None:
        self._failed(self._transfers.pop(transfer_id).reads, error)
        self._heard_ns.pop(transfer_id, None)

    def _failed(self, reads: Iterable[Read], error: Exception) -> None:
        now_ns, is_refusal = time.monotonic_ns(), getattr(error, "is_refusal", False)
        sentence = self._sentence(error)
        for read in reads:
            moved = Moved(read.key, True, False, 0, now_ns, now_ns, sentence, is_refusal, announced_ns=now_ns)
            self._finished.append(moved)

    def _sentence(self, error: Exception) -> str:
        what = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
        sentence = f"the KV blocks of the prefill server {self.place.name} could not be read: {what}"
        self._complaints.log("read", "%s", sentence)
        return sentence

    def _read_all(self, engine_id: str, reads: Sequence[Read], announced_ns: int = 0) -> None:
        for begin in range(0, len(reads), BATCH_BLOCKS):
            batch = reads[begin : begin + BATCH_BLOCKS]
            began_ns = time.monotonic_ns()
            try:
                good = self._read(self._connected(engine_id), batch)
            except Exception as failure:  # a read that never ended would hold its request for ever
                self._failed(batch, failure)
                continue
            share_ns = (time.monotonic_ns() - began_ns) // len(batch)
            if lost := [read for read, is_good in zip(batch, good, strict=True) if not is_good]:
                self._failed(lost, TransferError("it does not hold them any more, or its prompt had other tokens"))
            for index, (read, is_good) in enumerate(zip(batch, good, strict=True)):
                if is_good:
                    since_ns = began_ns + index * share_ns
                    size = self._model.block_bytes
                    self._finished.append(
                        Moved(read.key, True, True, size, since_ns, since_ns + share_ns, announced_ns=announced_ns)
                    )

    def _read(self, slots: PeerSlots, batch: Sequence[Read]) -> list[bool]:
        """Which blocks were held all the time while they were read."""
        remote = [read.place for read in batch]
        before = slots.headers(remote)
        slots.read([(read.place, read.slot) for read in batch])
        after = slots.headers(remote)
        return [
            header == again and is_of(header, self._model.fingerprint, read.key)
            for read, header, again in zip(batch, before, after, strict=True)
        ]

    def _give_back(self, lease_id: str) -> None:
        """Not answered: a notice that is lost costs the peer its blocks until the lease expires."""
        try:
            self._connection.send(wire.Release(lease_id))
        except (zmq.ZMQError, TransferError):
            self._complaints.log("release", "a lease of the prefill server %s could not be given back", self.place.name)

    def _connected(self, engine_id: str | None) -> PeerSlots:
        """The slots of that life of the peer. Raises TransferError."""
        if self._is_closing:
            raise TransferError("this server ends")
        if self._has_failed(engine_id):
            raise self._failure[2]
        try:
            return self._connection.connect(engine_id)
        except TransferError as error:
            self._failure = engine_id or "", time.monotonic(), error
            raise

    def _has_failed(self, engine_id: str | None) -> bool:
        life, failed_s, _ = self._failure
        return failed_s > 0 and life == (engine_id or "") and time.monotonic() - failed_s < RETRY_S
