"""Limits of tenants: at, below and above each of them, and nothing of a call stays behind."""

import asyncio
import contextlib
import json
import time
from pathlib import Path

import pytest
import yaml
from starlette.requests import ClientDisconnect

from sojourn.engine.server.gateway.access.gate import Gate
from sojourn.engine.server.gateway.access.headers import duration
from sojourn.engine.server.gateway.access.rules import Tenant
from sojourn.metrics.ledger import Account
from tests.engine.server.scripted_core import MODEL, serving

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": [5] * 10, "max_tokens": 2, "ignore_eos": True}


def run(check, folder: Path, tiers: dict, tenants: dict | None = None, **settings) -> None:
    file = folder / "access.yaml"
    file.write_text(yaml.safe_dump({"default_tier": next(iter(tiers)), "tiers": tiers, "tenants": tenants or {}}))

    async def with_server() -> None:
        async with serving(access=file, **settings) as (app, core, client):
            gates = held_gates(app)
            await check(app, core, client)
            assert not app.state.front._open
            await asyncio.sleep(0.01)
            assert not any(gate.open or gate.requests.waiting or gate.tokens.waiting for gate in gates)

    asyncio.run(with_server())


def held_gates(app) -> list[Gate]:
    """The gates of all calls from now on; the server forgets one with its last call."""
    access, held = app.state.front.access, []
    find = access.gate

    def gate(tenant: Tenant) -> Gate:
        held.append(find(tenant))
        return held[-1]

    access.gate = gate
    return held


async def ask(client, tenant: str = "", **body):
    return await client.post(COMPLETIONS, json=BODY | body, headers={"x-sojourn-tenant": tenant} if tenant else {})


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def test_requests_below_and_at_a_limit_pass_and_the_next_is_429(tmp_path):
    async def check(app, core, client) -> None:
        for left in (2, 1, 0):
            answer = await ask(client, "a")
            assert answer.status_code == 200 and answer.headers["x-ratelimit-remaining-requests"] == str(left)
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            assert answer.headers["x-ratelimit-reset-requests"] == "1m0s"
        answer = await ask(client, "a", stream=True)
        error = answer.json()["error"]
        assert answer.status_code == 429 and error["code"] == "rate_limit_exceeded"
        assert "requests_per_minute=3" in error["message"] and 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ask(client, "b")).status_code == 200, "another tenant has its own count"
        page = (await client.get("/metrics")).text
        assert f'limited_total{{model_name="{MODEL}",tier="small",reason="requests"}} 1.0' in page

    run(check, tmp_path, {"small": {"requests_per_minute": 3}}, {"a": "small", "b": "small"})


def test_names_that_the_file_does_not_have_share_one_count(tmp_path):
    async def check(app, core, client) -> None:
        gates = held_gates(app)
        statuses = [(await ask(client, name)).status_code for name in ("", "one", "two", "three")]
        assert statuses == [200, 200, 429, 429] and len(set(gates)) == 1

    run(check, tmp_path, {"small": {"requests_per_minute": 2}})


def test_a_moving_window_has_room_again_after_its_time(tmp_path):
    async def check(app, core, client) -> None:
        assert [(await ask(client)).status_code for _ in range(3)] == [200, 200, 429]
        await asyncio.sleep(1.05)
        assert (await ask(client)).status_code == 200

    run(check, tmp_path, {"small": {"requests_per_second": 2}})


@pytest.mark.parametrize("setting", ["tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute"])
def test_tokens_are_reserved_and_corrected_to_what_was_used(tmp_path, setting):
    """10 tokens of prompt; 90 may come."""
    cost, used = {"tokens_per_minute": (100, 12), "input_tokens_per_minute": (10, 10)}.get(setting, (90, 2))

    async def check(app, core, client) -> None:
        core.holds = True
        call = asyncio.create_task(ask(client, max_tokens=90))
        await until(lambda: core.submitted)
        over = await ask(client, max_tokens=90)
        assert over.status_code == 429 and setting in over.json()["error"]["message"]
        assert over.headers["x-ratelimit-limit-tokens"] == str(2 * cost - 1)
        assert over.headers["x-ratelimit-remaining-tokens"] == str(cost - 1)
        call.cancel()  # the client leaves: what it did not use is there again
        await asyncio.gather(call, return_exceptions=True)

    run(check, tmp_path, {"small": {setting: 2 * cost - 1}})

    async def check_use(app, core, client) -> None:
        assert (await ask(client)).status_code == 200
        await asyncio.sleep(0.01)
        answer = await client.post("/tokenize", json={"model": MODEL, "prompt": "x"})
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(1000 - used)

    run(check_use, tmp_path, {"small": {setting: 1000}})


def test_what_no_minute_has_room_for_is_400_and_at_the_limit_it_passes(tmp_path):
    async def check(app, core, client) -> None:
        above = await ask(client, max_tokens=91)
        assert above.status_code == 400 and above.json()["error"]["code"] == "tokens_above_limit"
        assert "x-ratelimit-limit-tokens" in above.headers and not core.submitted
        assert (await ask(client, max_tokens=90)).status_code == 200

    run(check, tmp_path, {"small": {"tokens_per_minute": 100}})


def test_without_max_tokens_the_expectation_of_the_tier_is_reserved(tmp_path):
    async def check(app, core, client) -> None:
        core.holds = True
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "n": 2}
        call = asyncio.create_task(client.post("/v1/chat/completions", json=chat))
        await until(lambda: len(core.submitted) == 2)
        prompt = len(core.submitted[0].prompt_token_ids)
        shown = await client.post("/tokenize", json={"model": MODEL, "prompt": "x"})
        assert shown.headers["x-ratelimit-remaining-tokens"] == str(1000 - prompt - 2 * 50)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    run(check, tmp_path, {"small": {"tokens_per_minute": 1000, "expected_output_tokens": 50}})


def test_as_many_calls_are_open_as_the_limit_says(tmp_path):
    async def check(app, core, client) -> None:
        core.holds = True
        calls = [asyncio.create_task(ask(client, max_tokens=3)) for _ in range(2)]
        await until(lambda: len(core.submitted) == 2)
        refused = await ask(client)
        assert refused.status_code == 429 and "concurrency=2" in refused.json()["error"]["message"]
        core.holds = False
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200, 200]
        for bad in ({"max_tokens": -1}, {"model": "other"}, {"n": 0}):  # refused calls give their place back, too
            assert (await ask(client, **bad)).status_code in (400, 404)
        assert [a.status_code for a in await asyncio.gather(ask(client), ask(client))] == [200, 200]

    run(check, tmp_path, {"small": {"concurrency": 2}})


def test_queued_calls_go_in_order_and_their_wait_is_booked(tmp_path):
    ends = []

    async def check(app, core, client) -> None:
        app.state.front.on_end.append(lambda *end: ends.append(end))
        core.holds = True
        calls = []
        for index in range(3):
            calls.append(asyncio.create_task(ask(client, user=str(index), max_tokens=2)))
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        assert len(core.submitted) == 1
        refused = await ask(client)
        assert refused.status_code == 429 and "queue_size=2" in refused.json()["error"]["message"]
        core.holds = False
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 3

    run(check, tmp_path, {"small": {"concurrency": 1, "on_limit": "queue", "queue_size": 2}})
    records = [record for *_, record in ends if record is not None]
    assert [record.tenant for record in records] == ["0", "1", "2"]
    waits = [record.ledger[Account.REQUEST_QUOTA] for record in records]
    assert waits[0] < 20e6 and waits[1] > 90e6 and waits[2] > 70e6
    for record in records:
        assert sum(record.ledger) == pytest.approx(record.finished_ns - record.arrived_ns, abs=1e6)


def test_a_wait_for_tokens_ends_when_they_are_given_back(tmp_path):
    async def check(app, core, client) -> None:
        core.holds = True
        first = asyncio.create_task(ask(client, max_tokens=80))
        await until(lambda: core.submitted)
        second = asyncio.create_task(ask(client, max_tokens=80))
        await asyncio.sleep(0.05)
        assert len(core.submitted) == 1
        first.cancel()
        assert (await asyncio.gather(first, return_exceptions=True)) and not second.done()
        core.holds = False
        assert (await second).status_code == 200

    run(check, tmp_path, {"small": {"tokens_per_minute": 100, "on_limit": "queue"}})


def test_a_wait_is_bounded(tmp_path):
    async def check(app, core, client) -> None:
        assert (await ask(client)).status_code == 200
        began = time.monotonic()
        refused = await ask(client)
        assert refused.status_code == 429 and "queue_seconds=0.1" in refused.json()["error"]["message"]
        assert 0.1 <= time.monotonic() - began < 1

    run(check, tmp_path, {"small": {"requests_per_minute": 1, "on_limit": "queue", "queue_seconds": 0.1}})


def test_a_client_that_leaves_the_queue_frees_its_place(tmp_path):
    ends = []

    async def check(app, core, client) -> None:
        app.state.front.on_end.append(lambda caller, *end: ends.append(end))
        core.holds = True
        open_call = asyncio.create_task(ask(client))
        await until(lambda: core.submitted)
        messages = [{"type": "http.request", "body": json.dumps(BODY).encode()}]

        async def receive() -> dict:
            if messages:
                return messages.pop()
            await asyncio.sleep(0.03)
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            pass

        scope = {
            "type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "http_version": "1.1",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")], "scheme": "http",
            "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "root_path": "",
        }  # fmt: skip
        with contextlib.suppress(ClientDisconnect):
            await app(scope, receive, send)
        assert ends == [(499, "cancelled", None)]
        await asyncio.sleep(0.01)
        assert [gate.requests.waiting for gate in app.state.front.access._gates.values()] == [0]
        core.holds = False
        assert (await open_call).status_code == 200
        assert (await ask(client)).status_code == 200

    run(check, tmp_path, {"small": {"concurrency": 1, "on_limit": "queue", "queue_size": 1}})


def test_a_tier_bounds_model_output_and_priority(tmp_path):
    async def check(app, core, client) -> None:
        assert (await ask(client, "strange")).json()["error"]["code"] == "model_not_allowed"
        for body, status in (({"max_tokens": 5}, 200), ({"max_tokens": 6}, 400), ({"priority": 3}, 200),
                             ({"priority": 2}, 400), ({"priority": 4}, 200), ({}, 200)):  # fmt: skip
            assert (await ask(client, "known", **body)).status_code == status, body
        assert [request.priority for request in core.submitted] == [3, 3, 4, 3]
        assert {request.weight for request in core.submitted} == {7}
        body = {name: value for name, value in BODY.items() if name != "max_tokens"}
        await client.post("/v1/chat/completions", headers={"x-sojourn-tenant": "known"},
                          json={"model": MODEL, "messages": [{"role": "user", "content": "x"}]})  # fmt: skip
        assert core.submitted[-1].sampling.max_tokens == 5, body

    tiers = {
        "none": {"models": ["other"]}, "some": {"models": [MODEL], "max_tokens": 5, "priority": 3, "weight": 7},
    }  # fmt: skip
    run(check, tmp_path, tiers, {"known": "some"})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.0171, "17ms"), (1, "1s"), (1.5, "1.5s"), (60, "1m0s"), (360, "6m0s"), (3600, "1h0m0s"),
     (59.9996, "1m0s"), (86461.25, "24h1m1.25s")],
)  # fmt: skip
def test_durations_have_the_form_of_openai(seconds, text):
    assert duration(seconds) == text
