"""N servers of one model and the router in front of them, as processes that this one owns and ends.

Servers, router and all their ports are on the loopback. Whatever ends this process ends them: each is stopped in order,
and on Linux the kernel sends SIGTERM to those that a kill -9 of this process leaves.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sojourn.loadgen.fleet.ray_servers import UNSEEN, servers_of_replicas
from sojourn.loadgen.fleet.routers import FleetServer, Router, ServerPlan, StartingRouter
from sojourn.loadgen.target.endpoint import Endpoint, EndpointError, get, parse_base_url, served_models
from sojourn.loadgen.target.processes import (
    READY_TIMEOUT_S,
    has_records,
    serve_command,
    serve_words,
    start,
    stop,
    tail,
    wait_ready,
)
from sojourn.metrics.errors import ExperimentError, InputError

ROUTER_TIMEOUT_S = 60.0
ROUTER_LOG = "router.log"
GIVEN = ("host", "port", "run_dir", "kv_events", "kv_events_replay")  # settings that a fleet chooses for each server


class Process(Protocol):
    """What a fleet reads of a server's process: `subprocess.Popen`, or a child of the router."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...


@dataclass(slots=True)
class Member:
    """A server of the fleet."""

    number: int
    endpoint: Endpoint
    run_dir: Path
    log: Path
    process: Process
    served: dict[str, Any] = field(default_factory=dict)  # its model, as GET /v1/models has it

    def ending(self) -> str:
        """How it ended, in words."""
        code = self.process.returncode
        return "was killed with its replica" if code == UNSEEN else f"ended with exit code {code}"


@dataclass(slots=True)
class Fleet:
    """Servers that are ready, behind a router that answers."""

    endpoint: Endpoint  # of the router
    folder: Path
    members: list[Member] = field(default_factory=list)
    router: subprocess.Popen | None = None
    replaces_servers: bool = False  # the router starts others for those that end

    def look(self) -> bool:
        """Brings `members` up to date where the router starts and ends servers. Whether all that were asked for at
        first get requests."""
        if not self.replaces_servers:
            return True
        known = {member.number: member.process for member in self.members}
        is_running = servers_of_replicas(self.folder, known)
        for server in list(known.values())[len(self.members) :]:
            place = self.folder / f"server-{server.number}"
            endpoint = parse_base_url(f"http://127.0.0.1:{server.port}")
            self.members.append(Member(server.number, endpoint, place, place.with_suffix(".log"), server))
        self.members.sort(key=lambda member: member.number)
        return is_running

    def dead(self) -> list[Member]:
        self.look()
        return [member for member in self.members if member.process.poll() is not None]

    def end(self) -> tuple[str, str] | None:
        """Why the fleet cannot go on, and the last lines of a log; servers that die while others live are no such
        reason."""
        if self.router is not None and self.router.poll() is not None:
            return f"the router ended with exit code {self.router.returncode}", tail(self.folder / ROUTER_LOG)
        if not self.replaces_servers and len(self.dead()) == len(self.members):
            return f"all {len(self.members)} servers ended", tail(self.members[-1].log)
        return None

    def fault(self) -> str | None:
        """The same as one sentence."""
        ended = self.end()
        return None if ended is None else f"{ended[0]}; its last lines:\n{ended[1]}"


@contextmanager
def fleet(
    settings: dict[str, Any],
    count: int,
    router: Router,
    program: Path,
    folder: Path,
    *,
    policy: str | None = None,
    port: int | None = None,
    own: Mapping[int, dict[str, Any]] | None = None,
    most: int | None = None,
    still_waiting: Callable[[], None] = lambda: None,
) -> Iterator[Fleet]:
    """A fleet until the block ends. `settings` are those of every server, and `own` those of single ones by number;
    `most` is for a StartingRouter: it has up to so many servers where `count` are too few. `folder` takes logs, and the
    run directory of each server, `server-0` and so on.

    Raises ExperimentError where a server or the router does not become ready; nothing is left behind then.
    """
    ports = _free_ports(3 * count + 1)
    endpoint = parse_base_url(f"http://127.0.0.1:{ports.pop() if port is None else port}")
    made = Fleet(endpoint, folder, replaces_servers=isinstance(router, StartingRouter))
    chosen = policy or router.policies[0]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if isinstance(router, StartingRouter):
            plan = ServerPlan(serve_words(settings), count, most or count, num_ranks(settings), folder,
                              has_records(settings))  # fmt: skip
            made.router = start(router.start_command(program, plan, endpoint.port, chosen), folder / ROUTER_LOG)
            _wait_until_running(made, still_waiting)
        else:
            servers = _start_servers(made, settings, own or {}, ports, count, still_waiting)
            made.router = start(router.command(program, servers, endpoint.port, chosen), folder / ROUTER_LOG)
        _wait_for_router(made, made.members[0].served["id"], still_waiting)
        yield made
    except EndpointError as error:
        raise ExperimentError(str(error)) from None
    finally:
        if made.router is not None:
            stop(made.router)
        made.look()
        _stop_servers(made.members)


def num_ranks(settings: Mapping[str, Any]) -> int:
    """Processes of a server that compute, each on a device of its own; 0 on a CPU."""
    if settings.get("device") == "cpu":
        return 0
    tensor, pipeline, expert = (int(settings.get(f"{name}_parallel") or 1) for name in ("tensor", "pipeline", "expert"))
    return pipeline * max(tensor, expert)


def check_fleet(
    router: Router, settings: Mapping[str, Any], own: Mapping[int, Mapping[str, Any]], *, policy: str | None = None,
    most: int | None = None,
) -> None:  # fmt: skip
    """Raises InputError for what a fleet, or that router, cannot do."""
    servers = [settings, *({**settings, **each} for each in own.values())]
    if given := [name for name in GIVEN if any(each.get(name) is not None for each in servers)]:
        raise InputError(f"a fleet chooses {given[0]} itself, for each of its servers; leave it out")
    if (policy or router.policies[0]) == "kv_aware" and not all(map(_caches, servers)):
        others = ", ".join(name for name in router.policies if name != "kv_aware")
        raise InputError("kv_aware needs KV events, and a server with prefix_caching=false has none; take another "
                         f"--policy: {others}")  # fmt: skip
    if isinstance(router, StartingRouter):
        if own:
            raise InputError(f"{router.name} starts equal servers, and server {min(own)} has settings of its own; "
                             "leave `servers` out, or take another router")  # fmt: skip
    elif most is not None:
        raise InputError(f"{router.name} starts no servers, so --max-servers does nothing; leave it out, or take "
                         "--router ray")  # fmt: skip


def _caches(settings: Mapping[str, Any]) -> bool:
    return settings.get("prefix_caching") is not False


def _start_servers(
    made: Fleet, settings: dict[str, Any], own: Mapping[int, dict[str, Any]], ports: list[int], count: int,
    still_waiting: Callable[[], None],
) -> list[FleetServer]:  # fmt: skip
    """Adds the servers to the fleet, and returns once they are ready."""
    addresses = [tuple(f"tcp://127.0.0.1:{ports.pop()}" for _ in range(2)) for _ in range(count)]
    for number, (events, replay) in enumerate(addresses):
        chosen = settings | own.get(number, {})
        if _caches(chosen):
            chosen |= {"kv_events": events, "kv_events_replay": replay}
        run_dir, log, port = made.folder / f"server-{number}", made.folder / f"server-{number}.log", ports.pop()
        process = start(serve_command(chosen, port, run_dir), log)
        made.members.append(Member(number, parse_base_url(f"http://127.0.0.1:{port}"), run_dir, log, process))
    for member in made.members:
        wait_ready(member.process, member.endpoint, member.log, still_waiting)
    return [_facts(member, settings["model"], *pair) for member, pair in zip(made.members, addresses, strict=True)]


def _wait_until_running(made: Fleet, still_waiting: Callable[[], None]) -> None:
    """Returns once the servers of a StartingRouter get requests. Raises ExperimentError."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if made.look():
            for member in made.members:
                member.served = served_models(member.endpoint)[0]
            return
        if (fault := made.fault()) is not None:
            raise ExperimentError(fault)
        still_waiting()
        time.sleep(0.2)
    raise ExperimentError(
        f"the servers were not ready within {READY_TIMEOUT_S:.0f} s; the router's last lines:\n"
        f"{tail(made.folder / ROUTER_LOG)}"
    )


def _stop_servers(members: list[Member]) -> None:
    """All at once: each may take its time to drain. A StartingRouter has ended its servers; what it left is killed."""
    ours = [member.process for member in members if isinstance(member.process, subprocess.Popen)]
    for process in ours:
        if process.poll() is None:
            process.terminate()
    for process in ours:
        stop(process)
    for member in members:
        if member.process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(member.process.pid, signal.SIGKILL)  # the group is the server's own: it leads its session


def _facts(member: Member, checkpoint: str, events: str, replay: str) -> FleetServer:
    member.served = served_models(member.endpoint)[0]
    block_size = member.served["engine"]["block_size"]
    return FleetServer(member.endpoint.url, member.served["id"], checkpoint, block_size, events, replay)


def _wait_for_router(made: Fleet, model: str, still_waiting: Callable[[], None]) -> None:
    """Returns once the router answers with the model of its servers. Raises ExperimentError."""
    assert made.router is not None
    deadline = time.monotonic() + ROUTER_TIMEOUT_S
    while time.monotonic() < deadline:
        if (fault := made.fault()) is not None:
            raise ExperimentError(fault)
        with suppress(EndpointError):
            status, body = get(made.endpoint, "/v1/models", timeout_s=2.0)
            if status == 200 and model.encode() in body:
                return
        still_waiting()
        time.sleep(0.2)
    raise ExperimentError(
        f"the router did not answer within {ROUTER_TIMEOUT_S:.0f} s; its last lines:\n{tail(made.folder / ROUTER_LOG)}"
    )


def _free_ports(count: int) -> list[int]:
    """Ports that no process listens on now, all different."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
