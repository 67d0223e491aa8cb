"""What the exchanges of one rank took, part by part of its steps, and what computation hid of them."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from sojourn.engine.compute.communication.communicator import CollectiveCount, Communicators, TransferTimes
from sojourn.engine.compute.communication.layout import ParallelLayout
from sojourn.engine.techniques.group.rank_step import RankReport

Exchanges = dict[str, tuple[int, int]]  # by collective: bytes and nanoseconds
WAITS = ("recv",)  # for another stage; all others are communication


@dataclass(slots=True)
class StepExchanges:
    """The part of a batch."""

    exchanges: Exchanges = field(default_factory=dict)
    elsewhere_ns: int = 0  # between its parts, where other stages compute the step


class GroupReport(NamedTuple):
    """The part of an outcome."""

    # Rank, and nanoseconds in which it computed, exchanged, and waited for another stage: of this step on rank 0, and
    # of the parts of steps that other ranks reported since the step before.
    ranks: list[tuple[int, int, int, int]]
    exchanges: Exchanges  # of rank 0
    hidden_ns: dict[str, int]  # by collective, since the step before: what computation hid of rank 0's exchanges


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


def report(
    rank: int, duration_ns: int, exchanges: Exchanges, times: TransferTimes | None = None, waited_ns: int = 0
) -> RankReport:
    """`waited_ns`: for another stage, before the part began."""
    communication, bubble = communication_ns(exchanges), bubble_ns(exchanges)
    busy_ns = max(0, duration_ns - communication - bubble)
    return RankReport(rank, busy_ns, communication, waited_ns + bubble, *(times or TransferTimes([], [])))


class HiddenTimes:
    """Of what rank 0 sends to the next stage, and receives from the last: the time in which no rank stood for it.

    The readings of the two ends of a tensor come apart, and in the order of the steps.
    """

    def __init__(self, layout: ParallelLayout):
        last = layout.pipeline_parallel - 1
        self._next_stage, self._last_stage = layout.ranks_per_stage, last * layout.ranks_per_stage
        self._ends: dict[str, tuple[deque[int], deque[int]]] = {"send": (deque(), deque()), "recv": (deque(), deque())}

    def add(self, rank: int, times: TransferTimes) -> None:
        sent, received = self._ends["send"], self._ends["recv"]
        if rank == 0:
            sent[0].extend(times.sent_ns)
            received[1].extend(times.met_ns)
        if rank == self._next_stage:
            sent[1].extend(times.met_ns)
        if rank == self._last_stage:
            received[0].extend(times.sent_ns)

    def take(self) -> dict[str, int]:
        """By collective, of the tensors whose ends are both known since the last call."""
        found = {}
        for name, (sent_ns, met_ns) in self._ends.items():
            while sent_ns and met_ns:
                found[name] = found.get(name, 0) + max(0, met_ns.popleft() - sent_ns.popleft())
        return found


def merged(one: Exchanges, other: Exchanges) -> Exchanges:
    found = dict(one)
    for name, (num_bytes, ns) in other.items():
        own_bytes, own_ns = found.get(name, (0, 0))
        found[name] = own_bytes + num_bytes, own_ns + ns
    return found
