"""The routers that a fleet may have: which settings a server needs for each, and how it is started.

Routers pin packages that ours do not stand. So each is looked for in a virtual environment of its own: the one that is
named, or that the environment variable names. Else it is looked for on the path.
"""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from sojourn.loadgen.scenario.scenario import SCENARIO_FOLDER
from sojourn.metrics.errors import InputError

ADAPTERS = Path(__file__).parents[2] / "scale"  # what runs in a router's environment
ENVIRONMENT = "SOJOURN_ROUTER_ENV"  # names the virtual environment of the router, where no option does


@dataclass(frozen=True, slots=True)
class FleetServer:
    """One server of a fleet, as its router knows it."""

    url: str
    model: str  # its served name
    checkpoint: str  # its folder, or the name of a bundled one
    block_size: int  # tokens
    kv_events: str  # addresses of its events and of their replay
    kv_events_replay: str


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """Equal servers that a router starts itself, on this machine."""

    command: list[str]  # `sojourn serve` without address and run directory
    count: int
    most: int  # above `count`: that many while they are needed
    num_ranks: int  # of each server, with a device of its own
    folder: Path  # for logs, records and the file of ray_servers.py
    records: bool


class Router(Protocol):
    """A router as a fleet starts it: a FrontRouter or a StartingRouter."""

    name: str
    policies: tuple[str, ...]  # the first one is the default
    install: str  # the command that installs it
    keeps_request_ids: bool  # the servers see the names that clients give to requests

    def program(self, environment: Path | None) -> Path | None:
        """What is started; None where it is not installed."""
        ...

    def refusal(self, program: Path) -> str | None:
        """Why what is installed cannot be used; None where it can."""
        ...


class FrontRouter(Router, Protocol):
    """It is given its servers."""

    def command(self, program: Path, servers: Sequence[FleetServer], port: int, policy: str) -> list[str]:
        """Starts it on the loopback, in front of servers that are ready."""
        ...


@runtime_checkable
class StartingRouter(Router, Protocol):
    """It starts, replaces and ends its servers itself."""

    def start_command(self, program: Path, plan: ServerPlan, port: int, policy: str) -> list[str]:
        """Starts it and its servers on the loopback. It ends all of them when it gets SIGTERM."""
        ...


class VllmRouter:
    """vLLM's router (Rust in a wheel). With `kv_aware` it subscribes to the KV events of each server."""

    name = "vllm-router"
    policies = ("kv_aware", "cache_aware", "round_robin", "random", "power_of_two", "consistent_hash")
    install = "pip install vllm-router==0.1.17"
    keeps_request_ids = True

    def program(self, environment: Path | None) -> Path | None:
        return _program("vllm-router", environment)

    def refusal(self, program: Path) -> str | None:
        return None

    def command(self, program: Path, servers: Sequence[FleetServer], port: int, policy: str) -> list[str]:
        arguments: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": port,
            "policy": policy,
            "worker-startup-timeout-secs": 60,
            "worker-startup-check-interval": 1,
            "health-check-endpoint": "/ready",
            "health-check-interval-secs": 1,
            "health-failure-threshold": 2,
            "health-success-threshold": 1,
            "request-id-headers": "x-request-id",
            "log-level": "info",
        }
        command = [str(program)]
        for name, value in arguments.items():
            command += [f"--{name}", str(value)]
        command += ["--worker-urls", *(server.url for server in servers)]
        if policy == "kv_aware":
            for server in servers:
                command += ["--kv-event-source", f"{server.url}={server.kv_events}"]
                command += ["--kv-event-replay-source", f"{server.url}={server.kv_events_replay}"]
            command += ["--kv-event-block-size", str(servers[0].block_size), "--kv-event-model", servers[0].model]
        return command


class Dynamo:
    """NVIDIA Dynamo's frontend, and a worker of ours for each server, all in Dynamo's environment."""

    name = "dynamo"
    policies = ("kv", "round-robin", "random", "power-of-two", "least-loaded")
    install = (
        "pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1 && pip install 'pydantic<=2.13.5' aiohttp "
        "msgspec pyzmq uvloop prometheus-client zstandard transformers"
    )
    keeps_request_ids = False

    def program(self, environment: Path | None) -> Path | None:
        python = _program("python", environment)
        packages = () if python is None else python.parent.parent.glob("lib/python3*/site-packages/dynamo/frontend")
        return python if any(packages) else None

    def refusal(self, program: Path) -> str | None:
        return None

    def command(self, program: Path, servers: Sequence[FleetServer], port: int, policy: str) -> list[str]:
        bundled = SCENARIO_FOLDER / servers[0].checkpoint
        model = bundled if bundled.is_dir() else Path(servers[0].checkpoint).resolve()
        command = [str(program), str(ADAPTERS / "dynamo_fleet.py"), "--port", str(port), "--policy", policy]
        command += ["--model", str(model)]
        return command + [word for server in servers for word in ("--server", server.url)]


class RayServe:
    """Ray Serve with `scale/ray_app.py`, in Ray's environment. Each of its replicas starts a server."""

    name = "ray"
    policies = ("consistent_hash", "least_requests", "round_robin")
    version = "2.60"
    install = "pip install 'ray[serve]==2.60.0'"
    keeps_request_ids = True
    # Here a server is ready within seconds; the defaults of ray_app.py are for servers that load for minutes.
    local: ClassVar[dict[str, float]] = {
        "cpus": 0, "drain_seconds": 8, "look_back_seconds": 12, "upscale_seconds": 5, "downscale_seconds": 30,
    }  # fmt: skip

    def program(self, environment: Path | None) -> Path | None:
        python = _program("python", environment)
        return python if python is not None and _versions(python, "ray") else None

    def refusal(self, program: Path) -> str | None:
        found = _versions(program, "ray")
        if any(version.startswith(f"{self.version}.") for version in found):
            return None
        return f"it has ray {', '.join(found)}, and scale/ray_app.py is written for {self.version}"

    def start_command(self, program: Path, plan: ServerPlan, port: int, policy: str) -> list[str]:
        application = self.local | {
            "command": plan.command, "replicas": plan.count, "max_replicas": max(plan.most, plan.count),
            "routing": policy, "gpus": plan.num_ranks, "folder": str(plan.folder.resolve()), "records": plan.records,
        }  # fmt: skip
        script = str(ADAPTERS / "ray_fleet.py")
        return [str(program), script, "--port", str(port), "--application", json.dumps(application)]


ROUTERS: dict[str, Router] = {router.name: router for router in (VllmRouter(), Dynamo(), RayServe())}


def known_router(name: str, policy: str | None) -> Router:
    """The router of that name. Raises InputError where it is none of ours, or has no such policy."""
    if name not in ROUTERS:
        raise InputError(f"--router {name!r} is not known; there is {', '.join(ROUTERS)}")
    if policy is not None and policy not in ROUTERS[name].policies:
        raise InputError(f"--policy {policy!r} is none of {name}; it has {', '.join(ROUTERS[name].policies)}")
    return ROUTERS[name]


def installed(router: Router, environment: Path | None) -> Path:
    """The router's program. Raises InputError with the command that installs it."""
    program = router.program(environment)
    if program is None:
        where = f"in {environment}" if environment else f"on the path, nor in an environment that {ENVIRONMENT} names"
        raise InputError(
            f"the router {router.name} is not installed {where}; in a virtual environment of its own: "
            f"{router.install}; then name that folder with --router-env"
        )
    if (reason := router.refusal(program)) is not None:
        raise InputError(f"the router {router.name} at {program} cannot be used: {reason}; {router.install}")
    return program


def _program(name: str, environment: Path | None) -> Path | None:
    if environment is None and (named := os.environ.get(ENVIRONMENT)):
        environment = Path(named)
    if environment is not None:
        program = environment / "bin" / name
        return program if program.is_file() else None
    found = shutil.which(name)
    return None if found is None else Path(found)


def _versions(python: Path, package: str) -> list[str]:
    """Of a package in the environment of that python."""
    found = python.parent.parent.glob(f"lib/python3*/site-packages/{package}-*.dist-info")
    return [folder.name.removeprefix(f"{package}-").removesuffix(".dist-info") for folder in found]
