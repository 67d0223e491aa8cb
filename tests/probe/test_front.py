"""The middleware: stamps, identities, and no text. And the queue, the file and the socket behind it."""

import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest

from sojourn.interop.probe.folder import call_name
from sojourn.interop.probe.records import Ended as TheirEnded
from sojourn.interop.probe.stream import read_stream, read_streams
from sojourn.metrics.errors import RunDataError

PROMPT, ANSWER = "the secret of the prompt", "the secret of the answer"


def call(app, headers=(), path="/v1/completions", method="POST"):
    sent = []

    async def receive():
        return {"type": "http.request", "body": PROMPT.encode(), "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": path, "headers": list(headers), "app": SimpleNamespace(state=None),
    }  # fmt: skip
    asyncio.run(app(scope, receive, send))
    return sent


async def answers(scope, receive, send):
    await receive()
    scope["seen"] = dict(scope["headers"])
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (ANSWER, ANSWER):
        await send({"type": "http.response.body", "body": part.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SOJOURN_PROBE", str(tmp_path / "probe"))
    return tmp_path / "probe"


def test_call_is_stamped_in_order_and_has_no_text(folder):
    from sojourn_probe.vllm_front import Middleware

    app = Middleware(answers)
    plain = []
    asyncio.run(answers({"headers": []}, _nothing, _keep(plain)))
    assert call(app, [(b"x-request-id", b"mine"), (b"x-session-id", b"s")]) == plain
    call(app)
    call(app, path="/metrics")
    call(app, method="GET")
    app._writer.close()
    (stream,) = read_streams(folder)
    first, second = stream.calls
    assert (first.request, first.session, first.status, first.writes) == ("mine", "s", 200, 2) and first.streamed
    assert first.arrived_ns <= first.first_written_ns <= first.written_ns <= first.finished_ns
    assert len(second.request) == 32
    content = b"".join(file.read_bytes() for file in folder.iterdir())
    assert b"secret" not in content


def test_identity_that_the_client_left_out_reaches_the_server(folder):
    from sojourn_probe.vllm_front import Middleware

    seen = {}

    async def server(scope, receive, send):
        seen.update(scope["headers"])
        await answers(scope, receive, send)

    call(Middleware(server))
    assert len(seen[b"x-request-id"]) == 32


@pytest.mark.parametrize(
    "internal",
    ["cmpl-mine-1-0-00c0ffee", "chatcmpl-mine-1-00c0ffee", "mine-1-00c0ffee", "3_cmpl-mine-1-0-00c0ffee"],
)  # fmt: skip
def test_identities_of_vllm_lead_to_the_callers(internal):
    assert call_name(internal, {"mine-1": None}) == "mine-1"
    assert call_name(internal, {}) == internal


def test_full_queue_drops_and_says_so(folder):
    from sojourn_probe.records import Ended
    from sojourn_probe.writer import begin

    writer = begin("core", "vllm", "0")
    writer.capacity = 3
    for number in range(5000):
        writer.put(Ended(number, number, "stop"))
    writer.close()
    (stream,) = read_streams(folder)
    assert stream.dropped + len(stream.ended) == 5000 and stream.dropped > 0


def test_disk_that_takes_nothing_ends_the_stream_and_not_the_server(folder, caplog):
    from sojourn_probe.records import Ended
    from sojourn_probe.writer import begin

    writer = begin("core", "vllm", "0")
    writer._sink._file.close()
    writer._sink.write = _fails
    writer.put(Ended(1, 1, "stop"))
    writer._flush()
    writer.put(Ended(2, 2, "stop"))
    assert writer.dropped == 2 and "takes no more records" in caplog.text
    writer.close()


def test_disk_that_takes_a_part_ends_the_stream_before_the_torn_record(folder, caplog):
    from sojourn_probe.records import Ended
    from sojourn_probe.writer import begin

    writer = begin("core", "vllm", "0")
    file = writer._sink._file
    writer.put(Ended(1, 1, "stop"))
    writer._flush()
    writer._sink._file = SimpleNamespace(write=lambda content: file.write(content[:5]), close=file.close)
    for number in (2, 3):
        writer.put(Ended(number, number, "stop"))
        writer._flush()
    writer.close()
    (stream,) = read_streams(folder)
    assert [each.handle for each in stream.ended] == [1] and writer.dropped == 2
    assert "the disk took only a part" in caplog.text


def test_disk_that_fills_at_the_end_does_not_harm_the_server(folder):
    from sojourn_probe.records import Ended
    from sojourn_probe.writer import begin

    writer = begin("core", "vllm", "0")
    writer._sink.write = _fails
    writer.put(Ended(1, 1, "stop"))
    writer.close()
    assert writer.dropped == 1


def test_receiver_takes_the_place_of_one_that_was_killed_and_of_nothing_else(tmp_path):
    from sojourn_probe.__main__ import listening

    place, plain = str(tmp_path / "socket"), tmp_path / "plain"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(place)
    with listening(socket.AF_UNIX, place), pytest.raises(OSError, match="in use"):
        listening(socket.AF_UNIX, place)
    plain.write_text("a file of somebody")
    with pytest.raises(OSError, match="in use"):
        listening(socket.AF_UNIX, str(plain))
    assert plain.read_text() == "a file of somebody"


def test_receiver_begins_again_beside_connections_that_end(tmp_path):
    from sojourn_probe.__main__ import listening

    with listening(socket.AF_INET, ("127.0.0.1", 0)) as first:
        place = first.getsockname()
        with socket.create_connection(place):
            first.accept()[0].close()  # our end waits in TIME_WAIT
    with listening(socket.AF_INET, place) as again:
        assert again.getsockname() == place


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:80", "tcp:example.org:80", "tcp:127.0.0.1:0", "unix:"])
def test_socket_beyond_this_host_is_refused(address, monkeypatch, caplog):
    from sojourn_probe.writer import begin

    monkeypatch.setenv("SOJOURN_PROBE", address)
    assert begin("core", "vllm", "0") is None and "should be a folder" in caplog.text


def test_stream_over_a_socket_is_the_stream_of_a_file(tmp_path, monkeypatch):
    from sojourn_probe.__main__ import _keep as keep
    from sojourn_probe.records import Ended
    from sojourn_probe.writer import begin

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        monkeypatch.setenv("SOJOURN_PROBE", f"unix:{tmp_path / 'socket'}")
        writer = begin("core", "vllm", "0")
        receiver = threading.Thread(target=lambda: keep(listener.accept()[0], tmp_path / "one.probe"))
        receiver.start()
        writer.put(Ended(7, 8, "stop"))
        writer.close()
        receiver.join(timeout=5)
    assert read_stream(tmp_path / "one.probe").ended == [TheirEnded(7, 8, "stop")]


def test_cut_and_foreign_files(folder):
    from sojourn_probe.records import Ended
    from sojourn_probe.writer import begin

    writer = begin("core", "vllm", "0")
    writer.put(Ended(1, 1, "stop"))
    writer.close()
    (file,) = folder.iterdir()
    content = file.read_bytes()
    for size in range(len(content)):
        file.write_bytes(content[:size])
        stream = read_stream(file)
        assert stream is None or not stream.ended
    file.write_bytes(b"SOJOURN-PROBE-9\n" + content[16:])
    with pytest.raises(RunDataError, match="another version"):
        read_stream(file)
    file.write_bytes(content[:20] + b"\xc1" + content[21:])
    with pytest.raises(RunDataError, match="damaged"):
        read_stream(file)


async def _nothing():
    return {"type": "http.request"}


def _keep(messages):
    async def send(message):
        messages.append(message)

    return send


def _fails(content):
    raise OSError(28, "the disk is full")
