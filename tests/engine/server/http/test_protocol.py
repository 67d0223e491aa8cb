"""Heads, deadlines, readers and connections: each bound at, below and above."""

import asyncio
from collections.abc import Callable

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse

from sojourn.engine.server.http.protocol import DISCARDED_BYTES, MAX_PIPELINED
from tests.engine.server.http.socket_server import SocketServer, serving, until

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
DONE = b"well done"


async def answering(scope, receive, send) -> None:
    """Answers without reading the body."""
    await PlainTextResponse(DONE)(scope, receive, send)


async def echoing(scope, receive, send) -> None:
    """Body and header fields."""
    request = Request(scope, receive)
    body = await request.body()
    text = b"%d " % len(body) + b" ".join(sorted({name for name, _ in scope["headers"]}))
    await PlainTextResponse(text)(scope, receive, send)


def run(check: Callable, app=answering, **settings) -> dict[str, int]:
    """What was closed, by reason."""

    async def with_server() -> dict[str, int]:
        async with serving(app, **settings) as server:
            await check(server)
            return server.closed

    return asyncio.run(with_server())


def head(size: int) -> bytes:
    """A head of exactly so many bytes."""
    without = b"GET / HTTP/1.1\r\nHost: x\r\nX: \r\n\r\n"
    return without.replace(b"X: ", b"X: " + b"y" * (size - len(without)))


def is_refused(answer: bytes, status: int, code: bytes) -> bool:
    return (
        answer.startswith(b"HTTP/1.1 %d " % status)
        and b'"code":"%s"' % code in answer
        and b"application/json" in answer
    )


@pytest.mark.parametrize("parts", [1, 3])
def test_a_head_may_have_max_head_bytes(parts):
    async def check(server: SocketServer) -> None:
        for size, is_served in ((2047, True), (2048, True), (2049, False), (100_000, False), (2_000_000, False)):
            client, data = await server.connect(), head(size)
            step = -(-len(data) // parts)
            for begin in range(0, len(data), step):
                await client.send(data[begin : begin + step])
            answer = await client.read(DONE if is_served else None)
            assert (DONE in answer) == is_served
            assert is_served or is_refused(answer, 431, b"head_too_large")

    assert run(check, max_head_bytes=2048)["large_head"] == 3


def test_a_head_that_never_ends_is_refused_before_it_is_stored():
    async def check(server: SocketServer) -> None:
        client = await server.connect()
        sent = 0
        await client.send(b"GET / HTTP/1.1\r\nX: ")
        while await client.is_open():
            await client.send(b"y" * 512)
            sent += 512
        assert 1024 <= sent <= 2048 + 512
        assert is_refused(await client.read(), 431, b"head_too_large")

    run(check, max_head_bytes=1024)


def test_pipelined_heads_are_counted_one_by_one():
    async def check(server: SocketServer) -> None:
        client = await server.connect()
        await client.send(head(900) * 5 + head(900)[:100])
        await client.send(head(900)[100:])
        answer = b""
        while answer.count(DONE) < 6:
            answer += await client.read(DONE)

    assert run(check, max_head_bytes=1024) == {}


def test_a_head_may_have_max_header_fields():
    async def check(server: SocketServer) -> None:
        for num_fields, is_served in ((9, True), (10, True), (11, False)):
            client = await server.connect()
            await client.send(GET[:-2] + b"".join(b"a: b\r\n" for _ in range(num_fields - 1)) + b"\r\n")
            answer = await client.read(DONE if is_served else None)
            assert (DONE in answer) == is_served or is_refused(answer, 431, b"head_too_large")

    assert run(check, max_header_fields=10) == {"large_head": 1}


def test_a_trailer_is_no_header():
    async def check(server: SocketServer) -> None:
        client = await server.connect()
        chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n"
        await client.send(chunked + b"x-api-key: stolen\r\n\r\n")
        assert b"3 host transfer-encoding" in await client.read(b"encoding")

    run(check, echoing)


def test_a_head_has_head_seconds_however_it_trickles():
    async def check(server: SocketServer) -> None:
        client = await server.connect()
        await client.send(GET[:5])
        for byte in GET[5:15]:
            server.pass_seconds(0.99)
            assert await client.is_open()
            await client.send(bytes([byte]))
        server.pass_seconds(0.2)
        assert is_refused(await client.read(), 408, b"head_timeout")

    assert run(check, head_seconds=10) == {"slow_head": 1}


def test_an_idle_connection_has_keep_alive_seconds_whatever_blank_lines_it_sends():
    async def check(server: SocketServer) -> None:
        fresh, kept = await server.connect(), await server.connect()
        server.pass_seconds(7)
        await kept.send(GET)
        assert DONE in await kept.read(DONE)
        server.pass_seconds(2.9)
        await fresh.send(b"\r\n")
        assert await fresh.is_open() and await kept.is_open()
        server.pass_seconds(0.2)
        assert await fresh.read() == b"" and await kept.is_open()
        server.pass_seconds(6.8)
        assert await kept.is_open()
        await kept.send(GET)  # its time begins anew
        assert DONE in await kept.read(DONE)
        server.pass_seconds(9.9)
        assert await kept.is_open()
        server.pass_seconds(0.2)
        assert await kept.read() == b""

    assert run(check, keep_alive_seconds=10, head_seconds=100) == {"idle": 2}


def test_one_connection_too_many_closes_the_one_that_idles_longest():
    async def check(server: SocketServer) -> None:
        begun, first, second = [await server.connect() for _ in range(3)]
        await begun.send(GET[:9])
        assert await first.is_open()
        third = await server.connect()
        assert await first.read() == b"" and await second.is_open() and await begun.is_open()
        fourth = await server.connect()
        assert await second.read() == b""
        await fourth.send(GET[:9])
        await third.send(GET[:9])
        fifth = await server.connect()  # none but half heads: the oldest of them
        assert await begun.read() == b"" and await third.is_open()
        await fifth.send(GET)
        assert DONE in await fifth.read(DONE)

    assert run(check, max_connections=3) == {"displaced": 3}


def test_no_request_is_closed_for_another_connection():
    async def check(server: SocketServer) -> None:
        async def waiting(scope, receive, send) -> None:
            await over.wait()
            await answering(scope, receive, send)

        over = asyncio.Event()
        async with serving(waiting, max_connections=2) as server:
            busy = [await server.connect() for _ in range(2)]
            for client in busy:
                await client.send(GET)
            answer = await (await server.connect()).read()
            assert is_refused(answer, 503, b"too_many_connections") and b"retry-after: 1" in answer
            over.set()
            for client in busy:
                assert DONE in await client.read(DONE)
            late = await server.connect()  # takes the place of one that has its answer
            await late.send(GET)
            assert DONE in await late.read(DONE)
            assert server.closed == {"no_room": 1, "displaced": 1}

    run(check)


def test_a_reader_that_stalls_for_send_seconds_has_left_and_a_slow_one_has_not():
    async def check(server: SocketServer) -> None:
        left: list[str] = []

        async def endless(scope, receive, send) -> None:
            async def parts():
                for _ in range(3000):
                    yield b"x" * 10_000

            try:
                await StreamingResponse(parts())(scope, receive, send)
            finally:
                left.append(scope["path"])

        async with serving(endless, send_seconds=5) as server:
            stalled, slow = await server.connect(4096), await server.connect(4096)
            await stalled.send(GET.replace(b"/ ", b"/stalled "))
            await slow.send(GET.replace(b"/ ", b"/slow "))
            await until(lambda: all(client.flow.write_paused for client in server.connections.open))
            await asyncio.sleep(0.1)  # the kernel takes what it can
            server.pass_seconds(0)
            for _ in range(3):
                server.pass_seconds(2.4)
                await slow.read(b"x")
                await asyncio.sleep(0.05)
            await until(lambda: left)
            assert left == ["/stalled"] and server.closed == {"stalled_reader": 1}
            assert len(server.connections.open) == 1

    run(check)


def test_an_answer_that_nobody_reads_does_not_hold_its_connection():
    async def check(server: SocketServer) -> None:
        client = await server.connect(4096)
        await client.send(GET)
        await asyncio.sleep(0.05)
        server.pass_seconds(0)
        server.pass_seconds(4.9)
        assert len(server.connections.open) == 1
        server.pass_seconds(0.2)
        await until(lambda: not server.connections.open)

    whole = PlainTextResponse(b"x" * 20_000_000)
    assert run(check, whole, send_seconds=5) == {"stalled_reader": 1}


def test_a_client_of_http_1_0_gets_no_chunks():
    async def streamed(scope, receive, send) -> None:
        async def parts():
            yield b"one "
            yield b"two"

        await StreamingResponse(parts())(scope, receive, send)

    async def check(server: SocketServer) -> None:
        client = await server.connect()
        await client.send(b"GET / HTTP/1.0\r\n\r\n")
        answer = await client.read()
        assert answer.endswith(b"\r\n\r\none two") and b"connection: close" in answer and b"chunked" not in answer
        client = await server.connect()
        await client.send(GET)
        assert b"chunked" in await client.read(b"0\r\n\r\n")

    run(check, streamed)

    async def with_length(server: SocketServer) -> None:
        client = await server.connect()
        await client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        answer = await client.read()
        assert answer.endswith(b"\r\n\r\n" + DONE) and b"content-length: 9" in answer

    run(with_length)


def test_what_is_no_http_gets_a_sentence():
    async def check(server: SocketServer) -> None:
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # of TLS
        smuggled = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        split = b"GET / HTTP/1.1\r\nHost: x\r\nX: a\rb\r\n\r\n"
        for data in (hello, b"garbage\r\n\r\n", smuggled, split, GET.replace(b"/ ", b"/\xff\xfe "), b"\0" * 70_000):
            client = await server.connect()
            await client.send(data)
            assert is_refused(await client.read(), 400, b"invalid_http"), data[:80]

    assert run(check)["bad_request"] == 6


def test_a_few_requests_may_be_pipelined():
    async def check(server: SocketServer) -> None:
        client = await server.connect()
        await client.send(GET * (1 + MAX_PIPELINED))
        answer = b""
        while answer.count(DONE) < 1 + MAX_PIPELINED:
            answer += await client.read(DONE)
        client = await server.connect()
        await client.send(GET * (2 + MAX_PIPELINED))
        assert (await client.read()).count(DONE) <= 1

    assert run(check) == {"bad_request": 1}


@pytest.mark.parametrize("behind", [b"", GET], ids=["alone", "with another in the pipeline"])
def test_garbage_behind_a_request_ends_its_stream_without_a_fault(behind, caplog):
    ends: list[str] = []

    async def streaming(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        leaving = asyncio.create_task(_disconnected(receive))
        try:
            while not leaving.done():
                await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
                await asyncio.sleep(0.001)
            ends.append("disconnect")
        finally:
            leaving.cancel()

    async def check(server: SocketServer) -> None:
        client = await server.connect()
        await client.send(GET)
        await client.read(b"x")
        await client.send(behind + b"garbage\r\n\r\n")
        await client.read()
        await until(lambda: bool(ends))

    assert run(check, streaming) == {"bad_request": 1}
    assert ends == ["disconnect"]
    assert not [record for record in caplog.records if record.exc_info]


async def _disconnected(receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def test_a_body_that_nobody_reads_is_dropped_or_ends_the_connection():
    async def check(server: SocketServer) -> None:
        client = await server.connect()
        post = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        await client.send(post % DISCARDED_BYTES)
        assert DONE in await client.read(DONE)
        await client.send(b"x" * DISCARDED_BYTES)
        await client.send(GET)  # the same connection goes on
        assert DONE in await client.read(DONE)
        await client.send(post % (DISCARDED_BYTES + 1))
        assert DONE in await client.read(DONE)
        await client.send(b"x" * (DISCARDED_BYTES + 1))
        assert await client.read() == b""
        slow = await server.connect()
        await slow.send(post % 10)
        assert DONE in await slow.read(DONE)
        server.pass_seconds(9.9)
        assert await slow.is_open()
        server.pass_seconds(0.2)
        assert await slow.read() == b""

    assert run(check, head_seconds=10) == {"unread_body": 2}


def test_a_client_that_offers_http_2_is_answered_in_http_1():
    async def check(server: SocketServer) -> None:
        client = await server.connect()
        offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        await client.send(b"POST / HTTP/1.1\r\nHost: x\r\n" + offer + b"Content-Length: 3\r\n\r\nabc")
        assert is_refused(await client.read(), 400, b"upgrade_unsupported")
        client = await server.connect()
        await client.send(b"GET / HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n")
        assert b"\r\n\r\n0 connection" in await client.read()

    run(check, echoing)
