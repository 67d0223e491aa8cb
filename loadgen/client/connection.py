"""One connection to the server and the request on it. Every call is non-blocking."""

import errno
import os
import re
import ssl
import sys
from contextlib import suppress
from select import POLLIN, POLLOUT
from urllib.parse import urlsplit, urlunsplit

import httptools
from gevent.monkey import get_original

from sojourn.live.watch.fetch import MOST_REDIRECTS, within_one_server
from sojourn.loadgen.client.arrival_stamps import ANCILLARY_SIZE, RECEIVED_IN_SOFTWARE, SO_TIMESTAMPING
from sojourn.loadgen.client.event_log import CANCELLED, TIMEOUT
from sojourn.loadgen.client.outgoing import BETWEEN_BYTES, CONNECT, FIRST_BYTE, WHOLE, Outgoing
from sojourn.loadgen.replies.reply import ReplyReader
from sojourn.loadgen.schedule.draws import NS_PER_S

# From below gevent: the loop has a thread of its own.
Socket = get_original("socket", "socket")
SOL_SOCKET, SO_ERROR, IPPROTO_TCP, TCP_NODELAY, MSG_PEEK, SOCK_STREAM = get_original(
    "socket", ["SOL_SOCKET", "SO_ERROR", "IPPROTO_TCP", "TCP_NODELAY", "MSG_PEEK", "SOCK_STREAM"]
)

READ_SIZE = 65_536
_STATUS_BYTES = len(b"HTTP/1.1 200")
_INFORMATIONAL = re.compile(rb"HTTP/1\.[01] 1(?!01)\d\d")
_TIMEOUT_FAULTS = {
    WHOLE: "no complete reply within target.timeout_s, {:g} s from when it was due",
    CONNECT: "not connected within target.connect_timeout_s, {:g} s",
    FIRST_BYTE: "no byte of the reply within target.first_byte_timeout_s, {:g} s from when it was sent",
    BETWEEN_BYTES: "the reply stood still for target.gap_timeout_s, {:g} s",
}


class HttpEnd:
    """What httptools reports: the message is complete; its sender closes the connection after it; where it leads."""

    FAULTS = (httptools.HttpParserError, httptools.HttpParserUpgrade)
    __slots__ = ("closes", "complete", "location")

    def __init__(self) -> None:
        self.complete = self.closes = False
        self.location = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"connection" and b"close" in value.lower():
            self.closes = True
        elif name == b"location":
            self.location = value

    def on_message_complete(self) -> None:
        self.complete = True


class Exchange:
    """One request in flight and the state of its reply."""

    __slots__ = (
        "_end", "_informational", "_num_redirects", "_parser", "_until_text", "_wire",
        "connection", "dispatched_ns", "first_read", "last_ns", "num_bytes", "outgoing", "reads",
        "sent_ns", "unsent",
    )  # fmt: skip

    def __init__(self, outgoing: Outgoing, dispatched_ns: int):
        self.outgoing = outgoing
        self.dispatched_ns = dispatched_ns
        self.sent_ns: int | None = None
        self.last_ns = 0
        self.num_bytes = 0
        self.first_read = False  # whether the last read was the first one
        self.reads: list[tuple[int, bytes]] = []
        self.connection: Connection | None = None  # None before it has one, and after its end
        self.unsent = self._wire = outgoing.wire  # `unsent`: b"" once the connection has it
        self._num_redirects = 0
        self._expect_answer()

    def _expect_answer(self) -> None:
        waits = self.outgoing.patience_ns is not None and self.outgoing.patience_for == "first_token"
        self._until_text = ReplyReader() if waits else None  # None once the first text has come
        self._informational: bytes | None = b""  # not yet fed; None once the answer has begun
        self._end = HttpEnd()
        self._parser = httptools.HttpResponseParser(self._end)

    def redirect(self, origin: str) -> bytes:
        """Where a complete answer sends the request within its server, by a status that keeps method and body; b"" of
        an answer that counts. What is to be sent then is in `unsent`."""
        if self.status not in (307, 308) or not self._end.location or self._num_redirects == MOST_REDIRECTS:
            return b""
        method, target, rest = self._wire.split(b" ", 2)
        to = within_one_server(origin + target.decode("latin-1"), self._end.location.decode("latin-1"))
        if to is None:
            return b""
        parts = urlsplit(to)
        path = urlunsplit(("", "", parts.path or "/", parts.query, "")).replace(" ", "%20").encode("latin-1")
        self.unsent = self._wire = b" ".join((method, path, rest))
        self._num_redirects += 1
        self.reads = []
        self._expect_answer()
        return path

    def feed(self, data: bytes, now_ns: int) -> bool:
        """Takes bytes of the reply. Returns whether it is complete. Raises one of HttpEnd.FAULTS."""
        self.first_read = not self.num_bytes
        self.last_ns = now_ns
        self.num_bytes += len(data)
        if self.outgoing.keep_reply or self.outgoing.target.stop_at_failures is not None:
            self.reads.append((now_ns, data))
        if self._until_text is not None:
            self._until_text.feed(data, now_ns)
            self._until_text = None if self._until_text.reply.chunk_ns else self._until_text
        data = self._behind_informational(data) if self._informational is not None else data
        if data:
            self._parser.feed_data(data)
        return self._end.complete

    def _behind_informational(self, data: bytes) -> bytes:
        """What follows the answers of status 1xx, 100 Continue and 103 Early Hints, which announce the one that counts;
        b"" while nobody can tell yet. 101 is none of them: it ends HTTP."""
        data = self._informational + data
        while _INFORMATIONAL.match(data):
            _, found, behind = data.partition(b"\r\n\r\n")
            if not found:
                self._informational = data
                return b""
            data = behind
        if len(data) < _STATUS_BYTES and b"HTTP/1.".startswith(data[:7]):
            self._informational = data
            return b""
        self._informational = None
        return data

    @property
    def status(self) -> int:
        return self._parser.get_status_code() if self.num_bytes and self._informational is None else 0

    def fault(self) -> str:
        """What an answer of status 200 that is over says of a failure, in its text or by its missing end; "" of a whole
        one. Only where `stop_at_failures` has its reads kept."""
        reader = ReplyReader()
        for _, piece in self.reads:
            reader.feed(piece, self.last_ns)
        reply = reader.end()
        return reply.error or ("" if reply.finished else "the reply has no end")

    @property
    def keeps_alive(self) -> bool:
        """Whether the next request may reuse this connection."""
        return self._end.complete and not self._end.closes and self._parser.get_http_version() == "1.1"

    def deadline(self) -> tuple[int, int, str]:
        """The deadline if nothing happens until then, the kind of the end, and its sentence."""
        outgoing = self.outgoing
        # A late request has used up part of its time: the whole counts from when it was due.
        ends = [(outgoing.due_ns, WHOLE)]
        if self.sent_ns is None:
            ends.append((self.dispatched_ns, CONNECT))
        elif not self.num_bytes:
            ends.append((self.sent_ns, FIRST_BYTE))
        else:
            ends.append((self.last_ns, BETWEEN_BYTES))
        ways = [
            (since_ns + round(limit_s * NS_PER_S), TIMEOUT, _TIMEOUT_FAULTS[name].format(limit_s))
            for since_ns, name in ends
            if (limit_s := getattr(outgoing.target, name)) is not None
        ]
        if outgoing.patience_ns is not None and (self._until_text is not None or outgoing.patience_for == "answer"):
            patience = f"left after its patience of {outgoing.patience_ns / NS_PER_S:.3g} s"
            ways.append((outgoing.due_ns + outgoing.patience_ns, CANCELLED, patience))
        return min(ways)


class Connection:
    """A socket, its TLS if any, and the bytes that are not written yet."""

    def __init__(self, address: tuple[int, tuple], tls: tuple[ssl.SSLContext, str] | None):
        self.ready = False  # TCP stands, and TLS
        self.watched = 0  # what the loop waits for
        self.exchange: Exchange | None = None
        self._reached = False  # TCP stands
        self._unsent = memoryview(b"")
        self._socket = Socket(address[0], SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            if sys.platform == "linux":
                with suppress(OSError):  # a kernel without such stamps
                    self._socket.setsockopt(SOL_SOCKET, SO_TIMESTAMPING, RECEIVED_IN_SOFTWARE)
            code = self._socket.connect_ex(address[1])
            if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
                raise OSError(code, os.strerror(code))
        except OSError:
            self._socket.close()
            raise
        self.descriptor = self._socket.fileno()
        self._tls = _Tls(*tls) if tls is not None else None

    @property
    def wants(self) -> int:
        """What to wait for: always the reply, and room for what is still to be written."""
        return POLLIN if self._reached and not self._unsent else POLLIN | POLLOUT

    def take(self, exchange: Exchange) -> None:
        self.exchange = exchange
        exchange.connection = self

    def connect(self) -> bool:
        """Advances TCP and TLS. Returns whether the connection is ready. Raises OSError if it fails."""
        if not self._reached:
            code = self._socket.getsockopt(SOL_SOCKET, SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
            try:
                self._socket.getpeername()
            except OSError as error:
                if error.errno == errno.ENOTCONN:
                    return False
                raise
            self._reached = True
        if not self.ready:
            self.ready = self._tls is None or self._shake_hands()
        return self.ready

    def _shake_hands(self) -> bool:
        while True:
            done = self._tls.shake_hands()
            self._unsent = memoryview(bytes(self._unsent) + self._tls.outgoing.read())
            self.flush()
            if done:
                return True
            try:
                data = self._socket.recv(READ_SIZE)
            except BlockingIOError:
                return False
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "closed during the TLS handshake")
            self._tls.incoming.write(data)

    def write(self, wire: bytes) -> None:
        """Takes a whole request, and writes as much as the socket accepts now."""
        self._unsent = memoryview(wire if self._tls is None else bytes(self._unsent) + self._tls.encrypt(wire))
        self.flush()

    def flush(self) -> None:
        while self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                return

    def receive(self) -> tuple[bytes, list]:
        """The bytes of one read, b"" at the end, and their ancillary data. Raises BlockingIOError without data."""
        data, ancillary, _, _ = self._socket.recvmsg(READ_SIZE, ANCILLARY_SIZE)
        return data, ancillary

    def decrypt(self, data: bytes) -> bytes:
        return data if self._tls is None else self._tls.decrypt(data)

    def stale(self) -> bool:
        """Whether the server has closed the connection, or sent bytes without a request."""
        try:
            self._socket.recv(1, MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self._socket.close()


class _Tls:
    """The TLS of one connection, in memory: the socket stays with the loop."""

    def __init__(self, context: ssl.SSLContext, host: str):
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self.incoming, self.outgoing, server_hostname=host)

    def shake_hands(self) -> bool:
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def encrypt(self, wire: bytes) -> bytes:
        self._object.write(wire)
        return self.outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """Raises ssl.SSLError for bytes that the server did not encrypt."""
        if data:
            self.incoming.write(data)
        else:
            self.incoming.write_eof()
        plain = []
        while True:
            try:
                piece = self._object.read(READ_SIZE)
            except (ssl.SSLWantReadError, ssl.SSLZeroReturnError, ssl.SSLEOFError):
                break
            if not piece:
                break
            plain.append(piece)
        return b"".join(plain)
