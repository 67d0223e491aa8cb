"""Exchanges by torch.distributed: gloo between processes of a CPU, NCCL between GPUs.

The process groups are made without torch's default group, so that several engines can follow each other in a process.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from time import monotonic_ns, perf_counter_ns

import torch
import torch.distributed as dist

from sojourn.engine.compute.communication.communicator import (
    CollectiveCount,
    CollectiveCounter,
    Communicators,
    Receipt,
    SingleProcess,
    TransferTimes,
)
from sojourn.engine.compute.communication.layout import ParallelLayout

MOST_SENDS = 16  # that may be under way to a rank before the next one waits for the oldest


def connect(layout: ParallelLayout, device: torch.device, folder: Path, timeout_seconds: float) -> Communicators:
    """Meets the other ranks of `layout` at a file of `folder`, which all of them see and which holds no older meeting.

    Every rank calls it, and it returns when all have come. Raises RuntimeError after the timeout, which later
    exchanges have, too. Ranks listen on the loopback interface alone, unless GLOO_SOCKET_IFNAME names another.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(folder / "ranks"), layout.size)
    timeout = timedelta(seconds=timeout_seconds)
    store.set_timeout(timeout)

    def group(name: str, rank: int, size: int) -> dist.ProcessGroup:
        return _process_group(dist.PrefixStore(name, store), rank, size, device, timeout)

    stage, pipeline = SingleProcess(), SingleProcess()
    if layout.ranks_per_stage > 1:
        one = group(f"stage {layout.stage}", layout.rank_in_stage, layout.ranks_per_stage)
        stage = TorchDistributed(one, one, device)
    if layout.pipeline_parallel > 1:
        # Two groups: a NCCL group does its sends and receives in order, and a stage's reply must not wait behind
        # what it sends to the next stage.
        both = [
            group(f"{direction} {layout.rank_in_stage}", layout.stage, layout.pipeline_parallel)
            for direction in ("forward", "backward")
        ]
        pipeline = TorchDistributed(*both, device)
    return Communicators(stage, pipeline)


def _process_group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> dist.ProcessGroup:
    group = dist.ProcessGroup(store, rank, size)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend, kind = dist.ProcessGroupNCCL(store, rank, size, options), dist.ProcessGroup.BackendType.NCCL
    else:
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.type), kind, backend)
    return group


class Arrivals:
    """A thread that waits for what gloo receives, one tensor after another, and reads the clock when it is there.

    gloo moves a tensor only once its receiver has asked for it: a rank that asked after its own computation would wait
    for the whole way, there and back.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[Arrival | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="arrivals", daemon=True)
        self._thread.start()

    def add(self, arrival: "Arrival") -> None:
        self._asked.put(arrival)

    def close(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        while (arrival := self._asked.get()) is not None:
            arrival.watch()


class Arrival:
    """A tensor that gloo receives: `waited` is told when the wait for it began and ended, and when it arrived."""

    def __init__(self, work: dist.Work, x: torch.Tensor, waited: Callable[[torch.Tensor, int, int, int], None]):
        self._work, self._x, self._waited = work, x, waited
        self._arrived_ns, self._error = 0, None
        self._is_there = threading.Event()

    def watch(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._arrived_ns = monotonic_ns()
        self._is_there.set()

    def wait(self) -> torch.Tensor:
        begin_ns = monotonic_ns()
        self._is_there.wait()
        if self._error is not None:
            raise self._error
        self._waited(self._x, begin_ns, monotonic_ns(), self._arrived_ns)
        return self._x


class LateArrival:
    """A tensor that NCCL receives: only asked for when it is waited for, since its kernel would hold the device."""

    def __init__(self, receive: Callable[[], torch.Tensor]):
        self.wait = receive


class TorchDistributed:
    """The ranks of a process group. Sends to lower ranks go through `backward`."""

    def __init__(self, group: dist.ProcessGroup, backward: dist.ProcessGroup, device: torch.device):
        self.rank, self.size = group.rank(), group.size()
        self._group, self._backward, self._device = group, backward, device
        self._sends: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {}
        self._counter = CollectiveCounter()
        self._on_cuda = device.type == "cuda"
        self._timed: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._times = TransferTimes([], [])
        self._arrivals: Arrivals | None = None  # where something is received

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._done("all_reduce", x.nbytes, lambda: self._group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self.size, *x.shape))
        self._done("all_gather", out.nbytes, lambda: self._group._allgather_base(out.flatten(0, 1), x))
        return out

    def all_to_all(self, x: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        out = x.new_empty((sum(received), *x.shape[1:]))
        self._done("all_to_all", x.nbytes, lambda: self._group.alltoall_base(out, x, received, sent))
        return out

    def broadcast(self, x: torch.Tensor, root: int) -> torch.Tensor:
        self._done("broadcast", x.nbytes, lambda: self._group.broadcast(x, root))
        return x

    def send(self, x: torch.Tensor, to: int) -> None:
        begin, sends = perf_counter_ns(), self._sends.setdefault(to, deque())
        if len(sends) >= MOST_SENDS:
            sends.popleft()[0].wait()
        sends.append((self._towards(to > self.rank).send([x], to, 0), x))
        self._counter.add("send", x.nbytes, perf_counter_ns() - begin)
        if not self._on_cuda:
            self._times.sent_ns.append(monotonic_ns())

    def recv(self, x: torch.Tensor, source: int) -> Receipt:
        group = self._towards(source < self.rank)
        if self._on_cuda:

            def receive() -> torch.Tensor:
                self._done("recv", x.nbytes, lambda: group.recv([x], source, 0))
                return x

            return LateArrival(receive)
        if self._arrivals is None:
            self._arrivals = Arrivals()
        arrival = Arrival(group.recv([x], source, 0), x, self._received)
        self._arrivals.add(arrival)
        return arrival

    def take_times(self) -> TransferTimes:
        times, self._times = self._times, TransferTimes([], [])
        return times

    def _received(self, x: torch.Tensor, begin_ns: int, end_ns: int, arrived_ns: int) -> None:
        self._counter.add("recv", x.nbytes, end_ns - begin_ns)
        self._times.met_ns.append(min(begin_ns, arrived_ns))

    def _towards(self, forward: bool) -> dist.ProcessGroup:
        return self._group if forward else self._backward

    def _done(self, name: str, num_bytes: int, exchange: Callable[[], dist.Work]) -> None:
        """Waits for an exchange: on CUDA the current stream does, and the host goes on."""
        if not self._on_cuda:
            begin = perf_counter_ns()
            exchange().wait()
            self._counter.add(name, num_bytes, perf_counter_ns() - begin)
            return
        if torch.cuda.is_current_stream_capturing():  # a graph's exchanges have no times of their own
            exchange().wait()
            return
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        exchange().wait()
        events[1].record()
        self._counter.add(name, num_bytes, 0)
        self._timed.append((name, *events))

    def counts(self) -> dict[str, CollectiveCount]:
        """On CUDA without the times of exchanges that have not ended, and without those of replayed graphs."""
        while self._timed and self._timed[0][2].query():
            name, begin, end = self._timed.popleft()
            self._counter.add_time(name, int(begin.elapsed_time(end) * 1e6))
        return self._counter.counts()

    def close(self) -> None:
        """Ends the groups without waiting for other ranks."""
        if self._arrivals is not None:
            self._arrivals.close()
        self._sends.clear()
        for group in {id(group): group for group in (self._group, self._backward)}.values():
            group.abort() if self._on_cuda else group.shutdown()
