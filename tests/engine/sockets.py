"""A call on a socket of its own: for tests that read slowly, or leave."""

import contextlib
import json
import random
import socket
from collections.abc import Iterator

from tests.engine.server_process import Running


@contextlib.contextmanager
def call(server: Running, name: str, body: dict, *, small: bool = False) -> Iterator[socket.socket]:
    """A completion that was sent. `small`: the kernel holds little of the answer for who does not read it, 40 kB."""
    host, port = server.url.removeprefix("http://").split(":")
    content = json.dumps({"ignore_eos": True} | body).encode()
    with socket.socket() as opened:
        if small:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        opened.connect((host, int(port)))
        opened.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nx-request-id: %s\r\nContent-Length: %d\r\n\r\n"
            % (name.encode(), len(content))
            + content
        )
        yield opened


def ids(num_tokens: int, seed: int) -> list[int]:
    """A prompt of exactly so many tokens."""
    return random.Random(seed).choices(range(260, 1000), k=num_tokens)


# 180 kB with the first token of each choice, the prompt's scores: more than uvicorn (64 kB) and a small socket hold. So
# what is written next waits for a reader, and no choice of a call is written together with another.
LARGE_ANSWER = {"prompt": ids(300, 9), "n": 2, "max_tokens": 10, "logprobs": 20, "echo": True, "stream": True}
