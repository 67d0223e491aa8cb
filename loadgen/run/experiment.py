"""One experiment: a server, a load, one run directory. Each part is a process of its own, so that none slows another.

If an experiment ends early (Ctrl-C, a crashed server, a killed load generator), its events are parsed, and the run
directory says `valid: false` with the reason.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from sojourn.interop.probe.folder import open_server_run
from sojourn.live.sensors.feed import SensorFeed, writing_into
from sojourn.loadgen.client.event_log import read_progress, recording
from sojourn.loadgen.fleet.fleet import check_fleet
from sojourn.loadgen.fleet.routers import installed, known_router
from sojourn.loadgen.prompts.build import load_tokenizer
from sojourn.loadgen.run.live_view import LiveRun, LiveView, check_stop_when_resolved
from sojourn.loadgen.run.load_use import LoadUse
from sojourn.loadgen.run.run_files import begin_run, finish_run, repeat_command
from sojourn.loadgen.run.server_glance import ServerWatch
from sojourn.loadgen.run.serving import one_server, several_servers
from sojourn.loadgen.run.speed import add_reference
from sojourn.loadgen.scenario.scenario import Scenario, load_scenario
from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.facts import repeated_texts, workload_facts
from sojourn.loadgen.schedule.shards import loop_of
from sojourn.loadgen.target.endpoint import Endpoint, EndpointError, get, parse_base_url, served_model
from sojourn.loadgen.target.processes import ServerDied, load_command, start, stop, tail
from sojourn.loadgen.target.scrape import Scraper
from sojourn.loadgen.target.server_tokenizer import SERVER
from sojourn.loadgen.target.stated import stated_facts
from sojourn.metrics.errors import ExperimentError, InputError, RunDataError
from sojourn.metrics.request.objectives import EVERY_CLASS, objectives_of
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.join import adopt_servers
from sojourn.metrics.run.recorder import ON_DISK_SECONDS
from sojourn.metrics.time_limit import TimeLimit

POLL_S = 0.2
LIVE_S = 2.0
GLANCE_S = 2.0  # between two reads of /metrics that are shown and not recorded
LOAD_LOG, SCENARIO_FILE = "loadgen.log", "scenario.yaml"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of an experiment. Counts are of requests, 0 before the load starts."""

    stage: Literal[
        "starting server", "preparing load", "sending", "stopping server", "gathering", "measuring normal speed"
    ]
    sent: int = 0
    finished: int = 0
    failed: int = 0
    total: int = 0
    live: LiveView | None = None  # while it is sent, from its first records on


OnProgress = Callable[[Progress], None]


class Surroundings(Protocol):
    """What stands between client and server, or beside them on the machine, during the load of a run."""

    def begin(self, endpoint: Endpoint, run_dir: Path, router_pid: int | None) -> Endpoint:
        """The server is ready, or the router with its servers. Returns the endpoint that the load is sent to."""

    def loading(self, pid: int) -> None:
        """The load generator has started; it prepares."""

    def sending(self) -> None:
        """The first request was sent."""

    def end(self) -> None:
        """The load has ended, or did not begin. Called once, however the run ends."""


def run_scenario(
    scenario: Scenario, run_dir: Path | str, *, engine_overrides: dict[str, Any] | None = None,
    seed: int | None = None, processes: int = 1, scrapes: bool = False, progress: OnProgress = lambda _: None,
    surroundings: Surroundings | None = None, with_reference: bool = True, router_env: Path | None = None,
    stop_when_resolved: float | None = None, is_watched: bool = False, reference_s: float | None = None,
    sensors: SensorFeed | None = None,
) -> RunDirectory:  # fmt: skip
    """Starts our engine as the scenario says, replays the scenario against it, stops it and gathers the run.

    `engine_overrides` replaces keys of the scenario's engine block; `processes` share the schedule. `scrapes` records
    /metrics once a second beside the server's records, as `load` does of a foreign server. `surroundings` hear how
    far the run is. `with_reference` adds the normal speed of the machine, and measures it where nobody did, for at most
    `reference_s`.
    `router_env` is the virtual environment of the router of a fleet. `stop_when_resolved` stops the load once it is
    resolved whether that share of requests meets the SLO. `is_watched`: `progress` gets what /metrics shows.
    `sensors` run already, and are written while it is sent. Raises ExperimentError, InputError or ScenarioError;
    nothing is left behind if a server never became ready.
    """
    settings = engine_settings(scenario, {**scenario.engine, **(engine_overrides or {})})
    if not settings.get("model"):
        raise ExperimentError(
            f"scenario {scenario.name} names no engine.model; add one (such as model: tiny-model) to its engine block, "
            "or replay it against a running server with `sojourn load`"
        )
    check_stop_when_resolved(scenario, stop_when_resolved)
    tokenizer = scenario.target.tokenizer or str(settings["model"])
    seed = scenario.measure.seed if seed is None else seed
    workload = _check(scenario, seed, tokenizer, processes)
    fleet, chosen = scenario.fleet, {"set": engine_overrides or {}, "processes": _several(processes)}
    chosen["stop_when_resolved"] = None if stop_when_resolved is None else str(stop_when_resolved)
    if fleet is not None:
        router = known_router(fleet.router, fleet.policy)
        if not router.keeps_request_ids:
            raise InputError(
                f"a run joins client and servers by request id, and {router.name} gives requests ids of its own; take "
                "another router, or `sojourn server fleet up` and `sojourn load --base-url` for the client's side alone"
            )
        check_fleet(router, settings, fleet.servers, policy=fleet.policy)
        program = installed(router, router_env)
        chosen |= {"replicas": fleet.replicas, "router": fleet.router, "policy": fleet.policy}
    command = repeat_command("run", _stated(scenario, run_dir), seed, **chosen)
    run = _begin(scenario, run_dir, seed, settings, command, workload)
    with ExitStack() as stack:
        try:
            waiting = partial(progress, Progress("starting server"))
            servers = (
                one_server(settings, run.path, waiting)
                if fleet is None
                else several_servers(settings, run.path, fleet, router, program, waiting)
            )
            serving = stack.enter_context(servers)
        except BaseException:
            shutil.rmtree(run.path)
            raise
        run.update_meta(**serving.meta)
        with _finishing(run, progress) as reasons:
            try:
                watch = ServerWatch()
                scraping = _scraping(run, serving.endpoint, watch, scrapes) if scrapes or is_watched else nullcontext()
                with scraping, _sampling(run, sensors):
                    target = serving.endpoint
                    if surroundings is not None:
                        target = surroundings.begin(target, run.path, serving.router_pid)
                    live = LiveRun(run, stop_when_resolved, watch)
                    _load(run, target, seed, serving.served["id"], tokenizer, processes, serving.fault, progress,
                          reasons, live, surroundings)  # fmt: skip
            finally:
                if surroundings is not None:
                    surroundings.end()
                progress(Progress("stopping server"))
                stack.close()
                run.update_meta(**serving.meta)
                reasons += [] if reasons else serving.doubts
    if not with_reference:
        return run
    with suppress(RunDataError, OSError):  # a run without it is a run all the same
        add_reference(run, planted=surroundings is not None,
                      progress=lambda: progress(Progress("measuring normal speed")),
                      limit=None if reference_s is None else TimeLimit(reference_s))  # fmt: skip
    return run


def load_url(
    scenario: Scenario, base_url: str, run_dir: Path | str, *, model: str | None = None, tokenizer: str | None = None,
    seed: int | None = None, server_runs: Sequence[Path | str] = (), processes: int = 1,
    progress: OnProgress = lambda _: None, stop_when_resolved: float | None = None, sensors: SensorFeed | None = None,
) -> RunDirectory:  # fmt: skip
    """Replays the scenario against a running OpenAI-compatible server, and scrapes its /metrics if it has one.

    `server_runs` are the run directories of our own servers on this host (`serve --run-dir`): their records of this
    load are joined to the client's, so that the diagnosis sees what it sees of a `run`. Several stand behind a router.
    `stop_when_resolved` and `sensors` as in `run_scenario`.

    Raises EndpointError, and leaves nothing behind, if no server answers; ScenarioError for a bad scenario.
    """
    seed = scenario.measure.seed if seed is None else seed
    repeat = {"base_url": base_url, "model": model, "tokenizer": tokenizer, "server_run": list(server_runs)}
    repeat["processes"] = _several(processes)
    repeat["stop_when_resolved"] = None if stop_when_resolved is None else str(stop_when_resolved)
    check_stop_when_resolved(scenario, stop_when_resolved)
    for path in server_runs:
        if not Path(path).is_dir():
            raise InputError(
                f"--server-run {path} is no folder yet; start the server on this host with `sojourn serve MODEL "
                f"--run-dir {path}`, or vLLM and SGLang with `sojourn-probe vllm --out {path} -- …`, and load it then"
            )
    servers = [open_server_run(path) for path in server_runs]
    if len({server.path.resolve() for server in servers}) < len(servers):
        raise ExperimentError("--server-run names one folder twice; give each server's own")
    tokenizer = tokenizer or scenario.target.tokenizer
    workload = _check(scenario, seed, tokenizer, processes)
    if notes := repeated_texts(scenario):
        workload["notes"] = [*workload.get("notes", []), *notes]
    endpoint = parse_base_url(base_url, scenario.target.headers, scenario.target.verify_tls)
    served = served_model(endpoint, model or scenario.target.model)
    engine = {"base_url": endpoint.url, "model": served["id"]}
    if len(served) > 1:  # more than its name
        engine["served"] = served
    run = _begin(
        scenario, run_dir, seed, engine, repeat_command("load", _stated(scenario, run_dir), seed, **repeat), workload
    )
    watch = ServerWatch()
    with _finishing(run, progress) as reasons, _scraping(run, endpoint, watch, True), _sampling(run, sensors):
        begin_ns = time.monotonic_ns()
        _load(run, endpoint, seed, served["id"], tokenizer, processes, lambda: None, progress, reasons,
              LiveRun(run, stop_when_resolved, watch))  # fmt: skip
        if servers:
            with suppress(EndpointError):
                get(endpoint, "/metrics")  # for which it works out the steps that it holds back
            time.sleep(1.5 * ON_DISK_SECONDS)  # until the servers' last records are on disk
            servers = [open_server_run(path) for path in server_runs]  # what a probe wrote since
            reasons += adopt_servers(run, servers, begin_ns, time.monotonic_ns())
    if len(servers) == 1:
        with suppress(RunDataError, OSError):  # a run without it is a run all the same
            add_reference(run, planted=False, progress=None)
    return run


@contextmanager
def _scraping(run: RunDirectory, endpoint: Endpoint, watch: ServerWatch, records: bool) -> Iterator[None]:
    """Reads /metrics, if the server has it: once a second into the run, or only for those who watch."""
    if records:
        scraper = Scraper(endpoint, run.path, on_page=watch.take)
    else:
        scraper = Scraper(endpoint, None, GLANCE_S, on_page=watch.take)
    try:
        if scraper.start() and records:
            run.update_meta(**stated_facts(run.meta(), endpoint, scraper.first))
        yield
    finally:
        scraper.stop()
        if records:
            run.update_meta(failed_scrapes=scraper.failed, skipped_scrapes=scraper.skipped)


@contextmanager
def _sampling(run: RunDirectory, sensors: SensorFeed | None) -> Iterator[None]:
    """Writes what sensors show while it is sent, and their sources into run.json."""
    if sensors is None:
        yield
        return
    with writing_into(run.path, sensors):
        yield
    run.update_meta(**sensors.stated())


def _stated(scenario: Scenario, run_dir: Path | str) -> Scenario:
    """As the command that repeats the run names it: by the file that it came from, or, where it was made or changed
    since, by its copy in the run."""
    with suppress(InputError):
        read = load_scenario(scenario.path_or_name)
        if read.model_copy(update={"fleet": scenario.fleet}) == scenario:  # options of the command say the fleet
            return scenario
    return scenario.with_path(Path(run_dir) / SCENARIO_FILE)


def _several(processes: int) -> str | None:
    """The option for Locust and for the repeated command; one process is the default of both."""
    return str(processes) if processes > 1 else None


def _check(scenario: Scenario, seed: int, tokenizer: str | None, processes: int) -> dict[str, Any]:
    """Facts about the workload before it is sent.

    Raises ScenarioError for faults that would stop the load later: an absent trace, slice or tokenizer, more processes
    than a closed loop has slots.
    """
    loop_of(scenario.arrivals.closed_loop, 0, processes)
    if processes > 1 and (scenario.target.stop_at_in_flight or scenario.target.stop_at_failures):
        raise InputError(
            f"target.stop_at_in_flight and target.stop_at_failures count the requests of one process, and {processes} "
            "would send; leave --processes out"
        )
    build_schedule(scenario, seed, id_prefix="check")
    if tokenizer and tokenizer != SERVER:
        load_tokenizer(tokenizer)
    return workload_facts(scenario, seed)


def engine_settings(scenario: Scenario, chosen: dict[str, Any]) -> dict[str, Any]:
    """The settings, with the objectives of all classes for the goodput that our engine exports while it serves. Without
    telemetry the engine refuses objectives."""
    if chosen.get("telemetry") == "off":
        return chosen
    bounds = objectives_of(EVERY_CLASS, [each.model_dump() for each in scenario.objectives])
    return {f"objective_{name}": bound for name, bound in bounds.items()} | chosen


def _begin(
    scenario: Scenario, run_dir: Path | str, seed: int, engine: dict[str, Any], command: list[str],
    workload: dict[str, Any],
) -> RunDirectory:  # fmt: skip
    path = Path(run_dir)
    if path.is_dir() and any(path.iterdir()):
        raise ExperimentError(f"{path} is not empty; choose another folder for the run, or remove it first")
    document = yaml.safe_dump(scenario.model_dump(mode="json", exclude_none=True), sort_keys=False, allow_unicode=True)
    try:
        run = begin_run(path, scenario, seed, engine, command, workload)
        (run.path / SCENARIO_FILE).write_text(document, encoding="utf-8")
    except (RunDataError, OSError) as error:
        raise ExperimentError(f"the run cannot be recorded: {error}") from None
    return run


def _load(
    run: RunDirectory, endpoint: Endpoint, seed: int, model: str, tokenizer: str | None,
    processes: int, fault: Callable[[], tuple[str, str] | None], progress: OnProgress, reasons: list[str],
    live: LiveRun, surroundings: Surroundings | None = None,
) -> None:  # fmt: skip
    """Runs the load generator to its end and reports its progress. A server that dies ends the load."""
    log = run.path / LOAD_LOG
    options = {"seed": seed, "model-name": model, "tokenizer": tokenizer, "processes": _several(processes)}
    load = start(load_command(str(run.path / SCENARIO_FILE), endpoint.url, run.path, options), log)
    live_due_s, use = time.monotonic() + LIVE_S, LoadUse(load.pid)
    waits_for_first = surroundings is not None
    try:
        if surroundings is not None:
            surroundings.loading(load.pid)
        while load.poll() is None:
            counts = read_progress(run.path)
            if time.monotonic() >= live_due_s:
                live.update(counts)
                live_due_s = time.monotonic() + LIVE_S
            progress(Progress("sending", **counts, live=live.view) if counts else Progress("preparing load"))
            if counts:
                use.look()
            if waits_for_first and counts and counts["sent"]:
                surroundings.sending()
                waits_for_first = False
            if (ended := fault()) is not None:
                reasons.append(ended[0])
                raise ServerDied(f"{ended[0]}; its last lines:\n{ended[1]}")
            time.sleep(POLL_S)
        counts = read_progress(run.path)
        if counts:
            progress(Progress("sending", **counts))
        if load.returncode != 0:
            reasons.append(f"the load generator ended with exit code {load.returncode}")
            raise ExperimentError(f"{reasons[-1]}; its last lines:\n{tail(log)}")
        live.end()
    finally:
        stop(load)
        with suppress(RunDataError, OSError):  # a folder that is gone is noticed where the run is finished
            run.update_meta(load_use=use.summary())


@contextmanager
def _finishing(run: RunDirectory, progress: OnProgress) -> Iterator[list[str]]:
    """Finishes the run however its load ends. Yields the list of reasons why it is not valid, to append to."""
    reasons: list[str] = []
    with recording(run.path):
        try:
            yield reasons
        except KeyboardInterrupt:
            reasons.append("stopped with Ctrl-C")
            raise
        except Exception as error:
            if not reasons:
                reasons.append(f"{type(error).__name__}: {error}")
            if isinstance(error, OSError):  # the disk, or no process can be started
                raise ExperimentError(f"the run ended early: {error}") from None
            raise
        finally:
            with suppress(KeyboardInterrupt):  # a second Ctrl-C does not leave the run unread
                progress(Progress("gathering"))
                finish_run(run, reasons)
