"""What the exchanges of one rank took, part by part of its steps."""

from engine.compute.communication.communicator import CollectiveCount, Communicators
from engine.runner.rank_step import RankReport

Exchanges = dict[str, tuple[int, int]]  # by collective: bytes and nanoseconds
WAITS = ("recv",)  # for another stage; all others are communication


class Traffic:
    """Counts since the call before. Steps of one rank run one after the other."""

    def __init__(self, communicators: Communicators):
        self._communicators = communicators
        self._before: dict[str, CollectiveCount] = {}

    def take(self) -> Exchanges:
        counts = self._communicators.counts()
        before, self._before = self._before, counts
        found = {}
        for name, count in counts.items():
            last = before.get(name, CollectiveCount())
            if count.calls > last.calls:
                found[name] = (count.bytes - last.bytes, count.nanoseconds - last.nanoseconds)
        return found


def communication_ns(exchanges: Exchanges) -> int:
    return sum(ns for name, (_, ns) in exchanges.items() if name not in WAITS)


def bubble_ns(exchanges: Exchanges) -> int:
    return sum(ns for name, (_, ns) in exchanges.items() if name in WAITS)


def report(rank: int, duration_ns: int, exchanges: Exchanges) -> RankReport:
    communication, bubble = communication_ns(exchanges), bubble_ns(exchanges)
    return RankReport(rank, max(0, duration_ns - communication - bubble), communication, bubble)


def merged(one: Exchanges, other: Exchanges) -> Exchanges:
    found = dict(one)
    for name, (num_bytes, ns) in other.items():
        own_bytes, own_ns = found.get(name, (0, 0))
        found[name] = own_bytes + num_bytes, own_ns + ns
    return found
