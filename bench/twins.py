"""Servers of ours that differ in what they book, over one model in one core process, and that work in short turns.

How fast a process computes depends on where its memory happens to lie: two servers of the same settings differ by some
per cent for as long as they live. And how fast a machine computes depends on what others do on it. Either would pass
for a cost. Twins have the same weights, the same KV cache and the same threads; each has a front, a loop, a scheduler
and books of its own, and a client. All are loaded at once, and one of them works for some hundredths of a second, then
the next: front and client of the others are stopped (SIGSTOP), and the core runs the loop of the one. A server's own
time stands still while it is stopped; rates and gaps are of that time.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zmq

from bench.client_process import Client
from bench.json_process import ROOT, environment
from bench.results import BenchError
from bench.servers import HOST, Server
from bench.twin_core import stop_address
from bench.workloads import Workload
from engine import messages
from engine.config import EngineConfig


@dataclass(slots=True)
class Turn:
    """One of a twin: when it began and ended, and what its processes took of a CPU meanwhile, in seconds."""

    begin_ns: int
    end_ns: int
    cpu: dict[str, float]  # front, core


@dataclass(slots=True)
class Served:
    """What a twin did: its turns, and of each request, by its own time in nanoseconds, when each piece of text was
    read."""

    turns: list[Turn] = field(default_factory=list)
    text_ns: list[np.ndarray] = field(default_factory=list)

    def own_ns(self, at_ns: Any) -> np.ndarray:
        """Moments of the clock as the twin's own time, which passes in its turns only."""
        begins, ends = (np.array([getattr(turn, name) for turn in self.turns]) for name in ("begin_ns", "end_ns"))
        worked = np.concatenate(([0], np.cumsum(ends - begins)))
        edges = np.stack((begins, ends), axis=1).ravel()
        return np.interp(at_ns, edges, np.stack((worked[:-1], worked[1:]), axis=1).ravel())

    def progress(self, output_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Moments of its own time, and the tokens that were there by then. A piece of text stands for an equal share of
        its request's tokens: one that is half a character comes with the next."""
        at_ns = np.concatenate(self.text_ns)
        tokens = np.concatenate([np.full(len(stamps), output_len / len(stamps)) for stamps in self.text_ns])
        order = np.argsort(at_ns, kind="stable")
        return at_ns[order], np.cumsum(tokens[order])

    def gaps_ms(self) -> list[np.ndarray]:
        """Between the texts of each request, but those in which the turn changed, which takes a moment. So of a long
        gap more are left out than of a short one, of all twins alike."""
        ends = np.cumsum([turn.end_ns - turn.begin_ns for turn in self.turns])
        turns = [np.searchsorted(ends, stamps) for stamps in self.text_ns]
        return [np.diff(stamps)[np.diff(turn) == 0] / 1e6 for stamps, turn in zip(self.text_ns, turns, strict=True)]

    def cpu_us(self, at_ns: np.ndarray) -> dict[str, np.ndarray]:
        """Microseconds that its processes had taken at those moments of its own time."""
        ends = np.cumsum([0, *(turn.end_ns - turn.begin_ns for turn in self.turns)])
        taken = {process: np.cumsum([0, *(turn.cpu[process] for turn in self.turns)]) for process in self.turns[0].cpu}
        return {process: 1e6 * np.interp(at_ns, ends, seconds) for process, seconds in taken.items()}


class Telemetry(NamedTuple):
    """The setting of a twin, which may have books in its core and none in its front."""

    front: str
    core: str


class Twins:
    """A context manager. `telemetry` by name; a run directory is recorded for each whose front is `full`."""

    def __init__(self, model: str, settings: dict[str, Any], telemetry: dict[str, Telemetry]):
        self._model, self._settings, self._telemetry = model, settings, telemetry
        self._servers: dict[str, Server] = {}
        self._clients: dict[str, Client] = {}
        self._stops: dict[str, zmq.Socket] = {}

    def __enter__(self) -> "Twins":
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sojourn-twins-")))
            self._folder = folder
            self._start_core(folder, stack)
            try:
                for name in self._telemetry:
                    self._servers[name] = self._front(name, folder)
                    stack.callback(self._servers[name].stop)
                    self._servers[name].launch()
                for name, server in self._servers.items():
                    server.wait_until_ready()
                    self._clients[name] = stack.enter_context(Client())
            except BenchError as error:
                raise BenchError(f"{error}; {self._last_words()}") from None
            stack.callback(self._let_all_work)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_core(self, folder: Path, stack: ExitStack) -> None:
        context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        for name in self._telemetry:
            self._stops[name] = context.socket(zmq.PUSH)
            self._stops[name].connect(stop_address(folder, name))
        with (folder / "core.log").open("wb") as log:
            self._core = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "bench.twin_core", folder, *self._telemetry],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=ROOT,
                    env=environment(),
                )
            )
        stack.callback(self._core.terminate)

    def _let_all_work(self) -> None:
        for name in self._servers:
            self._signal(name, signal.SIGCONT)

    def serve(self, workload: Workload, concurrency: int, turn_seconds: float) -> dict[str, Served]:
        """All of them serve the requests, `concurrency` at a time, in turns of about that length; the slowest ends
        alone. Raises BenchError where a server did other work than it was asked for."""
        served = {name: Served() for name in self._servers}
        answers: dict[str, Exception | None] = {}
        for name in self._servers:
            self._signal(name, signal.SIGSTOP)

        def ask(name: str) -> None:
            try:
                self._clients[name].run(
                    self._servers[name], workload, concurrency, stream=True, stamps=self._stamps(name)
                )
                answers[name] = None
            except Exception as error:  # else the turns would never end
                answers[name] = error

        asking = [threading.Thread(target=ask, args=(name,), daemon=True) for name in self._servers]
        for each in asking:
            each.start()
        dice = random.Random(0)  # turns of one length could keep step with something else that the machine does
        while len(answers) < len(served):
            for name in served:
                if name not in answers:
                    served[name].turns.append(self._turn(name, turn_seconds * dice.uniform(0.5, 1.5), answers))
        for each in asking:
            each.join()
        for name, error in answers.items():
            if error is not None:
                raise error
            stamps = json.loads(self._stamps(name).read_bytes())
            served[name].text_ns = [served[name].own_ns(each) for each in stamps]
        return served

    def _turn(self, name: str, seconds: float, answers: dict) -> Turn:
        """Ends early where the twin has answered all."""
        before, begin_ns = self._servers[name].cpu_seconds(), time.monotonic_ns()
        self._signal(name, signal.SIGCONT)
        with suppress(BrokenPipeError):  # of a core that is dead, which its answer tells
            self._core.stdin.write(f"{name}\n")
            self._core.stdin.flush()
        end = time.monotonic() + seconds
        while name not in answers and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
        self._stops[name].send(messages.encode(messages.Stop()))
        if not self._core.stdout.readline():
            raise BenchError(f"the core of the twins died; {self._last_words()}")
        self._signal(name, signal.SIGSTOP)
        end_ns, after = time.monotonic_ns(), self._servers[name].cpu_seconds()
        return Turn(begin_ns, end_ns, {process: after[process] - before[process] for process in after})

    def _last_words(self) -> str:
        said = (self._folder / "core.log").read_text(errors="replace").strip().splitlines()
        return f"it said: {said[-1]}" if said else "it said nothing"

    def _stamps(self, name: str) -> Path:
        return self._folder / f"{name}.stamps.json"

    def _signal(self, name: str, number: int) -> None:
        self._servers[name].signal(number)
        if name in self._clients:
            os.kill(self._clients[name].pid, number)

    def _front(self, name: str, folder: Path) -> Server:
        telemetry = self._telemetry[name]
        records = folder / "runs" / name if telemetry.front == "full" else None

        def command(port: int) -> list[str]:
            config = EngineConfig(
                model=self._model, host=HOST, port=port, served_model_name="m", telemetry=telemetry.front,
                run_dir=records,
                drain_seconds=0, **self._settings,
            )  # fmt: skip
            told = [str(folder / f"{name}.json"), str(self._core.pid), str(len(self._telemetry)), telemetry.core]
            return [sys.executable, "-m", "bench.twin_front", *told, config.model_dump_json()]

        return Server(name, "m", command, settings=self._settings, ready_path="/ready", core_pid=self._core.pid)
