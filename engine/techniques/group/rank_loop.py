"""What a rank beside the first does: it loads its shard, and computes what rank 0 plans."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue

import zmq

from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.process import freeze_startup_objects
from sojourn.engine.techniques.computing import computing
from sojourn.engine.techniques.group import messages
from sojourn.engine.techniques.group.member import Member
from sojourn.engine.techniques.group.rank_step import BetweenSteps, Conclude, RankStep
from sojourn.metrics.errors import SojournError

BEAT_SECONDS = 1.0
POLL_SECONDS = 1.0  # between two looks whether rank 0 is there
FAREWELL_MS = 1000  # for the last message to leave


def run(core_pid: int, sockets: Path, rank: int, config: EngineConfig) -> int:
    """Computes until rank 0 ends this process. The exit code: 1 where it cannot take part."""
    mailbox = Mailbox(sockets, rank)
    try:
        techniques = computing(config, rank)
        member = Member(config, model_folder(config.model), rank, mailbox, sockets, techniques)
        if config.faults is not None:
            _plant(config.faults, member)
        mailbox.say(messages.Joined(rank))
        freeze_startup_objects()
        threading.Thread(target=_beat, args=(mailbox.context, sockets, rank), daemon=True).start()
        if not member.layout.is_first_stage:
            mailbox.listen(member.expect)
        while os.getppid() == core_pid:
            if (work := mailbox.next_work()) is None:
                continue
            report = member.follow(work)
            if report is not None and config.telemetry == "full":
                mailbox.say(report)
    except SojournError as error:
        mailbox.say(messages.Broken(rank, str(error)))
        return 1
    except Exception as error:
        mailbox.say(messages.Broken(rank, f"{type(error).__name__}: {error}"))
        raise
    finally:
        mailbox.close()
    return 0


def _plant(faults: str, member: Member) -> None:
    from sojourn.engine.faults.plan import planned
    from sojourn.engine.faults.rank import plant_in_rank

    plant_in_rank(member.runner, planned(faults))


class Mailbox:
    """The ways from and to rank 0, whose ends it has bound in `folder`."""

    def __init__(self, folder: Path, rank: int):
        self.context = zmq.Context()
        self._inbox = self.context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.connect(f"ipc://{folder}/to-rank-{rank}")
        self._outbox = self.context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(f"ipc://{folder}/from-ranks")
        self._work: SimpleQueue[RankStep | Conclude | BetweenSteps | Exception] | None = None  # read by a thread

    def say(self, message: messages.FromRank) -> None:
        self._outbox.send(messages.encode(message))

    def expect(self, kind: type[messages.ToRank]) -> messages.ToRank:
        """The next message, which is of this kind; others are dropped."""
        while True:
            if isinstance(message := self._read(), kind):
                return message

    def listen(self, on_step: Callable[[RankStep], None]) -> None:
        """From now on a thread reads, and gives each step to `on_step` while the one before may be computed."""
        self._work = SimpleQueue()
        threading.Thread(target=self._listen, args=(on_step, self._work), name="inbox", daemon=True).start()

    def next_work(self) -> RankStep | Conclude | BetweenSteps | None:
        """None where none came within a second. Raises what `on_step` raised."""
        if self._work is None:
            message = self._read() if self._inbox.poll(POLL_SECONDS * 1e3) else None
            return message if isinstance(message, RankStep | Conclude | BetweenSteps) else None
        try:
            found = self._work.get(timeout=POLL_SECONDS)
        except Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self._outbox.close(linger=FAREWELL_MS)
        self.context.destroy(linger=0)

    def _listen(self, on_step: Callable[[RankStep], None], work: SimpleQueue) -> None:
        try:
            while True:
                message = self._read()
                if isinstance(message, RankStep):
                    on_step(message)
                if isinstance(message, RankStep | BetweenSteps):
                    work.put(message)
        except Exception as error:
            work.put(error)

    def _read(self) -> messages.ToRank | None:
        try:
            return messages.decode_to_rank(self._inbox.recv())
        except messages.UNREADABLE:
            return None


def _beat(context: zmq.Context, sockets: Path, rank: int) -> None:
    """Says each second that this process is not stopped. A thread: a step may take longer."""
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{sockets}/beats")
    waiting = threading.Event()
    while not waiting.wait(BEAT_SECONDS):
        socket.send(messages.encode(messages.Beat(rank)))
