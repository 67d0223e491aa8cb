"""Each call of an endpoint has one end, whatever it is, and its ledger closes."""

import asyncio
import json
from collections.abc import Callable

import pytest

from sojourn.engine.server.core.call import Caller
from sojourn.engine.server.openai.completion_serializer import CompletionSerializer
from sojourn.metrics.ledger import SERVER_ACCOUNTS, closes
from sojourn.metrics.records import RequestRecord
from tests.engine.server.scripted_core import MODEL, serving

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "The function", "max_tokens": 3}


class Ends:
    """What reached `Front.end`, by the call's name."""

    def __init__(self) -> None:
        self.of: dict[str, list[tuple[int, str | None, RequestRecord | None]]] = {}
        self.callers: dict[str, Caller] = {}

    def __call__(self, caller: Caller, status: int, code: str | None, record: RequestRecord | None) -> None:
        self.of.setdefault(caller.request_id, []).append((status, code, record))
        self.callers[caller.request_id] = caller


def run(check: Callable, **settings) -> Ends:
    ends = Ends()

    async def with_server() -> None:
        async with serving(**settings) as (app, core, client):
            app.state.front.on_end.append(ends)
            await check(app, core, client)
            assert not app.state.front._open

    asyncio.run(with_server())
    return ends


def named(name: str, **more: str) -> dict:
    return {"x-request-id": name, **more}


def only(ends: Ends, name: str) -> tuple[int, str | None, RequestRecord | None]:
    (end,) = ends.of[name]
    return end


def closed(record: RequestRecord) -> bool:
    latency_ns = record.finished_ns - record.arrived_ns
    return closes(latency_ns - sum(record.ledger[info.account] for info in SERVER_ACCOUNTS), latency_ns)


REFUSED = {
    "not-json": ({"content": b"{"}, 400, None),
    "unknown-field": ({"json": BODY | {"prompts": 1}}, 400, None),
    "unknown-model": ({"json": BODY | {"model": "other"}}, 404, "model_not_found"),
    "too-long": ({"json": BODY | {"max_tokens": 5000}}, 400, None),
    "too-large": ({"content": b" " * 2000}, 413, None),
}


def test_a_refused_call_ends_once_without_a_record():
    async def check(app, core, client) -> None:
        for name, (content, status, _) in REFUSED.items():
            answer = await client.post(COMPLETIONS, headers=named(name), **content)
            assert answer.status_code == status, answer.text
        core.holds = True  # one takes the place, one waits, one is too many
        waiting = [asyncio.create_task(client.post(COMPLETIONS, headers=named(n), json=BODY)) for n in ("a", "b")]
        while len(core.submitted) < 2:
            await asyncio.sleep(0.001)
        full = await client.post(COMPLETIONS, headers=named("full"), json=BODY)
        assert full.status_code == 429
        core.holds = False
        await asyncio.gather(*waiting)
        app.state.front.first.core._set_state("restarting")
        assert (await client.post(COMPLETIONS, headers=named("down"), json=BODY)).status_code == 503

    ends = run(check, max_body_bytes=1024, max_num_seqs=1, max_waiting=1)
    for name, (_, status, code) in REFUSED.items():
        found = only(ends, name)
        assert found[0] == status and found[2] is None and (code is None or found[1] == code)
    assert only(ends, "full") == (429, "queue_full", None)
    assert only(ends, "down") == (503, "engine_restarting", None)


def test_an_answered_call_ends_once_with_its_record():
    async def check(app, core, client) -> None:
        for stream in (False, True):
            body = BODY | {"stream": stream, "user": "by-body"}
            headers = named(f"stream-{stream}", **({"x-sojourn-tenant": "by-header"} if stream else {}))
            assert (await client.post(COMPLETIONS, headers=headers, json=body)).status_code == 200
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert (await client.post("/v1/chat/completions", headers=named("chat"), json=chat)).status_code == 200
        spoken = {"model": MODEL, "input": "x", "max_output_tokens": 2}
        assert (await client.post("/v1/responses", headers=named("respond"), json=spoken)).status_code == 200
        ids = await client.post("/tokenize", headers=named("ids"), json={"model": MODEL, "prompt": "x"})
        assert ids.status_code == 200

    ends = run(check)
    for name in ("stream-False", "stream-True", "chat", "respond"):
        status, code, record = only(ends, name)
        assert (status, code) == (200, None) and record.finish_reason == "length" and closed(record)
    assert only(ends, "stream-False")[2].tenant == "by-body" and only(ends, "stream-True")[2].tenant == "by-header"
    assert only(ends, "ids") == (200, None, None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_fails_ends_once_with_the_failure(monkeypatch, stream):
    body = BODY | {"stream": stream, "max_tokens": 1000}

    async def check(app, core, client) -> None:
        lost = asyncio.create_task(client.post(COMPLETIONS, headers=named("lost"), json=body))
        while not core.submitted:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        core.die()
        assert "engine_core_died" in (await lost).text
        app.state.front.first.core._set_state("ready")
        monkeypatch.setattr(CompletionSerializer, "closing" if stream else "body", lambda *_: 1 / 0)
        await client.post(COMPLETIONS, headers=named("fault"), json=body | {"max_tokens": 2})

    ends = run(check)
    status, code, record = only(ends, "lost")
    assert (status, code) == (503, "engine_core_died") and record.error and closed(record)
    status, code, record = only(ends, "fault")
    assert (status, code) == (500, "server_fault") and record.error and closed(record)


def test_a_fault_before_the_core_ends_once(monkeypatch):
    async def check(app, core, client) -> None:
        monkeypatch.setattr(app.state.front.first, "limits", lambda: 1 / 0)
        assert (await client.post(COMPLETIONS, headers=named("early"), json=BODY)).status_code == 500

    assert only(run(check), "early") == (500, "server_fault", None)


@pytest.mark.parametrize("when", ["upload", "stream", "whole"])
def test_a_call_whose_client_leaves_ends_once_as_cancelled(when):
    body = json.dumps(BODY | {"max_tokens": 1000, "stream": when == "stream"}).encode()
    written: list[dict] = []
    messages = [{"type": "http.request", "body": body, "more_body": when == "upload"}]

    async def receive() -> dict:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.02)
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        written.append(message)

    async def check(app, core, client) -> None:
        scope = {
            "type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "http_version": "1.1",
            "headers": [(b"x-request-id", b"gone"), (b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
            "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        try:
            await app(scope, receive, send)
        except Exception as error:
            assert when == "upload" and type(error).__name__ == "ClientDisconnect"

    status, code, record = only(run(check), "gone")
    assert (status, code) == (499, "cancelled")
    assert record is None if when == "upload" else record.finish_reason == "abort" and closed(record)


def test_time_of_quota_and_moderation_is_booked_apart_from_encoding(monkeypatch):
    """Whoever delays a call before its prompt is encoded books it on the caller."""
    ms = 1_000_000

    async def check(app, core, client) -> None:
        front = app.state.front
        encode, caller_of = front.first.encoder.encode, front.caller

        async def slow_encode(*args, **kwargs):
            await asyncio.sleep(0.05)
            return await encode(*args, **kwargs)

        def delayed(request) -> Caller:
            caller = caller_of(request)
            caller.quota_ns, caller.moderation_ns = 30 * ms, 15 * ms
            return caller

        monkeypatch.setattr(front.first.encoder, "encode", slow_encode)
        monkeypatch.setattr(front, "caller", delayed)
        assert (await client.post(COMPLETIONS, headers=named("slow"), json=BODY)).status_code == 200

    _, _, record = only(run(check), "slow")
    booked = {info.name: record.ledger[info.account] for info in SERVER_ACCOUNTS}
    assert booked["request.quota"] == 30 * ms and booked["request.moderation"] == 15 * ms and closed(record)
    assert booked["token.encode"] == record.encoded_ns - record.arrived_ns - 45 * ms > 0
    ttft = {info.name: record.ttft[info.account] for info in SERVER_ACCOUNTS}
    assert ttft["request.quota"] == 30 * ms and ttft["request.moderation"] == 15 * ms
