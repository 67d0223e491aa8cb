"""The store behind the tier `peer`: the prefill servers that a decode server reads from."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from sojourn.engine.kv_source import KVSource
from sojourn.engine.techniques.handover.connection import Connection, Model, Place
from sojourn.engine.techniques.handover.peer import Peer, Read
from sojourn.engine.techniques.handover.transport import KVTransport
from sojourn.engine.techniques.tiers.store import Moved

MOST_PEERS = 64
CLOSE_S = 3.0


class PeerStore:
    """Blocks of leases and of transfers, each read once, in the order of its prompt. A lease is given back then."""

    name = "peer"

    def __init__(self, model: Model, transport: KVTransport, allowed: Callable[[str], bool]):
        """`allowed` hosts are those that a client's `remote_host` may name."""
        self.block_bytes = model.block_bytes
        self._model, self._transport, self._allowed = model, transport, allowed
        self._finished: deque[Moved] = deque()
        self._context = zmq.Context()
        self._peers: dict[Place, Peer] = {}
        self._heard_ns: dict[str, int] = {}  # by transfer
        self._reads: list[tuple[bytes, int]] = []  # since the last `fetch`: key and our slot

    def known(self) -> list[bytes]:
        """None: requests say what a peer holds for them."""
        return []

    def read(self, key: bytes, slot: int) -> None:
        self._reads.append((key, slot))

    def fetch(self, source: KVSource, keys: Sequence[bytes]) -> None:
        """Begins the reads since the last call: blocks of this source, whose prompt has these keys."""
        reads, self._reads = self._reads, []
        places = dict(zip(keys, range(len(keys)) if source.transfer_id else source.slots, strict=False))
        try:
            peer = self._peer(source)
        except ValueError as refusal:
            now_ns = time.monotonic_ns()
            for key, _ in reads:
                self._finished.append(Moved(key, True, False, 0, now_ns, now_ns, str(refusal), is_refusal=True))
            return
        peer.fetch(source, [Read(key, places[key], slot) for key, slot in reads])

    def heard_ns(self, transfer_id: str) -> int:
        return self._heard_ns.get(transfer_id, 0)

    def write(self, key: bytes, slot: int) -> None:
        raise NotImplementedError("peers are only read")

    def remove(self, key: bytes) -> None:
        """It is the peer's."""

    def finished(self) -> list[Moved]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def wait(self) -> None:
        time.sleep(0.002)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close(CLOSE_S)
        self._context.destroy(linger=500)
        self._transport.close()

    def _peer(self, source: KVSource) -> Peer:
        """Raises ValueError with a sentence for an address that is not allowed."""
        place = Place(source.host, source.port, by_query=bool(source.transfer_id))
        if place not in self._peers:
            if not self._allowed(source.host):
                raise ValueError(
                    f"this server may not read KV blocks from {source.host[:80]}; kv_peers lists the hosts that it may"
                )
            if len(self._peers) >= MOST_PEERS:
                oldest = min(self._peers, key=lambda each: self._peers[each].used_s)
                self._peers.pop(oldest).close()
            connection = Connection(place, self._model, self._transport, self._allowed, self._context)
            self._peers[place] = Peer(
                place, self._model, connection, self._finished, self._heard_ns, self._context
            )  # fmt: skip
        return self._peers[place]
