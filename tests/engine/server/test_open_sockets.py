"""What a server opens, and what strangers may send there. docs/threat_model.md cites it."""

import contextlib
import socket
import stat
from pathlib import Path

import psutil
import zmq

from tests.engine.server_process import post, wait_for


def listening(pid: int) -> list[tuple[str, int]]:
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = [each for process in processes for each in process.net_connections("inet")]
    return [tuple(each.laddr) for each in found if each.status == psutil.CONN_LISTEN]


def local_sockets(pid: int) -> list[Path]:
    """Paths of the sockets between front and core."""
    connections = psutil.Process(pid).net_connections("unix")
    return sorted({Path(each.laddr) for each in connections if str(each.laddr).startswith("/")})


def test_a_server_listens_on_one_loopback_port_and_its_other_sockets_are_private(api_server):
    assert len(listening(api_server.process.pid)) == 1 and listening(api_server.process.pid)[0][0] == "127.0.0.1"
    sockets = local_sockets(api_server.process.pid)
    assert sockets
    for path in sockets:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def send_raw(path: Path, content: bytes) -> None:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2)
        connection.connect(str(path))
        connection.sendall(content)


GARBAGE = [b"", b"\x00", b"garbage", b"\x82\xa4type\xa4Stop", b"\xc1" * 100, b"\xff" * 70_000]


def test_garbage_on_every_socket_kills_nothing(api_server):
    """Only the same user reaches the sockets; even so a stray message must not cost open streams their core."""
    core = api_server.core_pid()
    with zmq.Context() as context:
        for path in local_sockets(api_server.process.pid):
            for content in GARBAGE:
                send_raw(path, content)
            sender = context.socket(zmq.PUSH)
            sender.setsockopt(zmq.LINGER, 1000)
            sender.connect(f"ipc://{path}")
            for content in GARBAGE:
                with contextlib.suppress(zmq.Again):
                    sender.send(content, zmq.NOBLOCK)
            sender.close()
    url = api_server.url.removeprefix("http://").split(":")
    for content in GARBAGE:
        with contextlib.suppress(OSError), socket.create_connection((url[0], int(url[1])), timeout=5) as connection:
            connection.sendall(content)
    wait_for(lambda: post(api_server, max_tokens=2).status_code == 200)
    assert api_server.core_pid() == core and api_server.process.poll() is None
