"""The socket that a server listens on."""

import asyncio
import socket

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.http.listener import listen


def test_an_answers_body_does_not_wait_for_the_acknowledgement_of_its_head():
    async def scenario() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen(EngineConfig(model="tiny-model", port=0))
        server = await asyncio.start_server(take, sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname())
        without_delay = await accepted
        writer.close()
        server.close()
        return without_delay

    assert asyncio.run(scenario()) == 1
