"""One request on one socket: stamp bytes, parse later.

Nothing here decodes, counts or decides what a chunk means. The one thing that is read is where the HTTP message ends
(httptools, about a microsecond a read, after the stamp), so that a server that keeps the connection open does not
keep a request open.
"""

from collections.abc import Callable
from time import monotonic_ns

import gevent
import httptools
from gevent import socket, ssl

from loadgen.rawlog import BYTES, CANCELLED, CLOSED, DISPATCHED, ERROR, SENT, TIMEOUT, Event

READ_SIZE = 65_536


class _MessageEnd:
    """Learns from httptools that the message is complete."""

    complete = False

    def on_message_complete(self) -> None:
        self.complete = True


def send_request(
    index: int, wire: bytes, address: tuple[int, tuple], tls: tuple[ssl.SSLContext, str] | None, timeout_s: float,
    record: Callable[[Event], None],
) -> tuple[bool, int, int, str]:  # fmt: skip
    """Sends one request and stamps all that comes back. Returns (ended well, last stamp, bytes read, why not).

    `record` takes every event as it happens; the last one is always terminal: closed, error, timeout or cancelled.
    """
    last_ns = monotonic_ns()
    record((index, last_ns, DISPATCHED, b""))
    num_bytes, connection = 0, None
    parser_state = _MessageEnd()
    parser = httptools.HttpResponseParser(parser_state)
    timeout = gevent.Timeout.start_new(timeout_s)
    try:
        connection = socket.socket(address[0], socket.SOCK_STREAM)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.connect(address[1])
        if tls is not None:
            connection = tls[0].wrap_socket(connection, server_hostname=tls[1])
        record((index, monotonic_ns(), SENT, b""))
        connection.sendall(wire)
        receive = connection.recv
        while not parser_state.complete:
            data = receive(READ_SIZE)
            now_ns = monotonic_ns()
            if not data:
                break
            record((index, now_ns, BYTES, data))
            last_ns = now_ns
            num_bytes += len(data)
            parser.feed_data(data)
        status = parser.get_status_code() if num_bytes else 0
        record((index, monotonic_ns(), CLOSED, b""))
        return status == 200, last_ns, num_bytes, "" if status == 200 else f"HTTP {status}" if status else "no reply"
    except gevent.Timeout as expired:
        if expired is not timeout:
            raise
        record((index, monotonic_ns(), TIMEOUT, b""))
        return False, monotonic_ns(), num_bytes, "timeout"
    except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        reason = f"{type(error).__name__}: {error}"
        record((index, monotonic_ns(), ERROR, reason.encode()))
        return False, monotonic_ns(), num_bytes, reason
    except gevent.GreenletExit:
        record((index, monotonic_ns(), CANCELLED, b""))
        return False, monotonic_ns(), num_bytes, "cancelled"
    finally:
        timeout.close()
        if connection is not None:
            connection.close()
