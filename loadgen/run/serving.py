"""What serves a run: one server of ours, or several behind a router. It is started before the load and ended after."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.loadgen.fleet.fleet import Fleet, fleet
from sojourn.loadgen.fleet.routers import Router
from sojourn.loadgen.scenario.fleet import FleetBlock
from sojourn.loadgen.target.endpoint import Endpoint, EndpointError, parse_base_url, served_models
from sojourn.loadgen.target.processes import free_port, serve_command, start, stop, tail, wait_ready
from sojourn.metrics.errors import ExperimentError

SERVER_LOG = "server.log"


@dataclass(slots=True)
class Serving:
    """What is ready and serves. `doubts` are known once it has ended."""

    endpoint: Endpoint  # that the load is sent to
    served: dict[str, Any]  # its model, as GET /v1/models has it
    fault: Callable[[], tuple[str, str] | None]  # why it cannot go on: a sentence, and the last lines of a log
    meta: dict[str, Any]  # what run.json says of it; its servers are known once it has ended
    doubts: list[str] = field(default_factory=list)
    router_pid: int | None = None


@contextmanager
def one_server(settings: dict[str, Any], run_dir: Path, still_waiting: Callable[[], None]) -> Iterator[Serving]:
    """Our server until the block ends. Raises ExperimentError where it does not become ready."""
    endpoint, log = parse_base_url(f"http://127.0.0.1:{free_port()}"), run_dir / SERVER_LOG
    server = start(serve_command(settings, endpoint.port, run_dir), log)

    def fault() -> tuple[str, str] | None:
        if server.poll() is None:
            return None
        return f"the server ended with exit code {server.returncode} during the run", tail(log)

    try:
        still_waiting()
        wait_ready(server, endpoint, log, still_waiting)
        served = served_models(endpoint)[0]
        # Apart: what was chosen, and what the server made of it
        serving = Serving(endpoint, served, fault, {"engine": settings | {"served": served}})
        yield serving
    except EndpointError as error:
        raise ExperimentError(str(error)) from None
    finally:
        stop(server)
    if server.returncode == 1:
        serving.doubts.append(f"the server ended with exit code 1; its last lines:\n{tail(log)}")


@contextmanager
def several_servers(
    settings: dict[str, Any], run_dir: Path, block: FleetBlock, router: Router, program: Path,
    still_waiting: Callable[[], None],
) -> Iterator[Serving]:  # fmt: skip
    """Our servers behind a router until the block ends; each records into a folder of its own in `run_dir`. Raises
    ExperimentError where one of them does not become ready."""
    policy = block.policy or router.policies[0]
    with fleet(settings, block.replicas, router, program, run_dir, policy=policy, own=block.servers,
               still_waiting=still_waiting) as made:  # fmt: skip
        served = made.members[0].served
        meta = {
            "engine": settings | {"replicas": block.replicas, "served": served},
            "servers": _entries(made, block),
            "router": {"name": router.name, "policy": policy, "url": made.endpoint.url, "same_host": True},
        }
        serving = Serving(made.endpoint, served, made.end, meta, router_pid=made.router.pid)
        yield serving
        dead = made.dead()
        meta["servers"] = _entries(made, block)  # with those that a router started in the place of others
    serving.doubts += [
        f"{each.run_dir.name} {each.ending()} during the run; its last lines:\n"
        f"{tail(each.log)}"
        for each in dead
    ]  # fmt: skip


def _entries(made: Fleet, block: FleetBlock) -> list[dict[str, Any]]:
    first = made.members[0].served
    return [
        {"name": member.run_dir.name, "url": member.endpoint.url, "served": member.served or first,
         "settings": block.servers.get(member.number, {})}
        for member in made.members
    ]  # fmt: skip
