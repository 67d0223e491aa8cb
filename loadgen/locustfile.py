"""Replays a scenario:  locust -f loadgen/locustfile.py --host http://127.0.0.1:8000 --scenario demo

Add --processes 4, or --master and workers on several machines: each sends its own part of one schedule. Every request
is sent at its own moment, however many are in flight. Locust's users only stand for the load while it runs; its
statistics round and are there for watching; the run directory has the measurement.
"""

import argparse
import os
import sys
from pathlib import Path

from locust import User, events, task  # first: it replaces what blocks in the standard library
from locust.runners import MasterRunner, WorkerRunner

import gevent  # isort: skip

from sojourn.loadgen.client.event_log import request_drain
from sojourn.loadgen.locust_page import GoodputPage
from sojourn.loadgen.run.distributed import MasterReplay, WorkerReplay
from sojourn.loadgen.run.replay import ended_with, fault_of, replay_alone, report, start_replay
from sojourn.loadgen.scenario.scenario import bundled_scenarios, load_scenario
from sojourn.loadgen.target.processes import end_with
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import Ended


class ScenarioNames(list):
    """The choices on the start page: bundled scenarios, and the file of the command line. A command line may name any
    file."""

    def __init__(self):
        given = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        given.add_argument("--scenario")
        name = given.parse_known_args()[0].scenario
        known = bundled_scenarios()
        super().__init__([name, *known] if name and name not in known else known)

    def __contains__(self, name):
        return True


@events.init_command_line_parser.add_listener
def add_arguments(parser):
    # Of the parser itself, not of a group: only these stand on the start page.
    parser.add_argument(
        "--scenario", default="demo", choices=ScenarioNames(), metavar="SCENARIO",
        help="a bundled scenario, or a scenario file. It says when each request is sent: --users and --spawn-rate do "
        "not apply and are refused",
    )  # fmt: skip
    parser.add_argument("--run-dir", default="", help="folder to record into; runs/<scenario>-<time> by default")
    parser.add_argument("--seed", type=int, default=None, help="replaces the scenario's measure.seed")
    parser.add_argument("--model-name", default="", help="by default the scenario's, or what GET /v1/models names")
    parser.add_argument("--tokenizer", default="", help="tokenizer.json to measure prompts with, or its folder")


class Load(User):
    """Stands for the load on Locust's page."""

    fixed_count = 1

    @task
    def stand_by(self):
        gevent.sleep(3600)


DRAIN_S = 30.0  # for requests in flight when Locust stops
STOPPED = "Locust was stopped, by its page, --run-time or a signal"


class Session:
    """Owns the replay of this process: alone, as the master or as a worker."""

    def __init__(self, environment):
        self.environment = environment
        self.replaying = None
        self.stopping = self.has_signal = False
        self.started = None
        self.is_sent = False
        self.page = GoodputPage(environment, replays=True)
        runner = environment.runner
        self.master = MasterReplay(runner) if isinstance(runner, MasterRunner) else None
        self.worker = WorkerReplay(runner, self.show) if isinstance(runner, WorkerRunner) else None

    def begin(self, **_):
        if self.worker is None:
            self.stopping, self.has_signal, self.started, self.is_sent = False, False, None, False
            self.replaying = gevent.spawn(self.replay)

    def replay(self):
        """Sends the load, and ends Locust with an exit code. It must not raise: nothing would catch it."""
        self.environment.process_exit_code = Ended.STOPPED  # of a load that is cut short
        self.page.begin()
        message, is_fault = "", True
        try:
            self.started = started = start_replay(self.environment.parsed_options, self.environment.host)
            if started.run is not None:
                self.page.follow(started.run.path, started.run.meta()["objectives"])
            if self.master is not None:
                self.master.run(started)
            else:
                replay_alone(started, self.show, self.note_end)
            code, why = ended_with(started.run)
            self.environment.process_exit_code = Ended.STOPPED if self.has_signal else code
            is_fault = bool(why)
            hint = report(started.run) if started.run is not None else ""
            message = "; ".join(filter(None, (why, hint)))
        except Exception as error:
            message, self.environment.process_exit_code = fault_of(error, "the replay ended early")
        finally:
            self.page.unfollow()
            self.page.end(message, is_fault)
        if message:
            self.page.print_rows()
            print(message, file=sys.stderr if is_fault else sys.stdout, flush=True)
        runner = self.environment.runner
        if self.environment.parsed_options.headless:
            gevent.spawn(runner.quit)  # in a greenlet of its own: it waits for this one
        elif not self.stopping:
            gevent.spawn(runner.stop)

    def stop(self, **_):
        """Locust stops: by its page, Ctrl-C, or because all is sent."""
        if self.worker is not None:
            self.worker.stop()
        elif self.master is not None:
            self.master.stop()
        elif self.replaying is not None and not self.stopping:
            self.stopping = True  # a second signal must not cut off the writing that the first began
            if self.started is not None and self.started.run is not None:
                try:
                    request_drain(Path(self.started.plan.run_dir), STOPPED)
                except OSError:  # no process would hear of it
                    self.replaying.kill(block=False)
                gevent.spawn_later(DRAIN_S, self.kill, self.replaying)
                if self.environment.web_ui:  # whose page takes no figures of a runner that has stopped
                    self.replaying.join()
            else:
                self.replaying.kill(block=False)

    def note_end(self):
        self.is_sent = True

    def kill(self, replaying):
        """What is still in flight is cancelled; a replay that writes or diagnoses its run is left alone."""
        if replaying is self.replaying and not self.is_sent and not replaying.ready():
            replaying.kill(block=False)

    def end(self, **_):
        """Before the process ends, what was recorded is written."""
        if self.worker is not None:
            self.environment.process_exit_code = 0  # the master speaks for all
        elif self.replaying is not None and not self.replaying.ready():
            self.has_signal = not self.stopping
            self.environment.runner.stop()  # a signal ends Locust without it
            self.replaying.join()

    def show(self, request, latency_ms, num_bytes, reason):
        self.environment.events.request.fire(
            request_type="POST", name=request.klass, response_time=latency_ms, response_length=num_bytes,
            exception=RuntimeError(reason) if reason else None, context={},
        )  # fmt: skip


@events.init.add_listener
def begin_session(environment, **_):
    options = environment.parsed_options
    try:
        load_scenario(options.scenario)
        if options.num_users is not None or options.spawn_rate is not None:
            raise InputError(
                "--users and --spawn-rate do not apply to a scenario, which says when each request is sent; leave them "
                "out, or write a locustfile with sojourn.loadgen.LLMUser"
            )
    except InputError as error:  # before there is a page, which would hide it
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    gevent.get_hub().loop.update_now()  # imports took seconds: --run-time would count them
    session = Session(environment)
    if session.worker is not None and options.processes:
        end_with(os.getppid())  # it was forked: a master that is killed takes it along
    environment.events.test_start.add_listener(session.begin)
    environment.events.test_stopping.add_listener(session.stop)
    environment.events.quitting.add_listener(session.end)
