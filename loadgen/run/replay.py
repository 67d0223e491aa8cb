"""The steps of a load process: start the run directory, prepare a part of the schedule, finish the run."""

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gevent
from gevent import subprocess

from sojourn.loadgen.client.dispatcher import LoadClient, OnFinished, Replay
from sojourn.loadgen.client.event_log import recording, write_progress
from sojourn.loadgen.client.pacing import Wires
from sojourn.loadgen.prompts.bodies import build_wire_requests
from sojourn.loadgen.scenario.arrivals import ClosedLoop
from sojourn.loadgen.scenario.scenario import Scenario, load_scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.facts import workload_facts
from sojourn.loadgen.schedule.request import ScheduledRequest, save_schedule, schedule_digest, schedule_files
from sojourn.loadgen.schedule.shards import loop_of, part_of
from sojourn.loadgen.target.endpoint import parse_base_url, served_model
from sojourn.metrics.errors import ExperimentError, SojournError
from sojourn.metrics.exit_codes import Ended, of_run

if TYPE_CHECKING:
    from sojourn.metrics.run.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters that all processes of a run share, as a message can carry them."""

    scenario: dict[str, Any]
    seed: int
    id_prefix: str
    base_url: str
    model: str
    tokenizer: str | None
    run_dir: str
    schedule_digest: str  # of the one that the master saved


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run that has started. `run` is None where `sojourn run` started it and will finish it."""

    plan: Plan
    schedule: list[ScheduledRequest]
    loop: ClosedLoop | None
    run: "RunDirectory | None"


def start_replay(options, host: str | None) -> StartedRun:
    """Reads, checks and saves what all processes share; nothing is sent yet. Raises SojournError."""
    if not host:
        raise ExperimentError("no server is named; add --host, such as --host http://127.0.0.1:8000")
    try:
        scenario = load_scenario(options.scenario)
        seed = scenario.measure.seed if options.seed in (None, "") else int(options.seed)  # a page gives text
        run_dir = Path(options.run_dir or f"runs/{scenario.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        if schedule_files(run_dir):
            raise ExperimentError(f"{run_dir} already holds a run; choose another --run-dir, or remove it first")
        endpoint = parse_base_url(host, scenario.target.headers, scenario.target.verify_tls)
        model = served_model(endpoint, options.model_name or scenario.target.model)["id"]
        id_prefix = f"{scenario.name}-{secrets.token_hex(4)}"
        schedule = beside_the_hub(lambda: build_schedule(scenario, seed, id_prefix))
        run = None
        if not (run_dir / "run.json").exists():
            # Here: pandas stays out of a process that `sojourn run` finishes for.
            from sojourn.loadgen.run.run_files import begin_run, repeat_command

            command = repeat_command(
                "load", scenario, seed, base_url=host, model=options.model_name or None,
                tokenizer=options.tokenizer or None, processes=options.processes or None,
            )  # fmt: skip
            engine = {"base_url": endpoint.url, "model": model}
            run = begin_run(run_dir, scenario, seed, engine, command, workload_facts(scenario, seed))
        save_schedule(run_dir, schedule, scenario)
    except OSError as error:
        raise ExperimentError(str(error)) from None
    document = scenario.model_dump(mode="json", exclude_none=True)
    digest = beside_the_hub(lambda: schedule_digest(schedule))
    plan = Plan(document, seed, id_prefix, host, model, options.tokenizer or None, str(run_dir.resolve()), digest)
    return StartedRun(plan, schedule, scenario.arrivals.closed_loop, run)


def prepare_part(
    plan: Plan, number: int, of: int, on_finished: OnFinished, schedule: list[ScheduledRequest] | None = None,
    shift_ns: int = 0,
) -> LoadClient:  # fmt: skip
    """Builds the requests of one part of the schedule. Raises SojournError.

    A process without the schedule builds it again: the same scenario and seed give the same one. A process with other
    code, another numpy or another trace file is refused.
    """
    try:
        scenario, run_dir = Scenario(**plan.scenario), Path(plan.run_dir)
        endpoint = parse_base_url(plan.base_url, scenario.target.headers, scenario.target.verify_tls)
        loop = scenario.arrivals.closed_loop

        def build() -> tuple[list[ScheduledRequest], Wires]:
            whole = schedule
            if whole is None:
                whole = build_schedule(scenario, plan.seed, plan.id_prefix)
                digest = schedule_digest(whole)
                if digest != plan.schedule_digest:
                    raise ExperimentError(
                        "this worker makes another schedule of the same scenario and seed than the master (digest "
                        f"{digest}, not {plan.schedule_digest}); give it the same version of Sojourn and of numpy, "
                        "and the same files of traces, under the same paths"
                    )
            mine = part_of(whole, number, of, loop)
            return mine, build_wire_requests(scenario, plan.seed, whole, endpoint, plan.model, plan.tokenizer, mine)

        mine, wire = beside_the_hub(build)
        run_dir.mkdir(parents=True, exist_ok=True)
        slots = loop_of(loop, number, of)
        replay = Replay(mine, wire, endpoint, scenario.target, run_dir, slots, number, shift_ns)
        client = LoadClient(replay, on_finished)
        write_progress(run_dir, {"total": len(mine), "sent": 0, "finished": 0, "failed": 0}, number)
    except OSError as error:
        raise ExperimentError(str(error)) from None
    return client


def beside_the_hub(work: Callable[[], Any]) -> Any:
    """Runs slow work in a native thread: Locust counts a process as lost that is silent for three seconds."""

    def fails_quietly() -> tuple[Any, Exception | None]:
        try:
            return work(), None
        except Exception as error:  # gevent would print it before it raises it
            return None, error

    done, error = gevent.get_hub().threadpool.apply(fails_quietly)
    if error is not None:
        raise error
    return done


def finish_replay(started: StartedRun) -> None:
    """Parses and closes the run directory if this process started it."""
    if started.run is not None:
        from sojourn.loadgen.run.run_files import finish_run

        finish_run(started.run, [])
        print(f"recorded in {started.run.path}", flush=True)


def ended_with(run: "RunDirectory | None") -> tuple[int, str]:
    """The exit code of a finished replay, and why it is not 0. 0 where another process finishes the run."""
    if run is None:
        return 0, ""
    from sojourn.metrics.request.goodput import measured

    meta = run.meta()
    is_served = measured(run.table("client"), meta).status == "ok"
    served, failed = int(is_served.sum()), int((~is_served).sum())
    return of_run(meta, served, failed)


def fault_of(error: Exception, what: str) -> tuple[str, int]:
    """The sentence and the exit code of a run that an error ended; `what`: what did not come to its end."""
    if isinstance(error, SojournError):
        return f"error: {error}", error.exit_code
    return f"error: {what}: {type(error).__name__}: {error}", Ended.FAILED


def report(run: "RunDirectory") -> str:
    """Diagnoses a run that this process began, in a process of its own. Returns where to read it."""
    path = run.path.resolve()
    for verb in ("report", "diagnose"):  # a report needs plotly; each writes diagnosis.json
        command = [sys.executable, "-m", "sojourn", verb, str(path)]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if done.returncode == 0:
            break
    return f"recorded in {path}; see it: sojourn diagnose {path}, or report.html there"


def replay_alone(started: StartedRun, on_finished: OnFinished, on_sent: Callable[[], None]) -> None:
    """Sends the whole schedule from this process. `on_sent` is called before the run is written. Raises
    SojournError."""
    with recording(Path(started.plan.run_dir)):
        try:
            prepare_part(started.plan, 0, 1, on_finished, started.schedule).run()
        finally:
            on_sent()
            finish_replay(started)
