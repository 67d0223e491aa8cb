"""One replay on several processes, over the messages of Locust's master and workers.

The master starts the run, gives each present worker one part of the schedule, and sets the start time. A part is given
once: requests that a lost worker did not send are missing, and a late worker gets no part. The master sends no request.
Users play no role: Locust moves them between workers.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic_ns
from typing import Any

import gevent
import gevent.event

from sojourn.loadgen.client.dispatcher import LEAD_NS, OnFinished
from sojourn.loadgen.client.event_log import recording
from sojourn.loadgen.run.replay import Plan, StartedRun, finish_replay, prepare_part
from sojourn.loadgen.schedule.shards import DONE, LOST, SENDING, Shard, part_of, write_shards
from sojourn.metrics.errors import ExperimentError, SojournError
from sojourn.metrics.machine.host import boot_id

PART, CLOCK, READY, START, ENDED = (f"sojourn_{word}" for word in ("part", "clock", "ready", "start", "ended"))
POLL_S = 0.1
STOP_S = 15.0  # for stopped workers to write their records
CLOCK_ROUNDS = 20
CLOCK_TIMEOUT_S = 5.0


class MasterReplay:
    """Owns the master's view of its workers. `runner` is Locust's MasterRunner."""

    def __init__(self, runner):
        self._runner = runner
        self._shards: dict[str, Shard] = {}  # by worker
        self._ready: set[str] = set()
        self._id_prefix = ""  # of the run under way: a worker may still speak of the one before
        self._failures: list[str] = []
        self._stop_by_ns: int | None = None
        for word, listener in ((CLOCK, answer_clock(runner)), (READY, self._on_ready), (ENDED, self._on_ended)):
            runner.register_message(word, listener)

    def run(self, started: StartedRun) -> None:
        """Distributes the parts, waits for all of them and finishes the run. Raises ExperimentError."""
        self._ready.clear()
        self._failures.clear()
        self._stop_by_ns = None
        self._id_prefix = started.plan.id_prefix
        run_dir = Path(started.plan.run_dir)
        workers = [client.id for client in self._alive()]
        self._shards = {
            worker: Shard(number, worker, len(part_of(started.schedule, number, len(workers), started.loop)))
            for number, worker in enumerate(workers)
        }
        with recording(run_dir):
            try:
                self._write(run_dir)
                for worker, shard in self._shards.items():
                    part = {"number": shard.number, "of": len(workers), "boot_id": boot_id()}
                    self._runner.send_message(PART, {"plan": asdict(started.plan), **part}, worker)
                self._wait(run_dir)
            finally:
                self._lose_all_but(set())
                self._write(run_dir)
                finish_replay(started)
        if self._failures:
            raise ExperimentError("; ".join(dict.fromkeys(self._failures)))

    def stop(self) -> None:
        """Locust has stopped the workers. They have STOP_S to write their records."""
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
                self._lose_all_but(open_workers)  # a missing one may come back, but gets no START
                started = True
            gevent.sleep(POLL_S)
            self._write(run_dir)

    def _lose_all_but(self, present: set[str]) -> None:
        """Marks the other workers as lost, unless their part has ended."""
        for worker, shard in self._shards.items():
            if shard.state == SENDING and worker not in present:
                self._shards[worker] = replace(shard, state=LOST)

    def _open(self) -> set[str]:
        """The present workers that have not ended. A missing one may come back while others send."""
        alive = {client.id for client in self._alive()}
        return {worker for worker, shard in self._shards.items() if shard.state == SENDING and worker in alive}

    def _alive(self) -> list:
        return [client for client in self._runner.clients.all if client.state != "missing"]

    def _write(self, run_dir: Path) -> None:
        write_shards(run_dir, list(self._shards.values()))

    def _on_ready(self, environment, msg, **_: Any) -> None:
        if self._is_of_this_run(msg):
            self._ready.add(msg.node_id)
            uncertainty_ms = msg.data["clock_uncertainty_ms"]
            self._shards[msg.node_id] = replace(self._shards[msg.node_id], clock_uncertainty_ms=uncertainty_ms)

    def _is_of_this_run(self, msg) -> bool:
        """A worker of an older version names no run; its refusal must be heard."""
        return msg.node_id in self._shards and msg.data.get("id_prefix", self._id_prefix) == self._id_prefix

    def _on_ended(self, environment, msg, **_: Any) -> None:
        if not self._is_of_this_run(msg):
            return
        if msg.data["failure"]:
            self._failures.append(msg.data["failure"])
        else:
            state = DONE if msg.data["whole"] else LOST
            self._shards[msg.node_id] = replace(self._shards[msg.node_id], state=state)


class WorkerReplay:
    """Owns the part that this process sends. `runner` is Locust's WorkerRunner."""

    def __init__(self, runner, on_finished: OnFinished):
        self._runner = runner
        self._on_finished = on_finished
        self._start = gevent.event.AsyncResult()
        self._sending: gevent.Greenlet | None = None
        self._stopping = False
        runner.register_message(PART, self._on_part)
        runner.register_message(START, self._on_start)
        self._clock = WorkerClock(runner)

    def stop(self) -> None:
        """Cancels requests in flight, and returns once all events are written."""
        if self._sending is not None:
            if not self._stopping:
                self._stopping = True  # a second kill would cut off the writing that the first one began
                self._sending.kill(block=False)
            self._sending.join()

    def _on_part(self, environment, msg, **_: Any) -> None:
        if self._sending is not None and not self._sending.ready():
            failure = "a worker still writes what it recorded of the load before; start again when it is done"
            self._send_end(msg.data["plan"]["id_prefix"], False, failure)
            return
        self._stopping = False
        self._start = gevent.event.AsyncResult()
        self._sending = gevent.spawn(self._send, msg.data)

    def _on_start(self, environment, msg, **_: Any) -> None:
        self._start.set(msg.data["start_ns"])

    def _send(self, part: dict[str, Any]) -> None:
        """Sends the part and reports the end to the master. It must not raise: nothing would catch it."""
        whole, failure = False, ""
        try:
            plan, shift_ns = Plan(**part["plan"]), self._clock.shift_ns(part["boot_id"])
            client = prepare_part(plan, part["number"], part["of"], self._on_finished, shift_ns=shift_ns)

            def agree_start() -> int:
                ready = {"id_prefix": plan.id_prefix, "clock_uncertainty_ms": self._clock.uncertainty_ms}
                self._runner.send_message(READY, ready)
                return self._start.get() - shift_ns

            with recording(client.run_dir):
                client.run(agree_start)
            whole = True
        except SojournError as error:
            failure = str(error)
        except Exception as error:
            failure = f"part {part['number']} of the replay ended early: {type(error).__name__}: {error}"
        finally:
            self._send_end(part["plan"]["id_prefix"], whole, failure)

    def _send_end(self, id_prefix: str, whole: bool, failure: str) -> None:
        self._runner.send_message(ENDED, {"id_prefix": id_prefix, "whole": whole, "failure": failure})


class WorkerClock:
    """Asks the master for its clock."""

    def __init__(self, runner):
        self._runner = runner
        self._times: gevent.event.AsyncResult = gevent.event.AsyncResult()
        self.uncertainty_ms: float | None = None  # of the last shift; None on the master's host
        runner.register_message(CLOCK, self._on_time)

    def shift_ns(self, master_boot_id: str | None) -> int:
        """To add to a stamp of this host for the master's clock. Raises ExperimentError."""
        self.uncertainty_ms = None
        if master_boot_id is not None and master_boot_id == boot_id():
            return 0
        shift_ns, self.uncertainty_ms = clock_shift([self._request_time() for _ in range(CLOCK_ROUNDS)])
        return shift_ns

    def _on_time(self, environment, msg, **_: Any) -> None:
        self._times.set((msg.data["asked_ns"], msg.data["master_ns"], monotonic_ns()))

    def _request_time(self) -> tuple[int, int, int]:
        self._times = gevent.event.AsyncResult()
        self._runner.send_message(CLOCK, {"asked_ns": monotonic_ns()})
        try:
            return self._times.get(timeout=CLOCK_TIMEOUT_S)
        except gevent.Timeout:
            raise ExperimentError(f"the master did not tell its clock within {CLOCK_TIMEOUT_S:g} s") from None


def answer_clock(runner) -> Callable[..., None]:
    """The master's answer to the question of a `WorkerClock`."""

    def answer(environment, msg, **_: Any) -> None:
        runner.send_message(CLOCK, {"asked_ns": msg.data["asked_ns"], "master_ns": monotonic_ns()}, msg.node_id)

    return answer


def clock_shift(rounds: list[tuple[int, int, int]]) -> tuple[int, float]:
    """(asked, the other's clock, answered) of each round → ns to add to this clock, and the uncertainty in ms. The
    fastest round bounds it best (Cristian, 1989)."""
    requested_ns, other_ns, answered_ns = min(rounds, key=lambda each: each[2] - each[0])
    return other_ns - (requested_ns + answered_ns) // 2, (answered_ns - requested_ns) / 2e6
