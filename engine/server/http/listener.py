"""The port of a server: its address, its file descriptors, and uvicorn's settings."""

import ipaddress
import resource
import socket
from functools import partial

import uvicorn
from fastapi import FastAPI

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.http.connections import Connections
from sojourn.engine.server.http.protocol import BoundedProtocol
from sojourn.engine.server.http.web_pages import is_loopback
from sojourn.metrics.errors import ServerError

OTHER_DESCRIPTORS = 256  # files, pipes, libraries: what the server opens beside connections
BACKLOG = 2048  # connections that the kernel stores while the event loop is busy


def listen(config: EngineConfig) -> socket.socket:
    """A bound socket. Raises ServerError if the address cannot be taken."""
    host, port = config.host.strip("[]"), config.port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # asyncio sets TCP_NODELAY where the protocol is named. Without it an answer's body waits 40 ms behind its head,
        # until the client acknowledges that.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --host") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ServerError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from None
    return listener


def url_of(config: EngineConfig, listener: socket.socket) -> str:
    host = config.host.strip("[]")
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def uvicorn_settings(app: FastAPI, connections: Connections) -> uvicorn.Config:
    """The event loop is that of the telemetry: asyncio's own accepts all waiting connections in one turn, uvloop one;
    they stream equally fast."""
    return uvicorn.Config(
        app,
        loop="none",
        http=partial(BoundedProtocol, connections),
        ws="none",
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=connections.config.keep_alive_seconds,
        timeout_graceful_shutdown=5,
    )


def raise_descriptor_limit(connections: Connections) -> None:
    """Takes as many file descriptors as the connections need, or all that this process may have and fewer connections.

    Without a free descriptor nobody gets in, and no file is written.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections.limit + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and soft < needed:
        connections.limit = max(1, soft - OTHER_DESCRIPTORS)
        print(
            f"This process may open {soft:,} files, so there may be {connections.limit:,} connections and not "
            f"max_connections, {connections.config.max_connections:,}; raise its limit with `ulimit -n`",
            flush=True,
        )


def exposure(config: EngineConfig) -> str | None:
    """A warning where others can reach the server and nothing keeps them out; None where that is not so."""
    if is_loopback(config.host) or config.api_keys is not None:
        return None
    ways = "--api-keys asks for a key"
    if config.debug_routes == "on":
        ways += ", --debug-routes off takes away what shows and profiles requests"
    where = "every address of this machine" if _is_any(config.host) else config.host
    return f"Warning: whoever reaches {where} can use this server; {ways}, and --host 127.0.0.1 serves this machine"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return host == ""
