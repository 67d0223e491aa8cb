"""What a prefill server holds for decode servers: from the prompt's first block to the end of its lease.

A prompt that will be handed over wants its full blocks in host memory. Each is stored there as soon as it is computed,
beside the chunks behind it, and held. When the prompt is done and the last of them is stored, a lease begins.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec.structs import replace

from engine.kv_source import KVSource
from engine.memory.tiers.tiers import KVTiers
from engine.memory.tiers.transfers import Prefetch
from engine.memory.transfer.headers import SlotHeaders
from engine.memory.transfer.lease import Lease, LeaseTable
from metrics.memory.kv_load import NOTHING_LOADED, KVLoad

ENDS_WITH_TOKEN = ("stop", "length")  # finish reasons of a prompt that was computed


class HandedOver(Protocol):
    """A request whose prompt another server continues."""

    id: str
    arrival_index: int
    prompt_tokens: int
    finish_reason: str | None
    kv_source: KVSource | None  # written here: what the decode server is told
    kv_load: KVLoad | None  # likewise: bytes that are held

    def block_hashes(self, block_size: int, count: int) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where decode servers find this life of the engine."""

    engine_id: str
    host: str
    port: int


@dataclass(slots=True)
class _Open:
    """A prompt that is being computed, or whose last blocks are being stored."""

    request: HandedOver
    keys: list[bytes]
    wanted: Prefetch
    finished_ns: int | None = None


class Handoffs:
    """Owned by the loop; only the lease table is shared with the thread of the side channel."""

    def __init__(
        self, tiers: KVTiers, leases: LeaseTable, headers: SlotHeaders, address: Address, *, block_size: int,
        lease_ns: int, close: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        """`close` ends the side channel."""
        self.address = address
        self.leases = leases
        self._tiers, self._headers, self._close = tiers, headers, close
        self._size, self._lease_ns = block_size, lease_ns
        self._open: dict[int, _Open] = {}  # by arrival index

    @property
    def is_waiting(self) -> bool:
        """The blocks of a prompt that was computed are being stored."""
        return any(each.finished_ns is not None for each in self._open.values())

    def begin(self, request: HandedOver) -> None:
        """A request arrived whose prompt will be handed over."""
        keys = list(request.block_hashes(self._size, request.prompt_tokens // self._size))
        wanted = Prefetch()
        self._tiers.holds.hold_or_wait(wanted, keys)
        self._open[request.arrival_index] = _Open(request, keys, wanted)

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
            self._tiers.holds.let_go(handoff.wanted)

    def take_ready(self, now_ns: int) -> list[tuple[Any, int]]:
        """The requests whose blocks are there for another server from now on, and when their prompt was computed."""
        ready = []
        for index, each in list(self._open.items()):
            if each.finished_ns is not None and each.wanted.is_done:
                del self._open[index]
                source = each.request.kv_source = self._grant(each, now_ns)
                moved_bytes = len(source.slots) * self._tiers.block_bytes
                each.request.kv_load = replace(each.request.kv_load or NOTHING_LOADED, transfer_bytes=moved_bytes)
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
        ended = {"released": len(released), "expired": len(expired)}
        self._tiers.lent(0, self._headers.num_sealed, ended)

    def _grant(self, handoff: _Open, now_ns: int) -> KVSource:
        """The lease holds what the request held: the prefix that is whole. Nobody can guess its name."""
        held, keys = set(handoff.wanted.held), []
        for key in handoff.keys:
            if key not in held:
                break
            keys.append(key)
        host = self._tiers.host
        for key in keys:
            host.prepare_load(key)
        self._tiers.holds.let_go(handoff.wanted)
        slots = [host[key].slot for key in keys]
        for slot, key in zip(slots, keys, strict=True):
            self._headers.seal(slot, key)
        lease_id = f"{handoff.request.id}-{secrets.token_hex(8)}"
        if keys:
            self.leases.grant(Lease(lease_id, tuple(keys), now_ns + self._lease_ns))
            self._tiers.lent(len(keys), self._headers.num_sealed)
        where = self.address
        return KVSource(where.engine_id, lease_id, slots, where.host, where.port, handoff.request.prompt_tokens)
