"""Replays a scenario open loop:  locust -f loadgen/locustfile.py --host http://127.0.0.1:8000 --scenario demo

One Locust user is the whole load: its task is the dispatcher, which sends every request at its own moment, however
many are in flight. Locust's statistics round and are there for watching; the run directory has the measurement.
"""

import sys

from locust import User, events, task  # first: it replaces what blocks in the standard library

import gevent  # isort: skip
from locust.exception import StopUser

from loadgen.replay import ReplayError, prepare_replay, refuse_distributed, run_replay


@events.init_command_line_parser.add_listener
def add_arguments(parser):
    group = parser.add_argument_group("Sojourn")
    group.add_argument("--scenario", default="demo", help="a scenario file, or the name of a bundled one")
    group.add_argument("--run-dir", default="", help="folder to record into; runs/<scenario>-<time> by default")
    group.add_argument("--seed", type=int, default=None, help="replaces the scenario's measure.seed")
    group.add_argument("--model-name", default="", help="by default the scenario's, or what GET /v1/models names")
    group.add_argument("--tokenizer", default="", help="tokenizer.json to measure prompts with, or its folder")
    # Before Locust forks: a worker that outlives its refused master looks for it a minute long.
    refuse_distributed(parser.parse_known_args()[0])


class Dispatcher(User):
    fixed_count = 1

    @task
    def replay(self):
        self.end(exit_code=self.send_once())

    def send_once(self):
        """Sends the load and returns the exit code. Nothing may be raised here: Locust would run the task again."""
        try:
            client, run = prepare_replay(self.environment.parsed_options, self.host, self.show)
            run_replay(client, run)
        except ReplayError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 2
        except Exception as error:
            print(f"error: the replay ended early: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return 1
        return 0

    def show(self, request, latency_ms, num_bytes, reason):
        self.environment.events.request.fire(
            request_type="POST", name=request.klass, response_time=latency_ms, response_length=num_bytes,
            exception=RuntimeError(reason) if reason else None, context={},
        )  # fmt: skip

    def end(self, exit_code):
        self.environment.process_exit_code = exit_code
        runner = self.environment.runner
        # in a greenlet of its own: both end by killing this one
        gevent.spawn(runner.quit if self.environment.parsed_options.headless else runner.stop)
        raise StopUser
