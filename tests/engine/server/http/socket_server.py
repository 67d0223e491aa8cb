"""An application behind the server's own protocol on a socket, in this process, with a clock that the test sets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial

from starlette.types import ASGIApp
from uvicorn import Config
from uvicorn.server import ServerState

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.http.connections import Connections
from sojourn.engine.server.http.listener import uvicorn_settings

TIMEOUT = 10


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SocketServer:
    connections: Connections
    clock: Clock
    address: tuple[str, int]
    clients: list["Client"] = field(default_factory=list)

    async def connect(self, receive_buffer: int | None = None) -> "Client":
        opened = socket.socket()
        opened.setblocking(False)
        if receive_buffer is not None:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(opened, self.address)
        client = Client(opened)
        self.clients.append(client)
        before = len(self.connections.open) + sum(self.connections.closed.values())
        await until(lambda: len(self.connections.open) + sum(self.connections.closed.values()) >= before)
        await asyncio.sleep(0.01)
        return client

    def pass_seconds(self, seconds: float) -> None:
        self.clock.now += seconds
        self.connections.close_overdue()

    @property
    def closed(self) -> dict[str, int]:
        """Those that were counted."""
        return {reason: count for reason, count in self.connections.closed.items() if count}


class Client:
    """A client that sends bytes as they are."""

    def __init__(self, opened: socket.socket):
        self.socket = opened

    async def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            await asyncio.get_running_loop().sock_sendall(self.socket, data)
        await asyncio.sleep(0.01)

    async def read(self, enough: bytes | None = None) -> bytes:
        """Until `enough` has come, or the end of the stream."""
        found = b""
        async with asyncio.timeout(TIMEOUT):
            while enough is None or enough not in found:
                part = await asyncio.get_running_loop().sock_recv(self.socket, 65536)
                if not part:
                    break
                found += part
        return found

    async def is_open(self) -> bool:
        """Neither data nor the end of the stream has come."""
        await asyncio.sleep(0.01)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        return False


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, **settings) -> AsyncIterator[SocketServer]:
    clock = Clock()
    connections = Connections(EngineConfig(model="tiny-model", **settings), clock)
    uvicorn_config: Config = uvicorn_settings(app, connections)
    uvicorn_config.load()
    loop = asyncio.get_running_loop()
    make = partial(
        uvicorn_config.http_protocol_class, config=uvicorn_config, server_state=ServerState(), app_state={}, _loop=loop
    )
    listener = await loop.create_server(make, "127.0.0.1", 0)
    server = SocketServer(connections, clock, listener.sockets[0].getsockname())
    try:
        yield server
    finally:
        for client in server.clients:
            client.socket.close()
        listener.close()
        await until(lambda: not connections.open)


async def until(condition) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.005)
