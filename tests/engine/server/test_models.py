"""Several models behind one front: cores are fake ones, and processes of their own."""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from sojourn.engine.config import EngineConfig, complaint, model_folder
from sojourn.engine.server.app import build_app
from sojourn.engine.server.core import core_process
from sojourn.engine.server.errors import core_lost
from sojourn.engine.server.models.registry import Models
from sojourn.metrics.compute.startup import startups_of
from sojourn.metrics.errors import InputError
from sojourn.metrics.memory.residence import residences_of
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.closure import open_books, table
from tests.engine.server.core.fake_core import LOAD_SECONDS

FAKE = "tests.engine.server.core.fake_core"
FOLDER = model_folder("tiny-model")


@contextlib.asynccontextmanager
async def front(monkeypatch, *names: str, **settings) -> AsyncIterator[tuple[Models, httpx.AsyncClient]]:
    """A front of tiny-model, whose core is up, and of further models of these names."""
    monkeypatch.setattr(core_process, "MODULE", FAKE)
    monkeypatch.setenv("FAKE_CORE", "serves")
    models = settings.pop("models", {}) | {name: FOLDER for name in names}
    config = EngineConfig(model="tiny-model", models=models, spare_core=False, **settings)
    app = build_app(config)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            client.headers["content-type"] = "application/json"
            while app.state.front.first.core.state != "ready":
                await asyncio.sleep(0.01)
            yield app.state.front.models, client


async def ask(client: httpx.AsyncClient, model: str, max_tokens: int = 3, **fields) -> httpx.Response:
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": max_tokens} | fields
    return await client.post("/v1/completions", json=body, timeout=30)


async def states(client: httpx.AsyncClient) -> dict[str, str]:
    return {card["id"]: card["state"] for card in (await client.get("/v1/models")).json()["data"]}


def test_a_cold_model_is_loaded_for_its_first_call_which_waits_and_whose_ledger_says_so(monkeypatch, tmp_path):
    async def scenario() -> None:
        async with front(monkeypatch, "slow-b", run_dir=tmp_path / "run") as (_, client):
            assert await states(client) == {"tiny-model": "hot", "slow-b": "cold"}
            first, second = await asyncio.gather(ask(client, "slow-b"), ask(client, "slow-b"))
            assert first.status_code == second.status_code == 200 and first.json()["model"] == "slow-b"
            assert await states(client) == {"tiny-model": "hot", "slow-b": "hot"}
            assert (await ask(client, "slow-b")).status_code == (await ask(client, "tiny-model")).status_code == 200
            page = (await client.get("/metrics")).text
            assert page.count("# TYPE sojourn_request_ledger_seconds_total") == 1
            assert all(f'model_name="{name}"' in page for name in ("tiny-model", "slow-b"))

    asyncio.run(scenario())
    requests = sorted(table(tmp_path / "run", "requests"), key=lambda row: row["arrived_ns"])
    assert [fault for row in requests for fault in open_books(row)] == []
    waited = [row["ledger_request_cold_start_ns"] for row in requests]
    assert len(waited) == 4 and min(waited[:2]) > LOAD_SECONDS * 1e9 and waited[2:] == [0, 0]
    first, further = residences_of(RunDirectory(tmp_path / "run").meta())
    assert [(each.state, each.count) for each in further.states] == [("cold", 1), ("loading", 1), ("hot", 1)]
    assert (first.num_waited, further.num_waited) == (0, 2)
    assert further.waited_ns == sum(waited[:2]) and further.hot_bytes == 1 << 30
    own = RunDirectory(tmp_path / "run" / "models" / "slow-b")
    assert len(own.table("requests")) == 3
    [startup] = startups_of(own.meta())
    assert startup.unaccounted_ns == 0 and LOAD_SECONDS * 1e9 < startup.total_ns < max(waited)


def test_calls_that_wait_for_a_model_are_bounded(monkeypatch):
    limit = 3

    async def scenario() -> None:
        async with front(monkeypatch, "slow-b", model_queue=limit) as (models, client):
            for calls in (limit - 1, limit, limit + 1):
                answers = await asyncio.gather(*(ask(client, "slow-b") for _ in range(calls)))
                refused = [answer for answer in answers if answer.status_code == 429]
                assert len(refused) == max(0, calls - limit)
                assert [answer.status_code for answer in answers].count(200) == min(calls, limit)
                assert not models.find("slow-b").num_waiting
                assert (await client.post("/sleep?model=slow-b&level=2")).status_code == 200
            assert int(refused[0].headers["retry-after"]) >= 1
            assert f"model_queue, {limit} calls, wait for the model `slow-b`" in refused[0].text

    asyncio.run(scenario())


@pytest.mark.thorough
def test_a_call_that_waits_for_too_long_gets_503_and_the_model_is_loaded_all_the_same(monkeypatch):
    async def scenario() -> None:
        async with front(monkeypatch, "slow-b", model_wait_seconds=0.2) as (models, client):
            late = await ask(client, "slow-b")
            assert late.status_code == 503 and late.json()["error"]["code"] == "model_loading"
            assert "model_wait_seconds=0.2" in late.text and "retry-after" in late.headers
            assert (await states(client))["slow-b"] == "loading"
            await models.find("slow-b").change
            assert (await ask(client, "slow-b")).status_code == 200

    asyncio.run(scenario())


def test_a_broken_model_gets_its_sentence_and_the_others_go_on(monkeypatch, tmp_path):
    folder = tmp_path / "secret-place" / "broken"
    shutil.copytree(FOLDER, folder)
    (folder / "tokenizer.json").write_text("{")

    async def scenario() -> None:
        async with front(monkeypatch, "damaged-core", models={"broken": folder}) as (_, client):
            for name in ("broken", "damaged-core"):
                for _ in range(2):  # the second one is not tried again at once
                    answer = await ask(client, name)
                    assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_failed"
                    assert f"the model `{name}` cannot be used" in answer.text and "retry-after" in answer.headers
                    assert "secret-place" not in answer.text, "a client need not know the operator's folders"
            assert "the model is damaged" in answer.text
            assert await states(client) == {"tiny-model": "hot", "broken": "failed", "damaged-core": "failed"}
            assert (await ask(client, "tiny-model")).status_code == 200
            assert (await ask(client, "nobody")).status_code == 404
            assert (await client.get("/ready")).status_code == 200

    asyncio.run(scenario())


def test_sleep_and_wake_up_as_vllm_has_them_and_a_call_wakes_the_model_itself(monkeypatch):
    async def scenario() -> None:
        async with front(monkeypatch, "b") as (models, client):
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
            assert (await client.post("/sleep")).status_code == 200
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": True}
            assert (await client.get("/ready")).status_code == 200, "it wakes for a call"
            assert (await client.post("/wake_up")).status_code == 200
            assert (await states(client))["tiny-model"] == "hot"
            await client.post("/sleep")
            assert (await ask(client, "tiny-model")).status_code == 200
            assert (await client.post("/wake_up?model=b")).status_code == 200
            core = models.find("b").built.core.pid()
            assert (await client.post("/sleep?model=b&level=2")).status_code == 200
            assert (await states(client))["b"] == "cold" and not Path(f"/proc/{core}").exists()
            assert (await ask(client, "b")).status_code == 200
            for path, status in (("/sleep?level=3", 400), ("/sleep?tags=x", 400), ("/sleep?model=c", 404)):
                assert (await client.post(path)).status_code == status
            streaming = asyncio.create_task(ask(client, "b", max_tokens=80))
            while not models.find("b").built.core.streams:
                await asyncio.sleep(0.01)
            busy = await client.post("/sleep?model=b")
            assert busy.status_code == 409 and busy.json()["error"]["code"] == "model_busy"
            assert (await streaming).status_code == 200

    asyncio.run(scenario())


def test_the_least_recently_used_idle_model_sleeps_and_then_goes_for_another(monkeypatch):
    """Each plan is 1 GiB of weights and 1 GiB of KV."""

    async def scenario() -> None:
        async with front(monkeypatch, "b", "c", kv_cache_gib=1, models_gib=3) as (_, client):
            assert (await ask(client, "b")).status_code == 200
            assert await states(client) == {"tiny-model": "sleeping", "b": "hot", "c": "cold"}, "3 GiB of 3"
            assert (await ask(client, "tiny-model")).status_code == 200
            assert await states(client) == {"tiny-model": "hot", "b": "sleeping", "c": "cold"}
            assert (await ask(client, "c")).status_code == 200
            assert await states(client) == {"tiny-model": "sleeping", "b": "cold", "c": "hot"}
            assert (await ask(client, "b")).status_code == 200

    asyncio.run(scenario())


@pytest.mark.thorough
def test_a_busy_model_keeps_its_memory_and_one_that_is_too_large_is_refused(monkeypatch):
    async def scenario() -> None:
        async with front(monkeypatch, "b", kv_cache_gib=1, models_gib=3, model_wait_seconds=0.5) as (_, client):
            streaming = asyncio.create_task(ask(client, "tiny-model", max_tokens=90))
            await asyncio.sleep(0.1)
            refused = await ask(client, "b")
            assert refused.status_code == 503 and not streaming.done()
            assert (await streaming).status_code == 200
            await asyncio.sleep(0.6)
            assert (await ask(client, "b")).status_code in (200, 503)
        async with front(monkeypatch, "b", kv_cache_gib=1, models_gib=1) as (_, client):
            refused = await ask(client, "b")
            assert refused.status_code == 503 and "models_gib allows 1.0 GiB for all" in refused.text

    asyncio.run(scenario())


@pytest.mark.thorough
def test_an_idle_model_sleeps_by_itself(monkeypatch):
    async def scenario() -> None:
        async with front(monkeypatch, model_idle_seconds=0.8) as (_, client):
            await asyncio.sleep(0.6)
            assert (await states(client))["tiny-model"] == "hot", "it is idle since it is hot"
            assert (await ask(client, "tiny-model")).status_code == 200
            deadline = time.monotonic() + 5
            while (await states(client))["tiny-model"] != "sleeping" and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            assert (await states(client))["tiny-model"] == "sleeping"
            assert (await ask(client, "tiny-model")).status_code == 200

    asyncio.run(scenario())


def test_a_core_that_is_killed_leaves_the_other_models_alone(monkeypatch):
    async def scenario() -> None:
        async with front(monkeypatch, "b") as (models, client):
            assert (await ask(client, "b")).status_code == 200
            lost, kept = (asyncio.create_task(ask(client, name, max_tokens=60)) for name in ("b", "tiny-model"))
            await asyncio.sleep(0.2)
            [load] = (await client.get("/get_load")).json()
            assert load["num_reqs"] == 2, "of all models"
            os.kill(models.find("b").built.core.pid(), signal.SIGKILL)
            assert (await lost).status_code == 503 and (await kept).status_code == 200
            while models.find("b").built.core.state != "ready":
                await asyncio.sleep(0.01)
            assert (await ask(client, "b")).status_code == 200

    asyncio.run(scenario())


def test_a_sleeping_core_that_dies_leaves_its_model_cold_until_a_call_comes(monkeypatch):
    """Started again at once, it would take memory that another model may have by then."""

    async def scenario() -> None:
        async with front(monkeypatch) as (models, client):
            core = models.first.built.core
            assert (await client.post("/sleep")).status_code == 200
            os.kill(core.pid(), signal.SIGKILL)
            while core.state == "sleeping":
                await asyncio.sleep(0.01)
            assert await states(client) == {"tiny-model": "cold"}
            assert (await ask(client, "tiny-model")).status_code == 200
            assert await states(client) == {"tiny-model": "hot"}

    asyncio.run(scenario())


def test_a_model_that_is_not_ready_is_not_put_to_sleep(monkeypatch):
    """The answer of a core that is being replaced would never come."""

    async def scenario() -> None:
        async with front(monkeypatch, "damaged-b") as (models, client):
            core = models.first.built.core
            assert (await ask(client, "damaged-b")).status_code == 503
            os.kill(core.pid(), signal.SIGKILL)
            while core.state != "restarting":
                await asyncio.sleep(0.01)
            assert not models.first.may_sleep
            for name, state in (("tiny-model", "restarting"), ("damaged-b", "failed")):
                for level in (1, 2):
                    async with asyncio.timeout(5):
                        refused = await client.post(f"/sleep?model={name}&level={level}")
                    assert refused.status_code == 409 and refused.json()["error"]["code"] == "model_not_ready"
                    assert f"the model `{name}` is {state}" in refused.text
            while core.state != "ready":
                await asyncio.sleep(0.01)
            assert (await client.post("/sleep")).status_code == 200

    asyncio.run(scenario())


def test_calls_that_come_at_once_share_one_service_of_a_cold_model(monkeypatch):
    """Else a core that one of them started would be nobody's."""

    async def scenario() -> None:
        async with front(monkeypatch, "slow-b") as (models, client):
            body = {"model": "slow-b", "prompt": "a text"}
            made, make = [], models.find("slow-b")._make
            models.find("slow-b")._make = lambda: made.append(make()) or made[-1]
            calls = [client.post("/tokenize", json=body) for _ in range(4)]
            *_, answer = await asyncio.gather(*calls, ask(client, "slow-b"))
            assert answer.status_code == 200 and len(made) == 1

    asyncio.run(scenario())


def test_a_core_that_dies_as_it_falls_asleep_leaves_the_watch_for_idle_models_running(monkeypatch):
    async def scenario() -> None:
        async with front(monkeypatch, "b", model_idle_seconds=0.6) as (models, client):
            core = models.first.built.core

            async def die() -> None:
                os.kill(core.pid(), signal.SIGKILL)
                while core.state not in ("restarting", "loading"):
                    await asyncio.sleep(0.01)
                raise core_lost(core.state)

            monkeypatch.setattr(core.sleep, "begin", die)
            while core.state != "restarting":
                await asyncio.sleep(0.01)
            assert (await ask(client, "b")).status_code == 200
            deadline = time.monotonic() + 10
            while (await states(client))["b"] != "sleeping" and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            assert (await states(client))["b"] == "sleeping"

    asyncio.run(scenario())


def test_names_that_differ_in_a_slash_have_folders_of_their_own(tmp_path):
    app = build_app(EngineConfig(model="tiny-model", models={"a/b": FOLDER, "a_b": FOLDER}, run_dir=tmp_path / "run"))
    models = app.state.front.models
    folders = {model.config.run_dir for model in models.all}
    assert len(folders) == 3 and all(folder.parent.name in ("models", tmp_path.name) for folder in folders)


def test_two_models_of_one_name_are_refused():
    with pytest.raises(InputError, match="'tiny-model' is the name of two models"):
        build_app(EngineConfig(model="tiny-model", models={"tiny-model": FOLDER}))


@pytest.mark.parametrize(
    "setting", [{"kv_role": "prefill", "kv_transfer_port": 7000}, {"kv_role": "decode"}, {"kv_events": "tcp://*:5557"}]
)
def test_settings_of_one_model_are_refused_beside_others(setting):
    """Each core would bind the same port, and GET /query tells one address."""
    with pytest.raises(ValidationError) as refused:
        EngineConfig(model="tiny-model", models={"b": FOLDER}, **setting)
    sentence = complaint(refused.value)
    assert sentence.startswith(f"{next(iter(setting))}=") and "models names others" in sentence
