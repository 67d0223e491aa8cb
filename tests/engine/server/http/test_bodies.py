"""Bodies: how large, how slow and how many, and what happens to a client that leaves during its upload."""

import asyncio
import json
import logging
from collections.abc import Callable

from fastapi import FastAPI

from sojourn.engine.server.body import json_values
from tests.engine.server.http.socket_server import serving as serving_on_socket
from tests.engine.server.scripted_core import MODEL, serving

PATH = "/v1/completions"
CONTENT = json.dumps({"model": MODEL, "prompt": "The function", "max_tokens": 2}).encode()


def run(check: Callable, **settings) -> None:
    async def with_server() -> None:
        async with serving(**settings) as (app, core, client):
            await check(app, core, client)

    asyncio.run(with_server())


async def sent(app: FastAPI, *parts: tuple[float, bytes | None]) -> tuple[int | None, dict]:
    """Status and body of the answer to an upload in parts: seconds before each, and its bytes; None: it left."""
    written: list[dict] = []
    rest = [*parts]

    async def receive() -> dict:
        if not rest:
            await asyncio.Event().wait()
        seconds, part = rest.pop(0)
        await asyncio.sleep(seconds)
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": bool(rest)}

    async def send(message: dict) -> None:
        written.append(message)

    scope = {
        "type": "http", "method": "POST", "path": PATH, "query_string": b"", "http_version": "1.1", "scheme": "http",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")], "server": ("x", 80),
        "client": ("x", 1), "root_path": "",
    }  # fmt: skip
    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in written)
    return (written[0]["status"], json.loads(content)) if written else (None, {})


def padded(size: int) -> bytes:
    return CONTENT + b" " * (size - len(CONTENT))


def test_a_body_may_have_max_body_bytes():
    async def check(app, core, client) -> None:
        for size, status in ((1023, 200), (1024, 200), (1025, 413)):
            assert (await client.post(PATH, content=padded(size))).status_code == status
            assert (await sent(app, (0, padded(size)[:700]), (0, padded(size)[700:])))[0] == status

    run(check, max_body_bytes=1024)


def test_a_body_has_a_time_for_each_part_and_for_all():
    async def check(app, core, client) -> None:
        whole, end = CONTENT[:-1], CONTENT[-1:]
        assert (await sent(app, (0, whole), (0.1, b" "), (0.1, end)))[0] == 200
        status, answer = await sent(app, (0, whole), (0.3, end))
        assert status == 408 and answer["error"]["code"] == "body_timeout"
        assert (await sent(app, (0, whole), *[(0.1, b" ")] * 6, (0, end)))[0] == 408
        assert app.state.front.bodies._open_bytes == 0

    run(check, body_idle_seconds=0.2, body_seconds=0.5)


def test_all_bodies_together_have_a_budget_that_small_ones_pass():
    async def check(app, core, client) -> None:
        part = padded(90_000)
        first = asyncio.create_task(sent(app, (0, part), (0.3, b" ")))
        second = asyncio.create_task(sent(app, (0, part), (0.3, b" ")))
        await asyncio.sleep(0.1)
        status, answer = await sent(app, (0, part))
        assert status == 503 and answer["error"]["code"] == "bodies_full"
        assert (await sent(app, (0, CONTENT)))[0] == 200
        assert (await first)[0] == (await second)[0] == 200
        assert (await sent(app, (0, part)))[0] == 200
        assert app.state.front.bodies._open_bytes == 0

    run(check, max_open_body_bytes=200_000)


def test_a_client_that_leaves_during_its_upload_leaves_no_traceback(caplog):
    async def check(app, core, client) -> None:
        ends = []
        app.state.front.on_end.append(lambda caller, status, code, record: ends.append((status, code)))
        with caplog.at_level(logging.WARNING):
            assert await sent(app, (0, CONTENT[:9]), (0, None)) == (None, {})
            async with serving_on_socket(app) as server:
                leaver = await server.connect()
                await leaver.send(b"POST %s HTTP/1.1\r\nHost: localhost\r\n" % PATH.encode())
                await leaver.send(b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{")
                leaver.socket.close()
                while len(ends) < 2:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.02)
        assert ends == [(499, "cancelled")] * 2
        assert not caplog.records and app.state.front.bodies._open_bytes == 0

    run(check)


def test_a_full_queue_refuses_before_the_body_is_read():
    async def check(app, core, client) -> None:
        core.holds = True
        waiting = [asyncio.create_task(client.post(PATH, content=CONTENT)) for _ in range(2)]
        while len(core.submitted) < 2:
            await asyncio.sleep(0.001)
        status, answer = await asyncio.wait_for(sent(app, (100, CONTENT)), 5)  # it never comes
        assert status == 429 and answer["error"]["code"] == "queue_full"
        core.holds = False
        assert [(await answer).status_code for answer in waiting] == [200, 200]

    run(check, max_num_seqs=1, max_waiting=1)


def test_what_stands_in_texts_is_no_value(monkeypatch):
    monkeypatch.setattr(json_values, "MAX_VALUES", 40)
    monkeypatch.setattr(json_values, "SLICE_BYTES", 7)
    for content, has_too_many in (
        (b"[" + b"1," * 37 + b"1]", False), (b"[" + b"1," * 38 + b"1]", True),  # the list counts 3 beside its values
        (b'["' + rb'\",[{:\\' * 50 + b'"]', False), (b'["' + rb'\",[{:\\' * 50 + b'"' + b",1" * 38 + b"]", True),
        (b'{"' + b'":1,"'.join([b"a"] * 7) + b'":1}', False), (b'{"' + b'":1,"'.join([b"a"] * 9) + b'":1}', True),
        (b"[[" + b"],[" * 8 + b"]]", False), (b"[[" + b"],[" * 9 + b"]]", True), (b'["' + b"\\" * 99, False),
    ):  # fmt: skip
        assert json_values.has_too_many_values(content) == has_too_many, content
