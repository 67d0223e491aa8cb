"""Which replica gets a request: what a router in front of several servers would choose."""

import hashlib
import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar, Protocol

RING_POINTS = 100  # of a replica on the ring of consistent hashing: shares differ by about a tenth
LEAST_MATCH = 0.5  # of a prompt's blocks, as in SGLang's router: for less, such as what all prompts share, load counts


class RoutingPolicy(Protocol):
    """Owns what a router knows. Replicas are numbers from 0 on."""

    sees_ends: ClassVar[bool]  # False: its choices follow from the arrivals alone

    def choose(self, session: bytes, hashes: Sequence[bytes]) -> int:
        """The replica of a request that arrives. `session` names its conversation, `hashes` are the chain hashes of its
        blocks."""
        ...

    def ended(self, replica: int) -> None:
        """A request that this replica was sent has ended, or its client has left."""
        ...


class LiveRequests:
    """The requests in hand of each replica. Of replicas with as few, the one comes first that changed longest ago."""

    def __init__(self, num_replicas: int) -> None:
        self.counts = [0] * num_replicas
        self._changed = list(range(num_replicas))  # replica → number of its last change
        self._changes = num_replicas
        self._heap = [(0, replica, replica) for replica in range(num_replicas)]  # count, change, replica

    def add(self, replica: int, change: int) -> None:
        self.counts[replica] += change
        self._changed[replica] = self._changes
        heapq.heappush(self._heap, (self.counts[replica], self._changes, replica))
        self._changes += 1
        if len(self._heap) > 8 * len(self.counts) + 64:  # mostly stale
            self._heap = [entry for entry in self._heap if self._changed[entry[2]] == entry[1]]
            heapq.heapify(self._heap)

    def least(self) -> int:
        while self._changed[self._heap[0][2]] != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][2]


class RoundRobin:
    sees_ends = False

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas, self._turn = num_replicas, -1

    def choose(self, session: bytes, hashes: Sequence[bytes]) -> int:
        self._turn = (self._turn + 1) % self._num_replicas
        return self._turn

    def ended(self, replica: int) -> None:
        pass


class LeastRequests:
    """The replica with the fewest requests in hand."""

    sees_ends = True

    def __init__(self, num_replicas: int) -> None:
        self._live = LiveRequests(num_replicas)

    def choose(self, session: bytes, hashes: Sequence[bytes]) -> int:
        chosen = self._live.least()
        self._live.add(chosen, 1)
        return chosen

    def ended(self, replica: int) -> None:
        self._live.add(replica, -1)


class ConsistentHash:
    """The replica whose point on a ring follows that of the session (Karger et al., STOC 1997)."""

    sees_ends = False

    def __init__(self, num_replicas: int) -> None:
        ring = sorted((_point(b"%d:%d" % (replica, point)), replica) for replica in range(num_replicas)
                      for point in range(RING_POINTS))  # fmt: skip
        self._points = [point for point, _ in ring]
        self._replicas = [replica for _, replica in ring]

    def choose(self, session: bytes, hashes: Sequence[bytes]) -> int:
        place = bisect_right(self._points, _point(session))
        return self._replicas[place if place < len(self._replicas) else 0]

    def ended(self, replica: int) -> None:
        pass


class PrefixAware:
    """The replica that was last sent the longest beginning of the prompt, if that is LEAST_MATCH of it and its batch is
    not full; else the one with the fewest requests. The router knows what it sent where, and nothing of evictions. It
    remembers `num_blocks` blocks, those that were sent last."""

    sees_ends = True

    def __init__(self, num_replicas: int, max_num_seqs: int, num_blocks: int) -> None:
        self._live = LiveRequests(num_replicas)
        self._max_num_seqs, self._num_blocks = max_num_seqs, num_blocks
        self._sent_to: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, session: bytes, hashes: Sequence[bytes]) -> int:
        sent_to, live = self._sent_to, self._live
        least = int(LEAST_MATCH * len(hashes))
        chosen = next((sent_to[key] for key in reversed(hashes[least:]) if key in sent_to), None)
        if chosen is None or live.counts[chosen] >= self._max_num_seqs:
            chosen = live.least()
        live.add(chosen, 1)
        for key in hashes:
            sent_to[key] = chosen
            sent_to.move_to_end(key)
        while len(sent_to) > self._num_blocks:
            sent_to.popitem(last=False)
        return chosen

    def ended(self, replica: int) -> None:
        self._live.add(replica, -1)


def make_routing(name: str, num_replicas: int, *, max_num_seqs: int, num_blocks: int) -> RoutingPolicy:
    """`num_blocks` and `max_num_seqs` are those of one replica."""
    if name == "round-robin" or num_replicas == 1:
        return RoundRobin(num_replicas)
    if name == "least-requests":
        return LeastRequests(num_replicas)
    if name == "consistent-hash":
        return ConsistentHash(num_replicas)
    assert name == "prefix-aware", "the names are those of sojourn.metrics.prediction.ROUTINGS"
    return PrefixAware(num_replicas, max_num_seqs, num_replicas * num_blocks)


def _point(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest())
