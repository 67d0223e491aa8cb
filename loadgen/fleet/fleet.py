"""N servers of one model and the router in front of them, as processes that this one owns and ends.

Servers, router and all their ports are on the loopback. Whatever ends this process ends them: each is stopped in order,
and on Linux the kernel sends SIGTERM to those that a kill -9 of this process leaves.
"""

import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadgen.fleet.routers import FleetServer, Router
from loadgen.target.endpoint import Endpoint, EndpointError, get, parse_base_url, served_models
from loadgen.target.processes import serve_command, start, stop, tail, wait_ready
from metrics.errors import ExperimentError

ROUTER_TIMEOUT_S = 60.0
ROUTER_LOG = "router.log"


@dataclass(slots=True)
class Member:
    """A server of the fleet."""

    number: int
    endpoint: Endpoint
    run_dir: Path
    log: Path
    process: subprocess.Popen
    served: dict[str, Any] = field(default_factory=dict)  # its model, as GET /v1/models has it


@dataclass(slots=True)
class Fleet:
    """Servers that are ready, behind a router that answers."""

    endpoint: Endpoint  # of the router
    folder: Path
    members: list[Member] = field(default_factory=list)
    router: subprocess.Popen | None = None

    def dead(self) -> list[Member]:
        return [member for member in self.members if member.process.poll() is not None]

    def end(self) -> tuple[str, str] | None:
        """Why the fleet cannot go on, and the last lines of a log; servers that die while others live are no such
        reason."""
        if self.router is not None and self.router.poll() is not None:
            return f"the router ended with exit code {self.router.returncode}", tail(self.folder / ROUTER_LOG)
        if len(self.dead()) == len(self.members):
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
    records: bool = True,
    still_waiting: Callable[[], None] = lambda: None,
) -> Iterator[Fleet]:
    """A fleet until the block ends. `settings` are those of every server, and `own` those of single ones by number;
    `folder` takes logs, and with `records` the run directory of each server, `server-0` and so on.

    Raises ExperimentError where a server or the router does not become ready; nothing is left behind then.
    """
    ports = _free_ports(3 * count + 1)
    endpoint = parse_base_url(f"http://127.0.0.1:{ports.pop() if port is None else port}")
    made = Fleet(endpoint, folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        addresses = [tuple(f"tcp://127.0.0.1:{ports.pop()}" for _ in range(2)) for _ in range(count)]
        for number, (events, replay) in enumerate(addresses):
            chosen = settings | (own or {}).get(number, {})
            if chosen.get("prefix_caching", True):
                chosen |= {"kv_events": events, "kv_events_replay": replay}
            made.members.append(_start_server(chosen, number, ports.pop(), folder, records=records))
        for member in made.members:
            wait_ready(member.process, member.endpoint, member.log, still_waiting)
        servers = [
            _facts(member, settings["model"], *pair) for member, pair in zip(made.members, addresses, strict=True)
        ]
        made.router = start(
            router.command(program, servers, endpoint.port, policy or router.policies[0]), folder / ROUTER_LOG
        )
        _wait_for_router(made, servers[0].model, still_waiting)
        yield made
    except EndpointError as error:
        raise ExperimentError(str(error)) from None
    finally:
        if made.router is not None:
            stop(made.router)
        for member in made.members:  # all at once: each may take its time to drain
            if member.process.poll() is None:
                member.process.terminate()
        for member in made.members:
            stop(member.process)


def _start_server(settings: dict[str, Any], number: int, port: int, folder: Path, *, records: bool) -> Member:
    run_dir, log = folder / f"server-{number}", folder / f"server-{number}.log"
    command = serve_command(settings, port, run_dir)
    if not records and "--run-dir" in command:
        place = command.index("--run-dir")
        del command[place : place + 2]
    return Member(number, parse_base_url(f"http://127.0.0.1:{port}"), run_dir, log, start(command, log))


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
