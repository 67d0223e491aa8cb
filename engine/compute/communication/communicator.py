"""How ranks exchange tensors: a swap point. Knows no torch."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class CollectiveCount(NamedTuple):
    """What one kind of exchange has cost since the start."""

    calls: int = 0
    bytes: int = 0  # of the whole tensor: what is reduced, what is gathered, what this rank sends or receives
    nanoseconds: int = 0  # from the call until its result can be used


class CollectiveCounter:
    """Adds up calls, bytes and nanoseconds by the name of the exchange."""

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])

    def add(self, name: str, num_bytes: int, nanoseconds: int) -> None:
        sums = self._sums[name]
        sums[0] += 1
        sums[1] += num_bytes
        sums[2] += nanoseconds

    def add_time(self, name: str, nanoseconds: int) -> None:
        """The time of a call that was counted before it had ended."""
        self._sums[name][2] += nanoseconds

    @contextmanager
    def timed(self, name: str, num_bytes: int) -> Iterator[None]:
        begin = perf_counter_ns()
        yield
        self.add(name, num_bytes, perf_counter_ns() - begin)

    def counts(self) -> dict[str, CollectiveCount]:
        return {name: CollectiveCount(*sums) for name, sums in self._sums.items()}


class Receipt(Protocol):
    """A tensor that another rank sends next."""

    def wait(self) -> "torch.Tensor":
        """The tensor, once it has arrived."""
        ...


class TransferTimes(NamedTuple):
    """Readings of the monotonic clock, which the ranks of a host share: one a tensor, in the order of the calls.

    Between the two readings of a tensor neither rank stands in the exchange: computation hides that time.
    """

    sent_ns: list[int]  # the call of the sender had returned
    met_ns: list[int]  # the tensor had arrived, or the receiver began to wait for it: whichever came first


class Communicator(Protocol):
    """Some ranks, numbered from 0 to size - 1, that call the same exchanges in the same order.

    Tensors are contiguous, and of one device and dtype on all ranks. A rank that is gone, or a timeout, raises
    RuntimeError.
    """

    rank: int
    size: int

    def all_reduce(self, x: "torch.Tensor") -> "torch.Tensor":
        """The sum of all ranks' x, in place."""
        ...

    def all_gather(self, x: "torch.Tensor") -> "torch.Tensor":
        """x [...] of the same shape on all ranks → [size, ...]."""
        ...

    def all_to_all(self, x: "torch.Tensor", sent: list[int], received: list[int]) -> "torch.Tensor":
        """Rows x [sum(sent), ...], sent[r] of them to rank r → rows [sum(received), ...] in the order of ranks."""
        ...

    def broadcast(self, x: "torch.Tensor", root: int) -> "torch.Tensor":
        """x of rank `root`, written into x of the others."""
        ...

    def send(self, x: "torch.Tensor", to: int) -> None:
        """Returns at once. x must not change afterwards; the communicator keeps it until it has arrived."""
        ...

    def recv(self, x: "torch.Tensor", source: int) -> Receipt:
        """Has x filled with what the other rank sends next; returns at once. Calls are waited for in their order."""
        ...

    def counts(self) -> dict[str, CollectiveCount]:
        """By the names of metrics.records.COLLECTIVES, since the start."""
        ...

    def take_times(self) -> TransferTimes:
        """Of what was sent and waited for since the last call; on CUDA none."""
        ...

    def close(self) -> None: ...


class SingleProcess:
    """One rank alone: every exchange gives what it was given, and costs nothing."""

    rank, size = 0, 1

    def all_reduce(self, x: "torch.Tensor") -> "torch.Tensor":
        return x

    def all_gather(self, x: "torch.Tensor") -> "torch.Tensor":
        return x[None]

    def all_to_all(self, x: "torch.Tensor", sent: list[int], received: list[int]) -> "torch.Tensor":
        return x

    def broadcast(self, x: "torch.Tensor", root: int) -> "torch.Tensor":
        return x

    def send(self, x: "torch.Tensor", to: int) -> None:
        raise AssertionError("there is no other rank")

    def recv(self, x: "torch.Tensor", source: int) -> Receipt:
        raise AssertionError("there is no other rank")

    def counts(self) -> dict[str, CollectiveCount]:
        return {}

    def take_times(self) -> TransferTimes:
        return TransferTimes([], [])

    def close(self) -> None:
        pass


class Communicators(NamedTuple):
    """Those of one rank."""

    stage: Communicator = SingleProcess()  # the ranks of its stage
    pipeline: Communicator = SingleProcess()  # the ranks of its place in every stage; numbers are stages

    def counts(self) -> dict[str, CollectiveCount]:
        """Of both together."""
        sums = self.stage.counts()
        for name, count in self.pipeline.counts().items():
            sums[name] = CollectiveCount(*map(sum, zip(sums.get(name, CollectiveCount()), count, strict=True)))
        return sums

    def close(self) -> None:
        self.stage.close()
        self.pipeline.close()
