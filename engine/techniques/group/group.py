"""Rank 0's side of a parallel group: starts the other ranks, compares them with itself, hands them steps, ends them."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import torch
import zmq

from sojourn.engine.compute.communication.communicator import Communicators
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.runner.build import chosen_device
from sojourn.engine.techniques.group import messages
from sojourn.engine.techniques.group.identity import difference, identity
from sojourn.engine.techniques.group.layout import layout_of, timeout_seconds
from sojourn.engine.techniques.group.rank_step import BetweenSteps, Conclude, RankReport, RankStep
from sojourn.engine.techniques.group.torch_distributed import connect
from sojourn.engine.techniques.group.watch import Watch, ending
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import ModelError, SojournError

log = logging.getLogger(__name__)
MODULE = "sojourn.engine.techniques.group.rank"
LOOK_MS = 100  # between two looks whether a rank that is waited for still lives
END_SECONDS = 10  # for killed processes to be gone
HELLO_SECONDS = 600  # for a rank to say that it is there: cold imports, and samples of many files of weights
SEND_MS = 5000  # a message to a rank that is gone has nowhere to go: then the rank counts as lost

Message = TypeVar("Message", bound=messages.FromRank)


class GroupError(SojournError):
    """A rank of a parallel group is lost, and with it the group."""


class Group:
    """The other ranks, and the ways to them. `on_loss` is called from another thread with a sentence when one ends.

    The system kills the other ranks when the thread ends that made the group, however it ends. Every wait for a rank is
    booked as phase `group` of the start. Raises ModelError where a rank cannot take part.
    """

    def __init__(
        self, config: EngineConfig, on_loss: Callable[[str], None], startup: StartupClock, folder: Path | None = None
    ):
        """`folder`: where the group's own folder of sockets is made."""
        device = chosen_device(config)
        check_devices(config, device)
        self.layout = layout_of(config, 0)
        self.communicators = Communicators()
        self._startup = startup
        self._sockets = Path(tempfile.mkdtemp(prefix="sojourn-group-", dir=folder))  # mode 0700
        self._context = zmq.Context()
        self._from_ranks, self._beats = self._bound(zmq.PULL, "from-ranks"), self._bound(zmq.PULL, "beats")
        self._to_ranks = [self._bound(zmq.PUSH, f"to-rank-{rank}") for rank in self._others]
        self._processes: list[subprocess.Popen] = []
        self._watch: Watch | None = None
        self._on_loss = on_loss
        self._hung_seconds = config.core_hung_seconds
        try:
            with startup.phase("group"):
                self._processes = [start_rank(self._sockets, rank, config) for rank in self._others]
                self._greet(config)
                self.communicators = connect(self.layout, device, self._sockets, timeout_seconds(config))
        except BaseException:
            self.close()
            raise

    @property
    def _others(self) -> range:
        return range(1, self.layout.size)

    def agree(self, num_blocks: int) -> int:
        """The blocks that every rank has room for: the least of all. Raises GroupError where one of them is lost."""
        least = min(num_blocks, *(said.num_blocks for said in self._each(messages.Planned)))
        self._say(messages.Agreed(least))
        return least

    def begin(self) -> None:
        """Waits until all ranks compute steps. From then on a rank that ends is a loss."""
        self._each(messages.Joined)
        self._watch = Watch(self._beats, self._processes, self._hung_seconds, self._on_loss)

    def send(self, work: RankStep | BetweenSteps) -> None:
        """Hands work to all other ranks. Raises GroupError where one of them is lost."""
        if self._watch is not None and self._watch.loss is not None:
            raise GroupError(self._watch.loss)
        self._say(work)

    def conclude(self) -> None:
        """Has the other ranks of the first stage conclude a step. Raises GroupError where one of them is lost."""
        self._say(Conclude(), self.layout.ranks_per_stage - 1)

    def loss(self) -> GroupError | None:
        """Why an exchange has just failed, where a rank is lost; waits until the watch has looked."""
        sentence = None if self._watch is None else self._watch.wait_for_loss()
        return None if sentence is None else GroupError(sentence)

    def take_reports(self) -> list[RankReport]:
        """Of steps that the other ranks have computed, since the last call."""
        reports = []
        while self._from_ranks.poll(0):
            message = self._read()
            if isinstance(message, RankReport):
                reports.append(message)
        return reports

    def close(self) -> None:
        """Ends the other ranks: no process and no file stays."""
        if self._watch is not None:
            self._watch.stop()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # it is killed; on a busy machine it takes its time
                process.wait(END_SECONDS)
        self.communicators.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._sockets, ignore_errors=True)

    def _greet(self, config: EngineConfig) -> None:
        ours = identity(config, model_folder(config.model))
        for hello in self._each(messages.Hello, HELLO_SECONDS):
            if (sentence := difference(ours, hello.identity)) is not None:
                raise ModelError(f"rank {hello.rank} {sentence}")
        self._say(messages.Welcome())

    def _each(self, kind: type[Message], within_seconds: float = math.inf) -> list[Message]:
        """One message of a kind from each rank. Raises ModelError where a rank ends, is late, or cannot go on."""
        found: dict[int, Message] = {}
        until = time.monotonic() + within_seconds
        with self._startup.phase("group"):
            while missing := set(self._others) - found.keys():
                if not self._from_ranks.poll(LOOK_MS):
                    self._raise_if_ended()
                    if time.monotonic() > until:
                        raise ModelError(
                            f"rank {min(missing)} said nothing within {within_seconds:g} s of its start; see whether "
                            "its process is stopped, and start again"
                        )
                    continue
                message = self._read()
                if isinstance(message, messages.Broken):
                    raise ModelError(f"rank {message.rank}: {message.sentence}")
                if isinstance(message, kind):
                    found[message.rank] = message
        return list(found.values())

    def _raise_if_ended(self) -> None:
        for rank, process in zip(self._others, self._processes, strict=True):
            if process.poll() is not None and not self._from_ranks.poll(0):
                raise ModelError(f"rank {rank} {ending(process)} before it could compute; see the log")

    def _read(self) -> messages.FromRank | None:
        """A message; None for bytes that are none of ours."""
        try:
            return messages.decode_from_rank(self._from_ranks.recv())
        except messages.UNREADABLE:
            return None

    def _say(self, message: messages.ToRank, num_ranks: int | None = None) -> None:
        """To all other ranks, or to the first ones. Raises GroupError where one of them is lost."""
        encoded = messages.encode(message)
        for rank, socket in enumerate(self._to_ranks[:num_ranks], 1):
            try:
                socket.send(encoded)
            except zmq.Again:
                loss = None if self._watch is None else self._watch.loss
                raise GroupError(loss or f"rank {rank} of the parallel group is lost: it takes no messages") from None

    def _bound(self, kind: int, name: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        socket.setsockopt(zmq.SNDTIMEO, SEND_MS)
        socket.bind(f"ipc://{self._sockets}/{name}")
        return socket


@contextmanager
def forming(config: EngineConfig, startup: StartupClock, folder: Path | None, *, ends_process: bool) -> Iterator[Group]:
    """A group whose ranks load their shards while the caller loads that of rank 0. All compute steps afterwards.

    `ends_process`: a rank that is lost ends this process, which is a core process.
    """
    group = Group(config, end_process if ends_process else warn, startup, folder)
    try:
        yield group
        group.begin()
    except BaseException:
        group.close()
        raise


def check_devices(config: EngineConfig, device: torch.device) -> None:
    """Raises ModelError where the ranks are more than the CUDA devices."""
    if device.type == "cuda" and config.num_ranks > (count := torch.cuda.device_count()):
        raise ModelError(f"{config.num_ranks} ranks need a CUDA device each, and there are {count}; use fewer ranks")


def end_process(sentence: str) -> None:
    """For a core process: its front fails the open streams at once, and starts another core."""
    print(f"sojourn: {sentence}", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # the thread of the steps may wait for the lost rank


def warn(sentence: str) -> None:
    """For a core inside another program: its next exchange, or its next step, raises."""
    log.warning("%s", sentence)


def start_rank(sockets: Path, rank: int, config: EngineConfig) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-m", MODULE, str(os.getpid())], stdin=subprocess.PIPE)
    work = {"sockets": str(sockets), "rank": rank, "config": config.model_dump(mode="json")}
    with suppress(BrokenPipeError):  # it has ended already: who waits for it says so
        process.stdin.write(json.dumps(work).encode() + b"\n")
        process.stdin.close()
    return process
