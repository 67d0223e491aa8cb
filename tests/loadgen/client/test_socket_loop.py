"""The socket loop: what is sent when, on which connection, how long anybody waits, and when bytes came."""

import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from sojourn.live.watch.fetch import fetch
from sojourn.loadgen.client import arrival_stamps as stamps
from sojourn.loadgen.client.arrival_stamps import KernelClock
from sojourn.loadgen.client.event_log import BYTES, NO_REQUEST, RECONNECTED, event_files
from sojourn.loadgen.client.outgoing import Outgoing
from sojourn.loadgen.client.socket_loop import SocketLoop
from sojourn.loadgen.record.parse import events_by_request
from sojourn.loadgen.scenario.scenario import Target
from sojourn.loadgen.target.endpoint import parse_base_url, served_models
from sojourn.metrics.errors import ServerError
from tests.loadgen.scenarios import replay, scenario
from tests.loadgen.scripted_server import Script, ScriptedServer

pytestmark = pytest.mark.server

END = b"the end"  # of a body that takes several reads
REPLY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class PlainServer:
    """Answers every request on a connection with the same bytes, and hangs up after `hang_up_after` of them.

    It calls `before_reply` between a request and its reply.
    """

    def __init__(
        self,
        hang_up_after: int = 10**6,
        before_reply: Callable[[], object] = lambda: None,
        tls: ssl.SSLContext | None = None,
    ):
        self._tls = tls
        self.connections, self.requests = 0, 0
        self.replied, self.hung_up = threading.Event(), threading.Event()
        self._hang_up_after, self._before_reply = hang_up_after, before_reply
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = (socket.AF_INET, self._listening.getsockname())
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listening.accept()
            self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        answered = 0
        if self._tls is not None:
            try:
                connection = self._tls.wrap_socket(connection, server_side=True)
            except OSError:  # a client that does not trust it
                return
        with connection, suppress(ConnectionResetError):
            while answered < self._hang_up_after and self._read(connection):
                self.requests += 1
                self._before_reply()
                connection.sendall(REPLY)
                self.replied.set()
                answered += 1
        self.hung_up.set()

    def _read(self, connection: socket.socket) -> bytes:
        content = connection.recv(65_536)
        while self._tls is not None and content and not content.endswith(END):
            more = connection.recv(65_536)
            content = content + more if more else b""
        return content


def request(index: int) -> Outgoing:
    return Outgoing(index, time.monotonic_ns(), b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", Target(timeout_s=5.0))


def sent(server: PlainServer, count: int, reuse: bool, at_once: bool = True) -> tuple[list, SocketLoop]:
    """Sends requests at once, or each after the end of the one before, and returns how they ended."""
    ends = []

    def ended(outgoing, end):
        ends.append((outgoing.index, end))
        if not at_once and len(ends) < count:
            loop.at(request(len(ends)))

    loop = SocketLoop(server.address, None, ended, reuse=reuse)
    for index in range(count if at_once else 1):
        loop.at(request(index))
    loop.run()
    loop.close()
    return ends, loop


@pytest.mark.parametrize(("reuse", "connections"), [(False, 4), (True, 1)])
def test_connections_are_kept_only_where_the_target_says_so(reuse, connections):
    server = PlainServer()
    ends, _ = sent(server, 4, reuse, at_once=False)
    assert [index for index, ended in ends if not ended.reason] == [0, 1, 2, 3]
    assert (server.connections, server.requests) == (connections, 4)


def test_requests_that_overlap_never_share_a_connection():
    all_three = threading.Barrier(3, timeout=10)  # no reply before the third request has come
    server = PlainServer(before_reply=all_three.wait)
    ends, _ = sent(server, 3, reuse=True)
    assert len(ends) == 3 and server.connections == 3


def test_connection_closed_by_the_server_is_replaced_before_anything_is_sent():
    """The server hangs up after each reply without a word: nothing is lost, nothing is sent twice, and it is booked."""
    server = PlainServer(hang_up_after=1)
    ends, loop = sent(server, 3, reuse=True)
    assert len(ends) == 3 and server.requests == 3
    connection = next(iter(loop._connections.values()), None)
    assert connection is None  # those that were closed are not kept


def test_stale_connection_is_booked(tmp_path):
    """It is closed at the very moment of the next request: nobody has polled it since."""
    server = PlainServer(hang_up_after=1)
    ends = []

    def follow(outgoing, ended):
        ends.append(ended)
        if len(ends) == 1:
            server.hung_up.wait(10)  # the loop does not look while the server hangs up
            loop.at(request(1))

    loop = SocketLoop(server.address, None, follow, reuse=True)
    loop.at(request(0))
    loop.run()
    assert [ended.reason for ended in ends] == ["", ""] and server.requests == 2
    assert list(loop.log.kind).count(RECONNECTED) == 1
    loop.close()


def test_whole_run_reuses_connections(tmp_path):
    """The scripted server closes after each reply, whatever it is asked: a client that may reuse copes."""
    server = ScriptedServer().start()
    target = {"connections": "reuse"}
    parsed = replay(scenario({"process": "constant", "rate_rps": 40, "count": 8}, target=target), server.url, tmp_path)
    assert {record.status for record in parsed.records} == {"ok"} and len(server.seen) == 8
    assert {seen["headers"]["Connection"] for seen in server.seen} == {"keep-alive"}


@pytest.mark.parametrize(
    ("script", "target", "error"),
    [
        ({"hang": True}, {"first_byte_timeout_s": 0.3}, "no byte of the reply within target.first_byte_timeout_s, 0.3 s"
         " from when it was sent"),
        ({"gap_s": 2.0}, {"gap_timeout_s": 0.4}, "the reply stood still for target.gap_timeout_s, 0.4 s"),
        ({"gap_s": 0.3, "num_tokens": 9}, {"timeout_s": 0.8, "gap_timeout_s": 0.6}, "no complete reply within "
         "target.timeout_s, 0.8 s from when it was due"),
    ],
)  # fmt: skip
def test_each_limit_of_waiting_has_its_own_sentence(tmp_path, script, target, error):
    server = ScriptedServer(Script(**script)).start()
    chosen = scenario({"process": "at_once", "count": 1}, target=target)
    record = replay(chosen, server.url, tmp_path).records[0]
    assert (record.status, record.error) == ("timeout", error)


def test_server_that_takes_no_connection_is_given_up():
    full = socket.socket()  # listens, but its queue is full: the kernel answers no further handshake
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    fillers = [socket.socket() for _ in range(4)]
    for filler in fillers:
        filler.setblocking(False)
        filler.connect_ex(full.getsockname())
    time.sleep(0.1)
    ends = []
    loop = SocketLoop((socket.AF_INET, full.getsockname()), None, lambda _, ended: ends.append(ended))
    loop.at(Outgoing(0, time.monotonic_ns(), b"x", Target(timeout_s=5.0, connect_timeout_s=0.3)))
    loop.run()
    loop.close()
    assert [ended.reason for ended in ends] == ["not connected within target.connect_timeout_s, 0.3 s"]


def test_bytes_are_stamped_when_they_came_however_late_they_are_read(tmp_path):
    """The loop does not read before the reply has come: its stamp is of the arrival, not of the read."""
    may_reply, read_from_ns = threading.Event(), []
    server = PlainServer(before_reply=lambda: may_reply.wait(10))

    def hold(now_ns):
        if server.requests and not may_reply.is_set():
            may_reply.set()
            server.replied.wait(10)
            time.sleep(0.01)  # far more than the comparison of the clocks may be off
            read_from_ns.append(time.monotonic_ns())

    loop = SocketLoop(server.address, None, lambda *_: None, on_turn=hold)
    loop.run([request(0)])
    stamp = next(ns for ns, kind in zip(loop.log.ns, loop.log.kind, strict=True) if kind == BYTES)
    loop.close()
    assert read_from_ns and stamp < read_from_ns[0]


def ancillary(wall_ns: int) -> list:
    return [(1, 37, struct.pack("qqqqqq", *divmod(wall_ns, 10**9), 0, 0, 0, 0))]


def test_stamp_of_the_kernel_is_brought_onto_the_monotonic_clock(monkeypatch):
    """Scripted clocks: the wall clock is 1,000 s ahead, then somebody sets it back an hour."""
    clocks = {"mono": 5 * 10**9, "ahead": 10**12}
    monkeypatch.setattr(stamps, "monotonic_ns", lambda: clocks["mono"])
    monkeypatch.setattr(stamps, "clock_gettime_ns", lambda _: clocks["mono"] + clocks["ahead"])
    clock = KernelClock()
    arrived = clocks["mono"] + clocks["ahead"]
    clocks["mono"] += 40_000_000  # it is read 40 ms later
    clock.compare()
    assert clock.stamp(ancillary(arrived)) == 5 * 10**9
    assert clock.stamp([]) == clock.stamp(ancillary(0)) == clocks["mono"]  # without a stamp, the moment after the read
    clocks["ahead"] -= 3600 * 10**9
    for _ in range(2):
        clocks["mono"] += 400_000_000
        clock.compare()
        assert clock.stamp(ancillary(arrived)) == clocks["mono"]  # which wall clock it was stamped by is not known
    clocks["mono"] += 10**9
    clock.compare()
    assert clock.stamp(ancillary(clocks["mono"] + clocks["ahead"] - 7)) == clocks["mono"] - 7


def test_wall_clock_that_is_set_while_the_loop_waits_moves_no_stamp(monkeypatch):
    """The clock is an hour behind until the wait in which the reply comes: the kernel has stamped it by the new one."""
    server, behind_ns = PlainServer(before_reply=lambda: time.sleep(0.05)), [3600 * 10**9]
    monkeypatch.setattr(stamps, "clock_gettime_ns", lambda clock: time.clock_gettime_ns(clock) - behind_ns[0])
    loop = SocketLoop(server.address, None, lambda *_: None)
    wait = loop._poller.wait

    def set_clock(wait_ns):
        ready = wait(wait_ns)
        behind_ns[0] = 0 if server.requests else behind_ns[0]
        return ready

    loop._poller.wait = set_clock
    before_ns = time.monotonic_ns()
    loop.run([Outgoing(0, before_ns, b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", Target(timeout_s=5.0))])
    stamp = next(ns for ns, kind in zip(loop.log.ns, loop.log.kind, strict=True) if kind == BYTES)
    loop.close()
    assert before_ns < stamp <= time.monotonic_ns()


def test_arrivals_are_made_as_they_come_and_take_no_time_before_the_first():
    """Four now and a thousand in an hour: only the first of these is made, to know when it is due."""
    server, made, ends = PlainServer(), [], []

    def arrivals():
        for index in range(1000):
            made.append(index)
            due_ns = start_ns + (0 if index < 4 else 3600 * 10**9)
            yield Outgoing(index, due_ns, b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", Target(timeout_s=5.0))

    def ended(outgoing, _):
        ends.append(outgoing.index)
        if len(ends) == 4:
            loop.stop()

    loop = SocketLoop(server.address, None, ended)
    start_ns = time.monotonic_ns()
    loop.run(arrivals())
    loop.close()
    assert sorted(ends) == [0, 1, 2, 3] and made == [0, 1, 2, 3, 4]


def test_events_of_a_run_are_in_the_order_of_stamping(tmp_path):
    server = ScriptedServer(Script(gap_s=0.002, num_tokens=20)).start()
    replay(scenario({"process": "at_once", "count": 20}), server.url, tmp_path)
    events = dict(events_by_request(event_files(tmp_path)))
    assert set(events) == {NO_REQUEST, *range(20)}
    for index in range(20):
        mine = [ns for _, ns, _, _ in events[index]]
        assert mine == sorted(mine) and len(mine) > 4


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
@pytest.mark.parametrize("read", [lambda url: fetch(url, 5), lambda url: served_models(parse_base_url(url))])
def test_a_port_that_speaks_the_other_of_http_and_https_is_told_so(tmp_path, read):
    secure, plain = PlainServer(tls=certified(tmp_path)[0]), PlainServer()
    for server, wrong, right in ((secure, "http", "https"), (plain, "https", "http")):
        port = server.address[1][1]
        with pytest.raises(ServerError, match=f"it speaks {right}: give {right}://127.0.0.1:{port}"):
            read(f"{wrong}://127.0.0.1:{port}")
    with pytest.raises(ServerError, match="refused"):
        read("https://127.0.0.1:9")


def certified(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's context for localhost, and the certificate that a client has to trust."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*new, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_requests_and_replies_of_any_size_go_through_tls_on_kept_connections(tmp_path):
    context, certificate = certified(tmp_path)
    server, ends = PlainServer(tls=context), []
    trusted = ssl.create_default_context(cafile=certificate)
    body = b"x" * 2_000_000 + END
    wire = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    loop = SocketLoop(server.address, (trusted, "localhost"), lambda _, ended: ends.append(ended), reuse=True)
    for index in range(2):
        loop.at(Outgoing(index, time.monotonic_ns() + index * 500_000_000, wire, Target(timeout_s=20.0)))
    loop.run()
    loop.close()
    assert [(ended.reason, ended.num_bytes) for ended in ends] == [("", len(REPLY))] * 2
    stranger = SocketLoop(server.address, (ssl.create_default_context(), "localhost"), lambda _, end: ends.append(end))
    stranger.at(Outgoing(2, time.monotonic_ns(), wire, Target(timeout_s=20.0)))
    stranger.run()
    stranger.close()
    assert "certificate verify failed" in ends[-1].reason
