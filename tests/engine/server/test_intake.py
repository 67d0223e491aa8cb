"""The way of a call into the core: one list of steps, and techniques that may be absent."""

import asyncio

import httpx
import pytest

from sojourn.engine import techniques
from sojourn.engine.config import EngineConfig
from sojourn.engine.server import app as composition
from sojourn.engine.server.app import ENDPOINTS
from sojourn.engine.server.intake import FindRoom, ReadBody, Submit
from sojourn.metrics.errors import ModelError
from tests.engine.server.scripted_core import serving

BODY = {"model": "tiny-model", "prompt": "a", "max_tokens": 2}


def test_every_endpoint_walks_the_steps_of_its_reach_and_only_those_into_the_core_need_room():
    async def check() -> None:
        async with serving() as (app, _core, _client):
            steps = app.state.front.intake._steps
            to_core = steps["core"]
            rooms = [index for index, step in enumerate(to_core) if isinstance(step, FindRoom)]
            (body,) = [index for index, step in enumerate(to_core) if isinstance(step, ReadBody)]
            assert rooms[0] < body < rooms[1] and isinstance(to_core[rooms[2] + 1], Submit), "nothing waits between"
            assert not any(isinstance(step, FindRoom | Submit) for step in (*steps["body"], *steps["prompt"]))
            assert {endpoint.reach for endpoint in ENDPOINTS.values()} == set(steps)

    asyncio.run(check())


@pytest.fixture
def without(monkeypatch):
    """Makes a technique's folder one that cannot be loaded."""
    load = techniques.load

    def lacks(name: str) -> None:
        def refuse(wanted: str, module: str):
            if wanted == name:
                raise ModelError(f"the settings ask for {name}, and this installation cannot load it; leave it out")
            return load(wanted, module)

        monkeypatch.setattr(composition, "load", refuse)

    return lacks


def ask(**fields) -> httpx.Response:
    async def call() -> httpx.Response:
        async with serving() as (_app, _core, client):
            return await client.post("/v1/completions", json=BODY | fields)

    return asyncio.run(call())


@pytest.mark.parametrize(
    ("name", "field"),
    [("grammar", {"guided_regex": "a+"}), ("handover", {"kv_transfer_params": {"do_remote_decode": True}})],
)
def test_without_a_technique_only_the_fields_that_ask_for_it_are_refused(name, field, without):
    without(name)
    assert ask().status_code == 200
    refusal = ask(**field)
    assert refusal.status_code == 400 and refusal.json()["error"]["code"] == "unsupported_parameter"
    assert refusal.json()["error"]["param"] == next(iter(field))


@pytest.mark.parametrize(
    ("name", "setting"), [("lora", {"lora_adapters": {"a": "/a"}}), ("handover", {"kv_role": "both"})]
)
def test_settings_that_ask_for_an_absent_technique_are_refused_with_a_sentence(name, setting, without):
    without(name)
    with pytest.raises(ModelError, match=f"the settings ask for {name}"):
        composition.build_app(EngineConfig(model="tiny-model", **setting))
