"""What a prefill server holds for decode servers: from the prompt's first block to the end of its lease.

A prompt that will be handed over wants its full blocks in host memory. Each is stored there as soon as it is computed,
beside the chunks behind it, and held. When the prompt is done and the last of them is stored, a lease begins.

A prompt with a transfer id is announced from its arrival on. By chunks, decode servers may read each stored block at
once; else they may when the lease begins.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec.structs import replace

from sojourn.engine.kv_source import KVAddress, KVSource
from sojourn.engine.techniques.handover.announcements import Announcements
from sojourn.engine.techniques.handover.headers import SlotHeaders
from sojourn.engine.techniques.handover.lease import Lease, LeaseTable
from sojourn.engine.techniques.tiers.tiers import KVTiers
from sojourn.engine.techniques.tiers.transfers import Prefetch
from sojourn.metrics.memory.kv_load import NOTHING_LOADED

ENDS_WITH_TOKEN = ("stop", "length")  # finish reasons of a prompt that was computed


class HandedOver(Protocol):
    """A request whose prompt another server continues."""

    id: str
    arrival_index: int
    prompt_tokens: int
    finish_reason: str | None
    error: str | None
    parts: dict[str, Any]  # "handover": what the decode server is told; "tiers": bytes that are held

    def block_hashes(self, block_size: int, count: int) -> list[bytes]: ...


@dataclass(slots=True)
class _Open:
    """A prompt that is being computed, or whose last blocks are being stored."""

    request: HandedOver
    transfer_id: str  # under which a decode server may follow it; empty: none does
    keys: list[bytes]
    wanted: Prefetch
    finished_ns: int | None = None
    sealed: list[int] = field(default_factory=list)  # slots of its first blocks, which are announced
    num_seen: int = 0  # blocks that were held when it was announced last


class Handoffs:
    """Owned by the loop; leases and announcements are shared with the thread of the side channel."""

    def __init__(
        self, tiers: KVTiers, leases: LeaseTable, announcements: Announcements, headers: SlotHeaders,
        address: KVAddress, *, block_size: int, lease_ns: int, by_chunk: bool = True,
        close: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        """`by_chunk`: blocks are announced while the prompt is computed. `close` ends the side channel."""
        self.address = address
        self.leases = leases
        self.announcements = announcements
        self._by_chunk = by_chunk
        self._tiers, self._headers, self._close = tiers, headers, close
        self._size, self._lease_ns = block_size, lease_ns
        self._open: dict[int, _Open] = {}  # by arrival index

    @property
    def is_waiting(self) -> bool:
        """The blocks of a prompt that was computed are being stored."""
        return any(each.finished_ns is not None for each in self._open.values())

    @property
    def wants_blocks_now(self) -> bool:
        """A decode server waits for blocks that were computed."""
        return any(each.finished_ns is not None or self._is_by_chunk(each) for each in self._open.values())

    def begin(self, request: HandedOver, transfer_id: str = "") -> None:
        """A request arrived whose prompt will be handed over."""
        keys = list(request.block_hashes(self._size, request.prompt_tokens // self._size))
        wanted = Prefetch()
        self._tiers.holds.hold_or_wait(wanted, keys)
        handoff = self._open[request.arrival_index] = _Open(request, transfer_id, keys, wanted)
        if transfer_id:
            self.announcements.begin(transfer_id, request.arrival_index)
            self._announce(handoff)

    def finish(self, request: HandedOver, now_ns: int) -> bool:
        """It ended in a step. True where `take_ready` has it later, with a prompt that is of use."""
        if request.finish_reason not in ENDS_WITH_TOKEN:
            self.cancel(request)
            return False
        handoff = self._open[request.arrival_index]
        handoff.finished_ns = now_ns
        self._tiers.holds.stop_waiting(handoff.wanted, handoff.keys, unless=self._tiers.is_coming)
        return True

    def cancel(self, request: HandedOver) -> None:
        """It ended without a prompt that is of use. Nothing happens to those that have a lease."""
        handoff = self._open.pop(request.arrival_index, None)
        if handoff is not None:
            self._tiers.holds.stop_waiting(handoff.wanted, handoff.keys, unless=self._tiers.is_coming)
            for slot in handoff.sealed:
                self._headers.unseal(slot)
            self._tiers.holds.let_go(handoff.wanted)
            if handoff.transfer_id:
                reason = f"it gave the prompt up: {request.error or request.finish_reason}"
                self.announcements.end(handoff.transfer_id, request.arrival_index, error=reason)

    def announce(self) -> None:
        """Decode servers may read what was stored since the last call, of prompts that are being computed."""
        for each in self._open.values():
            self._announce(each)

    def take_ready(self, now_ns: int) -> list[tuple[Any, int]]:
        """The requests whose blocks are there for another server from now on, and when their prompt was computed."""
        ready = []
        for index, each in list(self._open.items()):
            if each.finished_ns is not None and each.wanted.is_done:
                del self._open[index]
                parts = each.request.parts
                source = parts["handover"] = self._grant(each, now_ns)
                moved_bytes = len(source.slots) * self._tiers.block_bytes
                parts["tiers"] = replace(parts.get("tiers") or NOTHING_LOADED, transfer_bytes=moved_bytes)
                ready.append((each.request, each.finished_ns))
        return ready

    def close(self) -> None:
        """Nobody asks any more."""
        self._close()

    def end_leases(self, now_ns: int) -> None:
        """Frees the blocks of leases that were given back, or that are over."""
        released, expired = self.leases.take_released(), self.leases.take_expired(now_ns)
        if not released and not expired:
            return
        for lease in (*released, *expired):
            for key in lease.keys:
                self._headers.unseal(self._tiers.host[key].slot)
                self._tiers.host.complete_load(key)
            if lease.transfer_id:
                self.announcements.forget(lease.transfer_id, lease.id)
        ended = {"released": len(released), "expired": len(expired)}
        self._tiers.lent(0, self._headers.num_sealed, ended)

    def _announce(self, handoff: _Open) -> None:
        if self._is_by_chunk(handoff) and handoff.num_seen < len(handoff.wanted.held):
            handoff.num_seen = len(handoff.wanted.held)
            if fresh := self._seal(handoff):
                self.announcements.add(handoff.transfer_id, handoff.request.arrival_index, fresh)

    def _is_by_chunk(self, handoff: _Open) -> bool:
        return self._by_chunk and bool(handoff.transfer_id)

    def _seal(self, handoff: _Open) -> list[int]:
        """Slots of blocks that continue the sealed prefix, and are held: they have a header from now on."""
        held, fresh = set(handoff.wanted.held), []
        for key in handoff.keys[len(handoff.sealed) :]:
            if key not in held:
                break
            slot = self._tiers.host[key].slot
            self._headers.seal(slot, key)
            fresh.append(slot)
        handoff.sealed += fresh
        return fresh

    def _grant(self, handoff: _Open, now_ns: int) -> KVSource:
        """The lease holds what the request held: the prefix that is whole. Nobody can guess its name."""
        request, fresh = handoff.request, self._seal(handoff)
        keys = handoff.keys[: len(handoff.sealed)]
        for key in keys:
            self._tiers.host.prepare_load(key)
        self._tiers.holds.let_go(handoff.wanted)
        lease_id = f"{request.id}-{secrets.token_hex(8)}"
        if keys:
            self.leases.grant(Lease(lease_id, tuple(keys), now_ns + self._lease_ns, handoff.transfer_id))
            self._tiers.lent(len(keys), self._headers.num_sealed)
        if handoff.transfer_id:
            held_by = lease_id if keys else ""
            self.announcements.end(handoff.transfer_id, request.arrival_index, fresh, lease_id=held_by)
        where = self.address
        return KVSource(where.engine_id, where.host, where.port, lease_id, handoff.sealed, request.prompt_tokens)
