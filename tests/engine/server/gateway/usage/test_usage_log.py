"""Usage records of a server: one for every call, on the file before the core and the client get theirs."""

import asyncio
import contextlib
import json
from pathlib import Path
from random import Random

import pytest

from sojourn.engine.server.core.call import Caller
from sojourn.engine.server.gateway.access.keys import append_key, create_key
from sojourn.metrics.usage.reader import read_usage
from sojourn.metrics.usage.record import UsageRecord
from tests.engine.server.scripted_core import MODEL, serving

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "The function", "max_tokens": 3}


def by_id(folder: Path) -> dict[str, UsageRecord]:
    records = read_usage(folder).records
    assert len({record.request_id for record in records}) == len(records)
    return {record.request_id: record for record in records}


def named(name: str) -> dict[str, str]:
    return {"x-request-id": name, "x-sojourn-tenant": "acme"}


def test_every_call_has_one_record_whatever_its_end(tmp_path):
    async def calls() -> None:
        async with serving(usage_dir=tmp_path, max_num_seqs=1, max_waiting=1) as (_app, core, client):
            for stream in (False, True):
                body = BODY | {"stream": stream}
                assert (await client.post(COMPLETIONS, headers=named(f"ok-{stream}"), json=body)).status_code == 200
            assert (await client.post("/tokenize", headers=named("ids"), json={"prompt": "x"})).status_code == 200
            assert (await client.post(COMPLETIONS, headers=named("bad"), json={"x": 1})).status_code == 400
            core.holds = True
            lost = asyncio.create_task(client.post(COMPLETIONS, headers=named("lost"), json=BODY))
            while len(core.submitted) < 3:
                await asyncio.sleep(0.001)
            assert by_id(tmp_path)["lost"].status == "open"
            core.die()
            assert (await lost).status_code == 503
            assert (await client.post(COMPLETIONS, headers=named("down"), json=BODY)).status_code == 503

    asyncio.run(calls())
    found = by_id(tmp_path)
    statuses = {name: (record.status, record.http_status, record.code) for name, record in found.items()}
    assert statuses == {
        "ok-False": ("answered", 200, None),
        "ok-True": ("answered", 200, None),
        "ids": ("answered", 200, None),
        "bad": ("refused", 400, "unknown_parameter"),
        "lost": ("failed", 503, "engine_core_died"),
        "down": ("refused", 503, "engine_restarting"),
    }
    answered = found["ok-True"]
    assert (answered.tenant, answered.model, answered.route) == ("acme", MODEL, COMPLETIONS)
    assert answered.output_tokens == 3 and answered.prompt_tokens > 0 and answered.finish_reason == "length"
    assert answered.device_ms is not None and answered.seconds > 0 and answered.joules is None
    assert found["bad"].device_ms is None and found["bad"].prompt_tokens == 0


def test_the_begin_is_on_the_file_before_the_core_gets_the_call_and_the_end_before_the_last_byte(tmp_path):
    """The file is read at the two moments after which a kill must lose nothing."""
    seen: list[str] = []

    async def calls() -> None:
        async with serving(usage_dir=tmp_path) as (app, core, _client):
            send_to_core = core.send

            def sent(encoded: bytes) -> None:
                seen.append(by_id(tmp_path)["x"].status)
                send_to_core(encoded)

            core.send = sent
            bodies: list[bytes] = []

            async def send(message: dict) -> None:
                if message["type"] == "http.response.body" and not message.get("more_body"):
                    bodies.append(message["body"])
                    seen.append(by_id(tmp_path)["x"].status)

            content = json.dumps(BODY | {"stream": True}).encode()
            messages = [{"type": "http.request", "body": content, "more_body": False}]

            async def receive() -> dict:
                return messages.pop() if messages else await asyncio.sleep(60)

            headers = [(b"x-request-id", b"x"), (b"content-type", b"application/json"), (b"host", b"127.0.0.1")]
            scope = {
                "type": "http", "method": "POST", "path": COMPLETIONS, "query_string": b"", "http_version": "1.1",
                "headers": headers, "scheme": "http", "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1),
                "root_path": "",
            }  # fmt: skip
            await app(scope, receive, send)
            assert b"[DONE]" in bodies[-1]

    asyncio.run(calls())
    assert seen == ["open", "answered"]
    assert by_id(tmp_path)["x"].output_tokens == 3


def test_a_call_that_a_kill_interrupts_has_the_tokens_of_its_last_progress(tmp_path):
    async def calls() -> None:
        async with serving(usage_dir=tmp_path) as (app, _core, client):
            body = BODY | {"max_tokens": 1000, "stream": True}
            task = asyncio.create_task(client.post(COMPLETIONS, headers=named("cut"), json=body))
            usage = app.state.front.usage
            while not (usage._open and usage._open["cut"].call.generated_tokens >= 5):
                await asyncio.sleep(0.001)
            usage.tick()
            so_far = usage._open["cut"].call.generated_tokens
            (file,) = tmp_path.iterdir()
            copy = tmp_path / "killed"
            copy.mkdir()
            (copy / file.name).write_bytes(file.read_bytes())  # what a kill leaves now
            record = by_id(copy)["cut"]
            assert record.status == "interrupted" and record.output_tokens == so_far and record.prompt_tokens > 0
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(calls())
    assert by_id(tmp_path)["cut"].status in ("cancelled", "answered")


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_mixed_calls_sum_to_those_of_the_metrics(tmp_path, seed):
    """Answered, refused and cancelled calls of one to three choices, and a core that dies among them."""
    random, sent = Random(seed), 40
    prices = tmp_path / "prices.yaml"
    prices.write_text('currency: EUR\nmodels: {"*": {input: 1, output: 4, device_second: 2}}\n')

    async def one(client, number: int) -> None:
        await asyncio.sleep(random.random() * 0.1)
        body = BODY | {"n": random.choice((0, 1, 2, 3)), "max_tokens": random.randint(1, 60)}
        call = client.post(COMPLETIONS, headers=named(f"r{number}"), json=body | {"stream": random.random() < 0.5})
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(call, timeout=random.choice((0.02, 5)))

    async def calls() -> str:
        settings = {"usage_dir": tmp_path, "usage_prices": prices, "max_waiting": 20, "max_num_seqs": 8}
        async with serving(**settings) as (app, core, client):
            open_calls = [asyncio.create_task(one(client, number)) for number in range(sent)]
            await asyncio.sleep(0.06)
            core.die()
            app.state.front.first.core._set_state("ready")
            await asyncio.gather(*open_calls)
            while app.state.front._open:
                await asyncio.sleep(0.001)
            return (await client.get("/metrics")).text

    page = asyncio.run(calls())
    records = read_usage(tmp_path).records
    assert len(records) == len({record.request_id for record in records})
    assert {"answered", "refused", "cancelled", "failed"} <= {record.status for record in records}

    def metric(name: str, label: str = "") -> float:
        lines = (line for line in page.splitlines() if line.startswith(f"{name}{{") and label in line)
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    assert sum(record.prompt_tokens for record in records) == metric("sojourn_token_prompt_tokens_total") > 0
    assert sum(record.output_tokens for record in records) == metric("sojourn_token_generated_tokens_total") > 0
    for basis in ("tokens", "device"):
        priced = sum(getattr(record, f"price_of_{basis}") or 0 for record in records)
        assert metric("sojourn_request_price_total", f'basis="{basis}"') == pytest.approx(float(priced))
        assert basis == "device" or priced > 0  # the simulated device took no time
    assert sum(record.computed_tokens or 0 for record in records) == metric("sojourn_token_computed_tokens_total")


@pytest.mark.parametrize(("status", "code", "expected"), [(413, None, "refused"), (499, "cancelled", "cancelled"),
                                                          (500, "server_fault", "failed")])  # fmt: skip
def test_calls_that_never_reached_the_core_are_recorded_too(tmp_path, status, code, expected):
    async def calls() -> None:
        async with serving(usage_dir=tmp_path) as (app, _core, _client):
            app.state.front.usage.end(Caller("early", 1, key_id="k1"), status, code, None)

    asyncio.run(calls())
    (record,) = read_usage(tmp_path).records
    assert (record.status, record.key_id, record.output_tokens) == (expected, "k1", 0)


def test_a_call_with_a_key_names_the_key_and_never_shows_it(tmp_path):
    key, entry = create_key("acme")
    append_key(tmp_path / "keys.yaml", entry)

    async def calls() -> None:
        async with serving(usage_dir=tmp_path / "usage", api_keys=tmp_path / "keys.yaml") as (_app, _core, client):
            for name, sent in (("ok", key), ("wrong", key[:-1])):
                headers = {"x-request-id": name, "authorization": f"Bearer {sent}", "x-sojourn-tenant": "other"}
                await client.post(COMPLETIONS, headers=headers, json=BODY)

    asyncio.run(calls())
    (record,) = read_usage(tmp_path / "usage").records  # a wrong key is refused at the door: it is nobody's call
    assert (record.request_id, record.tenant, record.key_id, record.status) == ("ok", "acme", entry.id, "answered")
    assert all(key.encode() not in file.read_bytes() for file in (tmp_path / "usage").iterdir())
