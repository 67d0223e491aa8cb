"""One replay on several processes, over the messages of Locust's master and workers.

The master begins the run, gives each worker that is there one part of the schedule, and says when it begins. A part is
given once and to one process: what a lost worker did not send is missing, and a worker that comes late has no part.
The master builds no request and sends none. Users play no role: Locust moves them between workers as it sees fit.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

import gevent
import gevent.event

from loadgen.client.dispatcher import LEAD_NS, OnFinished
from loadgen.client.event_log import recording
from loadgen.run.replay import Begun, Plan, finish_replay, prepare_part
from loadgen.schedule.shards import DONE, LOST, SENDING, Shard, part_of, write_shards
from metrics.errors import ExperimentError, SojournError
from metrics.machine.host import boot_id

PART, CLOCK, READY, START, ENDED = (f"sojourn_{word}" for word in ("part", "clock", "ready", "start", "ended"))
POLL_S = 0.1
STOP_S = 15.0  # for workers that were told to stop to write what they have
CLOCK_ROUNDS = 20
CLOCK_TIMEOUT_S = 5.0


class MasterReplay:
    """Owns what the master knows of its workers. `runner` is Locust's MasterRunner."""

    def __init__(self, runner):
        self._runner = runner
        self._shards: dict[str, Shard] = {}  # by worker
        self._ready: set[str] = set()
        self._id_prefix = ""  # of the run under way: a worker may still speak of the one before
        self._failures: list[str] = []
        self._stop_by_ns: int | None = None
        for word, listener in ((CLOCK, self._tell_time), (READY, self._heard_ready), (ENDED, self._heard_ended)):
            runner.register_message(word, listener)

    def run(self, begun: Begun) -> None:
        """Gives out the parts, waits for all of them and finishes the run. Raises ExperimentError."""
        self._ready.clear()
        self._failures.clear()
        self._stop_by_ns = None
        self._id_prefix = begun.plan.id_prefix
        run_dir = Path(begun.plan.run_dir)
        workers = [client.id for client in self._alive()]
        self._shards = {
            worker: Shard(number, worker, len(part_of(begun.schedule, number, len(workers), begun.loop)))
            for number, worker in enumerate(workers)
        }
        with recording(run_dir):
            try:
                self._write(run_dir)
                for worker, shard in self._shards.items():
                    part = {"number": shard.number, "of": len(workers), "boot_id": boot_id()}
                    self._runner.send_message(PART, {"plan": begun.plan.as_message(), **part}, worker)
                self._wait(run_dir)
            finally:
                self._settle(run_dir)
                finish_replay(begun)
        if self._failures:
            raise ExperimentError("; ".join(dict.fromkeys(self._failures)))

    def stop(self) -> None:
        """Locust has told the workers to stop. They have a while to write what they have."""
        self._stop_by_ns = self._stop_by_ns or monotonic_ns() + int(STOP_S * 1e9)

    def _wait(self, run_dir: Path) -> None:
        """Until every part has ended or its worker is lost."""
        started = False
        while self._open() and not self._failures and (self._stop_by_ns is None or monotonic_ns() < self._stop_by_ns):
            open_workers = self._open()
            if not started and self._stop_by_ns is None and open_workers <= self._ready:
                start_ns = monotonic_ns() + LEAD_NS
                for worker in open_workers:
                    self._runner.send_message(START, {"start_ns": start_ns}, worker)
                # One that Locust misses just now may come back, but nobody will tell it to begin.
                self._lose(lambda worker, told=open_workers: worker not in told)
                started = True
            gevent.sleep(POLL_S)
            self._write(run_dir)

    def _settle(self, run_dir: Path) -> None:
        self._lose(lambda _: True)
        self._write(run_dir)

    def _lose(self, is_lost: Callable[[str], bool]) -> None:
        """Gives up workers whose part has not ended."""
        for worker, shard in self._shards.items():
            if shard.state == SENDING and is_lost(worker):
                self._shards[worker] = shard.became(LOST)

    def _open(self) -> set[str]:
        """The workers that are there and have not ended. One that Locust misses may come back while others send."""
        alive = {client.id for client in self._alive()}
        return {worker for worker, shard in self._shards.items() if shard.state == SENDING and worker in alive}

    def _alive(self) -> list:
        return [client for client in self._runner.clients.all if client.state != "missing"]

    def _write(self, run_dir: Path) -> None:
        write_shards(run_dir, list(self._shards.values()))

    def _tell_time(self, environment, msg, **_: Any) -> None:
        self._runner.send_message(CLOCK, {"asked_ns": msg.data["asked_ns"], "master_ns": monotonic_ns()}, msg.node_id)

    def _heard_ready(self, environment, msg, **_: Any) -> None:
        if self._is_of_this_run(msg):
            self._ready.add(msg.node_id)
            uncertainty_ms = msg.data["clock_uncertainty_ms"]
            self._shards[msg.node_id] = replace(self._shards[msg.node_id], clock_uncertainty_ms=uncertainty_ms)

    def _is_of_this_run(self, msg) -> bool:
        """A worker of an older version names no run; that it refuses its part must be heard."""
        return msg.node_id in self._shards and msg.data.get("id_prefix", self._id_prefix) == self._id_prefix

    def _heard_ended(self, environment, msg, **_: Any) -> None:
        if not self._is_of_this_run(msg):
            return
        if msg.data["failure"]:
            self._failures.append(msg.data["failure"])
        elif msg.data["whole"]:
            self._shards[msg.node_id] = self._shards[msg.node_id].became(DONE)
        else:
            self._shards[msg.node_id] = self._shards[msg.node_id].became(LOST)


class WorkerReplay:
    """Owns the one part that this process sends. `runner` is Locust's WorkerRunner."""

    def __init__(self, runner, on_finished: OnFinished):
        self._runner = runner
        self._on_finished = on_finished
        self._start = gevent.event.AsyncResult()
        self._times: gevent.event.AsyncResult = gevent.event.AsyncResult()
        self._sending: gevent.Greenlet | None = None
        self._stopping = False
        runner.register_message(PART, self._heard_part)
        runner.register_message(START, self._heard_start)
        runner.register_message(CLOCK, self._heard_time)

    def stop(self) -> None:
        """Cancels what is in flight and returns once it is written."""
        if self._sending is not None:
            if not self._stopping:
                self._stopping = True  # a second kill would cut off the writing that the first one began
                self._sending.kill(block=False)
            self._sending.join()

    def _heard_part(self, environment, msg, **_: Any) -> None:
        if self._sending is not None and not self._sending.ready():
            failure = "a worker still writes what it recorded of the load before; start again when it is done"
            self._tell_end(msg.data["plan"]["id_prefix"], False, failure)
            return
        self._stopping = False
        self._start = gevent.event.AsyncResult()
        self._sending = gevent.spawn(self._send, msg.data)

    def _heard_start(self, environment, msg, **_: Any) -> None:
        self._start.set(msg.data["start_ns"])

    def _heard_time(self, environment, msg, **_: Any) -> None:
        self._times.set((msg.data["asked_ns"], msg.data["master_ns"], monotonic_ns()))

    def _send(self, part: dict[str, Any]) -> None:
        """Sends the part, and tells the master how that ended. Nothing may be raised here: nobody would hear it."""
        whole, failure = False, ""
        try:
            plan, shift_ns, uncertainty_ms = Plan(**part["plan"]), 0, None
            if part["boot_id"] is None or part["boot_id"] != boot_id():  # another host has another monotonic clock
                shift_ns, uncertainty_ms = self._compare_clocks()
            client = prepare_part(plan, part["number"], part["of"], self._on_finished, shift_ns=shift_ns)

            def agree_start() -> int:
                told = {"id_prefix": plan.id_prefix, "clock_uncertainty_ms": uncertainty_ms}
                self._runner.send_message(READY, told)
                return self._start.get() - shift_ns

            with recording(client.run_dir):
                client.run(agree_start)
            whole = True
        except SojournError as error:
            failure = str(error)
        except Exception as error:
            failure = f"part {part['number']} of the replay ended early: {type(error).__name__}: {error}"
        finally:
            self._tell_end(part["plan"]["id_prefix"], whole, failure)

    def _tell_end(self, id_prefix: str, whole: bool, failure: str) -> None:
        self._runner.send_message(ENDED, {"id_prefix": id_prefix, "whole": whole, "failure": failure})

    def _compare_clocks(self) -> tuple[int, float]:
        """What to add to this clock for the master's, and how far that may be off: half of the fastest round trip."""
        return clock_shift([self._ask_time() for _ in range(CLOCK_ROUNDS)])

    def _ask_time(self) -> tuple[int, int, int]:
        self._times = gevent.event.AsyncResult()
        self._runner.send_message(CLOCK, {"asked_ns": monotonic_ns()})
        try:
            return self._times.get(timeout=CLOCK_TIMEOUT_S)
        except gevent.Timeout:
            raise ExperimentError(f"the master did not tell its clock within {CLOCK_TIMEOUT_S:g} s") from None


def clock_shift(rounds: list[tuple[int, int, int]]) -> tuple[int, float]:
    """(asked, the other's clock, answered) of each round → nanoseconds to add to this clock for the other's, and the
    uncertainty in ms. The fastest round bounds it best (Cristian, 1989)."""
    asked_ns, other_ns, answered_ns = min(rounds, key=lambda each: each[2] - each[0])
    return other_ns - (asked_ns + answered_ns) // 2, (answered_ns - asked_ns) / 2e6
