"""Replays a scenario:  locust -f loadgen/locustfile.py --host http://127.0.0.1:8000 --scenario demo

Add --processes 4, or --master and workers on several machines: each sends its own part of one schedule. Every request
is sent at its own moment, however many are in flight. Locust's users only stand for the load while it runs; its
statistics round and are there for watching; the run directory has the measurement.
"""

import os
import sys

from locust import User, events, task  # first: it replaces what blocks in the standard library
from locust.runners import MasterRunner, WorkerRunner

import gevent  # isort: skip

from loadgen.run.distributed import MasterReplay, WorkerReplay
from loadgen.run.replay import ended_with, replay_alone, start_replay
from loadgen.target.processes import end_with
from metrics.errors import ExperimentError, InputError, RunDataError, ServerError


@events.init_command_line_parser.add_listener
def add_arguments(parser):
    group = parser.add_argument_group("Sojourn")
    group.add_argument("--scenario", default="demo", help="a scenario file, or the name of a bundled one")
    group.add_argument("--run-dir", default="", help="folder to record into; runs/<scenario>-<time> by default")
    group.add_argument("--seed", type=int, default=None, help="replaces the scenario's measure.seed")
    group.add_argument("--model-name", default="", help="by default the scenario's, or what GET /v1/models names")
    group.add_argument("--tokenizer", default="", help="tokenizer.json to measure prompts with, or its folder")


class Load(User):
    """Stands for the load on Locust's page."""

    fixed_count = 1

    @task
    def stand_by(self):
        gevent.sleep(3600)


class Session:
    """Owns the replay of this process: alone, as the master or as a worker."""

    def __init__(self, environment):
        self.environment = environment
        self.replaying = None
        self.stopping = False
        runner = environment.runner
        self.master = MasterReplay(runner) if isinstance(runner, MasterRunner) else None
        self.worker = WorkerReplay(runner, self.show) if isinstance(runner, WorkerRunner) else None

    def begin(self, **_):
        if self.worker is None:
            self.stopping = False
            self.replaying = gevent.spawn(self.replay)

    def replay(self):
        """Sends the load, and ends Locust with an exit code. It must not raise: nothing would catch it."""
        self.environment.process_exit_code = 1  # of a load that is cut short
        try:
            started = start_replay(self.environment.parsed_options, self.environment.host)
            if self.master is not None:
                self.master.run(started)
            else:
                replay_alone(started, self.show)
            self.environment.process_exit_code = ended_with(started)
        except (InputError, ServerError, ExperimentError) as error:  # not of the run directory: that ends a run early
            print(f"error: {error}", file=sys.stderr, flush=True)
            self.environment.process_exit_code = 2
        except RunDataError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
        except Exception as error:
            print(f"error: the replay ended early: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        runner = self.environment.runner
        # in a greenlet of its own: both wait for this one
        gevent.spawn(runner.quit if self.environment.parsed_options.headless else runner.stop)

    def stop(self, **_):
        """Locust stops: by its page, Ctrl-C, or because all is sent."""
        if self.worker is not None:
            self.worker.stop()
        elif self.master is not None:
            self.master.stop()
        elif self.replaying is not None and not self.stopping:
            self.stopping = True  # a second signal must not cut off the writing that the first began
            self.replaying.kill(block=False)

    def end(self, **_):
        """Before the process ends, what was recorded is written."""
        if self.worker is not None:
            self.environment.process_exit_code = 0  # the master speaks for all
        elif self.replaying is not None and not self.replaying.ready():
            self.environment.runner.stop()  # a signal ends Locust without it
            self.replaying.join()

    def show(self, request, latency_ms, num_bytes, reason):
        self.environment.events.request.fire(
            request_type="POST", name=request.klass, response_time=latency_ms, response_length=num_bytes,
            exception=RuntimeError(reason) if reason else None, context={},
        )  # fmt: skip


@events.init.add_listener
def begin_session(environment, **_):
    session = Session(environment)
    if session.worker is not None and environment.parsed_options.processes:
        end_with(os.getppid())  # it was forked: a master that is killed takes it along
    environment.events.test_start.add_listener(session.begin)
    environment.events.test_stopping.add_listener(session.stop)
    environment.events.quitting.add_listener(session.end)
