"""Builds what a prefill or a decode server needs to exchange KV blocks with others, around a runner."""

import secrets
from functools import partial

from sojourn.engine.config import EngineConfig
from sojourn.engine.kv_source import KVAddress
from sojourn.engine.runner.runner import ModelRunner
from sojourn.engine.settings.handover import LEASE_SECONDS, LOOPBACK, gives, may_read_from, takes
from sojourn.engine.techniques.handover import wire
from sojourn.engine.techniques.handover.announcements import Announcements
from sojourn.engine.techniques.handover.connection import Model
from sojourn.engine.techniques.handover.handoffs import Handoffs
from sojourn.engine.techniques.handover.headers import SlotHeaders
from sojourn.engine.techniques.handover.lease import LeaseTable
from sojourn.engine.techniques.handover.peers import PeerStore
from sojourn.engine.techniques.handover.shared_memory import SharedMemoryTransport, SharedSegment
from sojourn.engine.techniques.handover.side_channel import SideChannel
from sojourn.engine.techniques.handover.transport import KVTransport
from sojourn.engine.techniques.tiers.build import host_room, make_tiers
from sojourn.engine.techniques.tiers.host_slots import HostSlots
from sojourn.engine.techniques.tiers.slow_tier import PeerTier
from sojourn.engine.techniques.tiers.tiers import KVTiers


class KVExchange:
    """The memory that peers read, and what says whose blocks are ours. Raises ModelError where it cannot be had."""

    def __init__(self, config: EngineConfig, runner: ModelRunner):
        self._config = config
        room = host_room(config, runner)
        self._segment = SharedSegment(room.num_slots, room.block_bytes)
        self.memory, self.hands_over = self._segment.slots, gives(config.kv_role)
        self._model = Model(room.fingerprint, model_facts(config, runner), room.block_bytes)
        self._transport: KVTransport | None = None

    def peer(self, slots: HostSlots) -> PeerTier | None:
        """The prefill servers that this one reads from."""
        if not takes(self._config.kv_role):
            return None
        store = PeerStore(self._model, self._connected(slots), partial(may_read_from, self._config.kv_peers))
        return PeerTier(store, is_strict=self._config.kv_transfer_failure == "error")

    def handoffs(self, tiers: KVTiers, slots: HostSlots) -> Handoffs:
        """What decode servers read from this one, and the side channel at which they ask."""
        config, leases, announcements, engine_id = self._config, LeaseTable(), Announcements(), secrets.token_hex(16)
        transport = self._connected(slots)
        host = config.kv_transfer_host or LOOPBACK
        welcome = wire.Welcome(
            wire.VERSION, engine_id, self._model.fingerprint, self._model.facts, transport.name, transport.descriptor()
        )
        channel = SideChannel(host, config.kv_transfer_port or 0, welcome, announcements, leases.release)

        def close() -> None:
            channel.close()
            transport.close()  # until then what peers read stays registered

        return Handoffs(
            tiers, leases, announcements, SlotHeaders(self._segment.headers, self._model.fingerprint),
            KVAddress(engine_id, host, channel.port, self._model.fingerprint.hex()), block_size=config.block_size,
            lease_ns=round((config.kv_lease_seconds or LEASE_SECONDS) * 1e9),
            by_chunk=config.kv_transfer_granularity != "whole", close=close,
        )  # fmt: skip

    def _connected(self, slots: HostSlots) -> KVTransport:
        """One transport for both directions."""
        if self._transport is None:
            self._transport = _transport(self._config.kv_transport or "shm", self._segment, slots)
        return self._transport


def make_handover(config: EngineConfig, runner: ModelRunner) -> tuple[KVTiers, Handoffs | None]:
    """The tiers of a prefill or a decode server, and what it hands over. Raises ModelError."""
    exchange = KVExchange(config, runner)
    tiers = make_tiers(config, runner, exchange)
    return tiers, exchange.handoffs(tiers, runner.part("tiers").slots) if exchange.hands_over else None


def _transport(name: str, segment: SharedSegment, slots: HostSlots) -> KVTransport:
    if name == "shm":
        return SharedMemoryTransport(segment, slots.slot_bytes)
    from sojourn.engine.techniques.handover.nixl import NixlTransport  # only now: it loads NIXL

    return NixlTransport(segment, slots.slot_bytes)


def model_facts(config: EngineConfig, runner: ModelRunner) -> dict[str, str]:
    """What the fingerprint covers, in words for whoever has to set it alike."""
    return {
        "model": config.served_model_name or config.model.rstrip("/").rsplit("/", 1)[-1],
        "block_size": str(config.block_size),
        "kv_cache_dtype": str(runner.placed.kv_dtype).removeprefix("torch."),
        "dtype": str(runner.placed.dtype).removeprefix("torch."),
        "weights": config.weights,
        "max_model_len": str(runner.placed.max_model_len),
        "device": runner.placed.device.type,
        "attention": type(runner.eager.attention).__name__,
    }
