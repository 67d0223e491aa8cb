"""What the locustfile needs: a client made of its options, and the run directory begun and finished around it."""

import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadgen.bodies import build_wire_requests
from loadgen.client import OnFinished, OpenLoopClient, Replay
from loadgen.closed_loop import closed_loop
from loadgen.endpoint import EndpointError, parse_base_url, served_models
from loadgen.rawlog import recording, write_progress
from loadgen.scenario import Scenario, load_scenario
from loadgen.scenario_faults import ScenarioError
from loadgen.schedule import SCHEDULE_FILE, ScheduledRequest, build_schedule, save_schedule
from loadgen.workload_facts import workload_facts

if TYPE_CHECKING:
    from metrics.rundir import RunDirectory


class ReplayError(Exception):
    """A replay that cannot begin, with a sentence for the user."""


def refuse_distributed(options) -> None:
    """Exits where Locust was asked for several processes: each would send the whole schedule."""
    if options.master or options.worker or options.processes:
        print(
            "error: --master, --worker and --processes are not supported: every process would send the whole schedule; "
            "leave them out, one process sends what a few hundred streams need",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(2)


def prepare_replay(options, host: str | None, on_finished: OnFinished) -> tuple[OpenLoopClient, "RunDirectory | None"]:
    """Reads, checks, builds and saves all that the run needs; nothing is sent yet. Raises ReplayError.

    The second value is the run directory if it began here, None where `sojourn run` has begun it and will finish it.
    """
    if not host:
        raise ReplayError("no server is named; add --host, such as --host http://127.0.0.1:8000")
    try:
        scenario = load_scenario(options.scenario)
        seed = scenario.measure.seed if options.seed is None else options.seed
        run_dir = Path(options.run_dir or f"runs/{scenario.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        if (run_dir / SCHEDULE_FILE).exists():
            raise ReplayError(f"{run_dir} already holds a run; choose another --run-dir, or remove it first")
        endpoint = parse_base_url(host)
        model = options.model_name or scenario.target.model or served_models(endpoint)[0]["id"]
        schedule = build_schedule(scenario, seed, id_prefix=f"{scenario.name}-{secrets.token_hex(4)}")
        loop = closed_loop(scenario.arrivals)
        wire = build_wire_requests(scenario, seed, schedule, endpoint, model, options.tokenizer or None)
        client = OpenLoopClient(Replay(schedule, wire, endpoint, scenario.target, run_dir, loop), on_finished)
        begun = (run_dir / "run.json").exists()
        given = {"base_url": host, "model": options.model_name or None, "tokenizer": options.tokenizer or None}
        run = None if begun else _begin(
            run_dir, scenario, seed, {"base_url": endpoint.url, "model": model}, given, schedule
        )  # fmt: skip
        save_schedule(run_dir, schedule, scenario)
        write_progress(run_dir, {"total": len(schedule), "sent": 0, "finished": 0, "failed": 0})
    except (ScenarioError, EndpointError, OSError) as error:
        raise ReplayError(str(error)) from None
    return client, run


def run_replay(client: OpenLoopClient, run: "RunDirectory | None") -> None:
    """Sends the load, then parses and closes the run directory if it began here."""
    with recording(client.run_dir):
        try:
            client.run()
        finally:
            if run is not None:
                from loadgen.gather import finish_run

                finish_run(run, [])
                print(f"recorded in {run.path}", flush=True)


def _begin(
    run_dir: Path, scenario: Scenario, seed: int, engine: dict[str, Any], given: dict[str, str | None],
    schedule: list[ScheduledRequest],
) -> "RunDirectory":  # fmt: skip
    from loadgen.gather import (
        begin_run,
        repeat_command,
    )  # duckdb and pandas stay out of a process that `sojourn run` finishes for

    command = repeat_command("load", scenario, seed, **given)
    return begin_run(run_dir, scenario, seed, engine, command, workload_facts(scenario, schedule))
