"""One run of a locustfile's `LLMUser`s: begun at START, written and diagnosed at STOP, alone or over workers.

The master records the run and sends each worker its part: where its indexes lie and when the run began. A worker that
comes later asks for one. At STOP each worker ends its users, writes its records and reports how many requests it sent.
"""

import os
import secrets
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from locust import events  # first: it replaces what blocks in the standard library
from locust.runners import MasterRunner, WorkerRunner

import gevent  # isort: skip
import gevent.event

from sojourn.loadgen.client.event_log import recording
from sojourn.loadgen.locust_page import GoodputPage
from sojourn.loadgen.run.distributed import CLOCK, STOP_S, WorkerClock, answer_clock
from sojourn.loadgen.run.replay import ended_with, fault_of, report
from sojourn.loadgen.run.run_files import create_run, finish_run
from sojourn.loadgen.schedule.shards import DONE, LOST, SENDING, Shard, write_shards
from sojourn.loadgen.target.endpoint import parse_base_url, served_model
from sojourn.loadgen.target.processes import end_with
from sojourn.loadgen.target.scrape import Scraper
from sojourn.loadgen.tasks.llm_user import LLMUser, target_of
from sojourn.loadgen.tasks.load import Part, TaskLoad
from sojourn.metrics.errors import ExperimentError, InputError, SojournError
from sojourn.metrics.exit_codes import Ended
from sojourn.metrics.machine.host import boot_id
from sojourn.metrics.request.objectives import parse_bounds, source_of
from sojourn.metrics.run.directory import RunDirectory

PART, ASK, STOP, ENDED = (f"sojourn_task_{word}" for word in ("part", "ask", "stop", "ended"))
STRIDE = 64  # at least: the processes that one run can have
DRAIN_S = 30.0  # that tasks under way have after STOP, where --stop-timeout gives no other time
POLL_S = 0.2
CLOSED = (
    "closed loop: users of a locustfile, each with at most one request in flight. A request is due when its task asks "
    "for it, so a slow server is asked less; do not read these latencies as those of an open load"
)


class Tasks:
    """Owns the run of this process: alone, as the master or as a worker. `environment.sojourn_tasks` leads here."""

    def __init__(self, environment):
        self.environment = environment
        self.model, self.endpoint = "", None
        self._load: TaskLoad | None = None
        self._is_ready = gevent.event.Event()
        runner = environment.runner
        self._runner, self._is_worker = runner, isinstance(runner, WorkerRunner)
        self._recorder = None if self._is_worker else Recorder(environment)
        self._shards: dict[str, Shard] = {}
        self._part: Part | None = None
        self._stop_by_s: float | None = None  # once STOP was given
        if isinstance(runner, MasterRunner):
            runner.register_message(ASK, lambda msg, **_: self._send_part(msg.node_id))
            runner.register_message(ENDED, self._on_ended)
            runner.register_message(CLOCK, answer_clock(runner))
        elif self._is_worker:
            self._clock = WorkerClock(runner)
            runner.register_message(PART, lambda msg, **_: gevent.spawn(self._on_part, msg.data))
            runner.register_message(STOP, lambda **_: gevent.spawn(self._stop_worker))

    def load(self, wait_s: float) -> TaskLoad | None:
        """What users send with; None where the run was refused or has ended."""
        self._is_ready.wait(wait_s)
        return self._load

    def drain_s(self) -> float:
        """How long a request may still take whose user is killed: at STOP until its end, else as for a task that has
        to go. Locust also kills users that it takes for waiting, and that send just then."""
        stop_by_s, drain_s = self._stop_by_s, self.environment.stop_timeout
        return drain_s if stop_by_s is None else stop_by_s - time.monotonic()

    def begin(self, **_: Any) -> None:
        """At START. It must not raise: Locust would print a traceback and go on."""
        self._stop_by_s = None
        if self._is_worker:
            if self._load is None:  # its part may have come before
                self._is_ready.clear()
                self._runner.send_message(ASK, {})
            return
        self._is_ready.clear()
        self._shards = {}
        try:
            self.endpoint, self.model, self._part = self._recorder.begin()
            if isinstance(self._runner, MasterRunner):
                for client in self._runner.clients.all:
                    self._send_part(client.id)
            else:
                self._start_load(self._part)
        except Exception as error:
            known = isinstance(error, SojournError | OSError)
            code = getattr(error, "exit_code", Ended.FAILED)
            self._recorder.refuse(str(error) if known else f"the run did not begin: {error!r}", code)
            self._is_ready.set()
            gevent.spawn(self._runner.quit if self.environment.parsed_options.headless else self._runner.stop)

    def stopping(self, **_: Any) -> None:
        """The master waits until its workers have written: Locust itself does not when it quits."""
        self._stop_by_s = time.monotonic() + self.environment.stop_timeout
        if self._shards:
            for worker in self._shards:
                self._runner.send_message(STOP, {}, worker)
            until = time.monotonic() + self.environment.stop_timeout + STOP_S
            while self._sending() and time.monotonic() < until:
                gevent.sleep(POLL_S)

    def stopped(self, **_: Any) -> None:
        """All users have ended."""
        load, self._load = self._load, None
        fault = ""
        if load is not None:
            try:
                load.close()
            except (SojournError, OSError) as error:
                fault = str(error)
        if self._is_worker:
            if load is not None:
                ended = {"id_prefix": load.part.id_prefix, "requests": load.num_recorded, "fault": fault}
                self._runner.send_message(ENDED, ended | {"clock_uncertainty_ms": self._clock.uncertainty_ms})
            return
        lost = [replace(shard, state=LOST) if shard.state == SENDING else shard for shard in self._shards.values()]
        self._recorder.end(lost, fault)

    def quitting(self, **_: Any) -> None:
        """Before the process ends, what was recorded is written: a signal ends Locust without STOP."""
        if self._load is not None or (self._recorder and self._recorder.run is not None):
            self._runner.stop()
        if self._is_worker:
            self.environment.process_exit_code = 0  # the master speaks for all

    def _start_load(self, part: Part, shift_ns: int = 0) -> None:
        targets = [target_of(user, "chat") for user in llm_users(self.environment)]
        self._load = TaskLoad(part, self.endpoint, any(each.connections == "reuse" for each in targets), shift_ns)
        self._is_ready.set()

    def _send_part(self, worker: str) -> None:
        """In the master. A worker has one part in a run."""
        number = len(self._shards)
        if self._part is None or worker in self._shards:
            return
        if number == self._part.stride:
            fault = f"worker {worker} sends nothing: the run has room for {number} workers; start it again for more"
            print(f"error: {fault}", file=sys.stderr, flush=True)
            self._runner.send_message(PART, {"fault": fault}, worker)
            return
        self._shards[worker] = Shard(number, worker, 0)
        part = asdict(replace(self._part, first_index=number))
        self._runner.send_message(
            PART, {"part": part, "boot_id": boot_id(), "model": self.model, "host": self._recorder.host}, worker
        )

    def _sending(self) -> bool:
        alive = {client.id for client in self._runner.clients.all if client.state != "missing"}
        return any(shard.state == SENDING and worker in alive for worker, shard in self._shards.items())

    def _on_ended(self, msg: Any, **_: Any) -> None:
        if self._part is None or msg.data["id_prefix"] != self._part.id_prefix or msg.node_id not in self._shards:
            return
        self._shards[msg.node_id] = replace(
            self._shards[msg.node_id], state=LOST if msg.data["fault"] else DONE, requests=msg.data["requests"],
            clock_uncertainty_ms=msg.data["clock_uncertainty_ms"],
        )  # fmt: skip

    def _on_part(self, message: dict[str, Any]) -> None:
        """In a worker."""
        try:
            if "fault" in message:
                raise ExperimentError(message["fault"])
            shift_ns = self._clock.shift_ns(message["boot_id"])
            self.model, users = message["model"], llm_users(self.environment)
            self.endpoint = endpoint_of(message["host"], users)
            self._start_load(Part(**message["part"]), shift_ns)
        except (SojournError, OSError) as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            self._is_ready.set()

    def _stop_worker(self) -> None:
        self._runner.stop()
        self.environment.stop_timeout = 0.0  # for which Locust would wait once more


class Recorder:
    """Owns the run directory, the scrapes and the page of the process that speaks for all."""

    def __init__(self, environment):
        self.environment = environment
        self.run: RunDirectory | None = None
        self.host = ""
        self.page = GoodputPage(environment, replays=False)
        self._open = ExitStack()
        self._peak_users = 0
        self._scraper: Scraper | None = None

    def begin(self):
        """Checks the server and begins the run; nothing is sent yet. Raises SojournError."""
        self.environment.process_exit_code = Ended.STOPPED  # of a load that is cut short
        self.page.begin()
        users, options = llm_users(self.environment), self.environment.parsed_options
        hosts = {self.environment.host} if self.environment.host else {user.host for user in users}
        if len(hosts) != 1 or not (host := hosts.pop()):
            raise ExperimentError("one run has one server; name it with --host, such as http://127.0.0.1:8000")
        self.host = host
        endpoint = endpoint_of(host, users)
        model = served_model(endpoint, options.model_name or None)["id"]
        for name in {user.model for user in users if user.model}:
            served_model(endpoint, name)
        name = Path(self.environment.locustfile or "locustfile").stem
        run_dir = Path(options.run_dir or f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        if run_dir.is_dir() and any(run_dir.iterdir()):
            raise ExperimentError(f"{run_dir} is not empty; choose another --run-dir, or remove it first")
        scenario = {
            "name": name, "description": f"tasks of {', '.join(user.__name__ for user in users)}",
            "arrivals": {"process": "users", "users": options.num_users or 1}, "measure": {"warmup_s": 0.0},
            "target": target_of(users[0], "chat").model_dump(mode="json"),
        }  # fmt: skip
        facts = {"loop": "closed", "rate_changes": False, "quantised_into_s": None, "told": [CLOSED]}
        self.run = create_run(
            run_dir, scenario, facts, objectives_of_users(users, options.slo), 0,
            {"base_url": endpoint.url, "model": model}, self._command(host, options),
        )  # fmt: skip
        self._open.enter_context(recording(run_dir))
        self._scraper = Scraper(endpoint, run_dir)
        self._scraper.start()
        self._peak_users = 0
        counting = gevent.spawn(self._count_users)
        self._open.callback(counting.kill)
        self.page.follow(run_dir, self.run.meta()["objectives"])
        number = 1
        if isinstance(runner := self.environment.runner, MasterRunner):
            number = max(STRIDE, 2 * len(runner.clients))
        prefix = f"{name}-{secrets.token_hex(4)}"
        return endpoint, model, Part(str(run_dir.resolve()), name, prefix, 0, number, time.monotonic_ns())

    def end(self, shards: list[Shard], fault: str) -> None:
        """Finishes the run, diagnoses it and says how it ended. It must not raise, as `begin`."""
        run, self.run = self.run, None
        if run is None:
            return
        message, is_fault = "", True
        self.page.end("the load has ended; the run is written and diagnosed", False)
        try:
            with self._open:
                self._scraper.stop()
                meta = run.meta()
                arrivals = meta["scenario"]["arrivals"] | {"users": max(1, self._peak_users)}
                run.update_meta(
                    scenario=meta["scenario"] | {"arrivals": arrivals}, failed_scrapes=self._scraper.failed,
                    skipped_scrapes=self._scraper.skipped,
                )  # fmt: skip
                if shards:
                    write_shards(run.path, shards)
                finish_run(run, [fault] if fault else [])
                code, why = ended_with(run)
                told = "; ".join(filter(None, (why, report(run))))
            self.environment.process_exit_code, message, is_fault = code, told, bool(why)
        except Exception as error:
            message, self.environment.process_exit_code = fault_of(error, f"the run in {run.path} was not finished")
        finally:
            self.page.unfollow()
            self.page.end(message, is_fault)
        self.page.print_rows()
        print(message, file=sys.stderr if is_fault else sys.stdout, flush=True)

    def refuse(self, fault: str, code: int) -> None:
        self.environment.process_exit_code = code
        self._open.close()
        self.page.unfollow()
        self.page.end(f"error: {fault}", True)
        if self.run is not None:
            with suppress(SojournError):
                finish_run(self.run, [fault])
            self.run = None
        print(f"error: {fault}", file=sys.stderr, flush=True)

    def _count_users(self) -> None:
        while True:
            self._peak_users = max(self._peak_users, self.environment.runner.user_count)
            gevent.sleep(POLL_S)

    def _command(self, host: str, options: Any) -> list[str]:
        """The words that repeat the run, as far as the options say."""
        words = ["sojourn", "locust", "-f", self.environment.parsed_options.locustfile, "--headless", "--host", host]
        chosen = {
            "--users": options.num_users, "--spawn-rate": options.spawn_rate, "--run-time": options.run_time,
            "--slo": options.slo, "--model-name": options.model_name, "--processes": options.processes,
        }  # fmt: skip
        return words + [str(word) for name, value in chosen.items() if value for word in (name, value)]


def llm_users(environment: Any) -> list[type[LLMUser]]:
    return [user for user in environment.user_classes if issubclass(user, LLMUser)]


def endpoint_of(host: str, users: list[type[LLMUser]]):
    """Where and how all users send. Raises InputError where their targets contradict each other."""
    targets = [target_of(user, "chat") for user in users]
    for key in ("connections", "verify_tls", "headers"):
        if any(getattr(each, key) != getattr(targets[0], key) for each in targets):
            raise InputError(f"the LLMUsers of one run share target.{key}; give each the same")
    return parse_base_url(host, targets[0].headers, targets[0].verify_tls)


def objectives_of_users(users: list[type[LLMUser]], slo: str) -> list[dict[str, Any]]:
    """Of run.json: `--slo` for all, else what each class says. Raises InputError."""
    stated = {"all": slo} if slo else {user.__name__: user.slo for user in users if user.slo}
    found = []
    for klass, bounds in stated.items():
        try:
            source = "--slo" if slo else f"{klass}.slo"
            found.append({"klass": klass, "source": source_of(bounds, source), **parse_bounds(bounds)})
        except ValueError as error:
            raise InputError(f"{source}: {error}") from None
    return found


@events.init_command_line_parser.add_listener
def add_arguments(parser) -> None:
    parser.add_argument("--run-dir", default="", help="folder to record into; runs/<locustfile>-<time> by default")
    parser.add_argument("--model-name", default="", help="by default what GET /v1/models names")
    parser.add_argument("--slo", default="", help="for all requests, such as ttft:500 tpot:50; by default each class's")


@events.init.add_listener
def begin_session(environment, **_: Any) -> None:
    users, options = llm_users(environment), environment.parsed_options
    if not users:
        return
    try:
        objectives_of_users(users, options.slo)
        endpoint_of("http://unknown", users)
    except InputError as error:  # before there is a page, which would hide it
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    gevent.get_hub().loop.update_now()  # imports took seconds: --run-time would count them
    environment.stop_timeout = environment.stop_timeout or DRAIN_S
    tasks = environment.sojourn_tasks = Tasks(environment)
    if isinstance(environment.runner, WorkerRunner) and options.processes:
        end_with(os.getppid())  # it was forked: a master that is killed takes it along
    environment.events.test_start.add_listener(tasks.begin)
    environment.events.test_stopping.add_listener(tasks.stopping)
    environment.events.test_stop.add_listener(tasks.stopped)
    environment.events.quitting.add_listener(tasks.quitting)
