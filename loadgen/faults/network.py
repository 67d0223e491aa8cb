"""A TCP proxy with the delay, jitter and bandwidth of a network.

python -m sojourn.loadgen.faults.network LISTEN_PORT SERVER_PORT DELAY_MS JITTER_MS KIB_PER_S SHARE WAYS

KIB_PER_S 0 is no bound. With WAYS 1 only what goes to the server is late, with 2 the answers, too.
"""

import asyncio
import contextlib
import random
import socket
import sys
from dataclasses import dataclass

PIECE_BYTES = 1400  # of Ethernet: what one packet carries
RECEIVE_BUFFER_BYTES = 4096  # of a connection with a bandwidth: what it cannot carry waits in the server


@dataclass(frozen=True, slots=True)
class Line:
    """One way of a connection."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0  # 0: no bound


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line, seed: int) -> None:
    """All bytes, in order, each at least `delay_s` late; then the end of the stream."""
    loop, rng = asyncio.get_running_loop(), random.Random(seed)
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=0 if not line.bytes_per_s else 4)

    async def deliver() -> None:
        while True:
            due, piece = await under_way.get()
            await asyncio.sleep(due - loop.time())
            if not piece:
                return
            writer.write(piece)
            await writer.drain()

    delivery = asyncio.create_task(deliver())
    free_at = last_due = loop.time()
    try:
        while piece := await reader.read(PIECE_BYTES if line.bytes_per_s else 65_536):
            now = loop.time()
            if line.bytes_per_s:
                free_at = max(free_at, now) + len(piece) / line.bytes_per_s
                await asyncio.sleep(free_at - now)
            last_due = max(last_due, loop.time() + line.delay_s + rng.random() * line.jitter_s)
            await under_way.put((last_due, piece))
        await under_way.put((last_due, b""))
        await delivery
    finally:
        delivery.cancel()


async def connect(port: int, is_narrow: bool) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """To the server. A narrow line has a small receive buffer, before the connection: its window follows from it."""
    client = socket.socket()
    client.setblocking(False)
    if is_narrow:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return await asyncio.open_connection(sock=client, limit=2 * PIECE_BYTES if is_narrow else 65_536)


class Proxy:
    """Joins each connection to one to the server, over a line or, for those outside `share`, directly. The way back
    has a line of its own."""

    def __init__(self, server_port: int, line: Line, share: float, back: Line | None = None):
        self._server_port, self._line, self._share = server_port, line, share
        self._back = line if back is None else back
        self._connections = 0

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        is_hit = int(number * self._share) > int((number - 1) * self._share)
        line, line_back = (self._line, self._back) if is_hit else (Line(), Line())
        upstream: asyncio.StreamWriter | None = None
        with contextlib.suppress(OSError):
            back, upstream = await connect(self._server_port, bool(line_back.bytes_per_s))
            ways = (
                carry(reader, upstream, Line(line.delay_s, line.jitter_s), 2 * number),
                carry(back, writer, line_back, 2 * number + 1),
            )
            tasks = [asyncio.create_task(way) for way in ways]
            # Either end may leave: then the other one has to know.
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for end in (writer, upstream):
            if end is not None:
                end.close()


async def serve(listen_port: int, proxy: Proxy) -> None:
    server = await asyncio.start_server(proxy.join, "127.0.0.1", listen_port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    ports, (delay_ms, jitter_ms, kib_per_s, share) = map(int, sys.argv[1:3]), map(float, sys.argv[3:7])
    listen_port, server_port = ports
    line = Line(delay_ms / 1e3, jitter_ms / 1e3, kib_per_s * 1024)
    back = Line() if sys.argv[7] == "1" else line
    asyncio.run(serve(listen_port, Proxy(server_port, line, share, back)))
