"""The files of keys and tenants: a sentence for each mistake, and in force all or nothing."""

import asyncio
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.server.gateway.access.gate import Gate
from sojourn.engine.server.gateway.access.keys import append_key, create_key
from sojourn.engine.server.gateway.access.rate_limits import RateLimits, Reservation, Tokens
from sojourn.engine.server.gateway.access.rules import AccessError, Tier, load_rules
from tests.engine.server.scripted_core import MODEL, serving

GOOD = "default_tier: small\ntiers: {small: {requests_per_minute: 1}}\n"
MISTAKES = {
    "tiers: {a: {}}\n": "default_tier is missing; add it",
    "default_tier: b\ntiers: {a: {}}\n": "'b', which `tiers` does not have",
    "default_tier: a\ntiers: {a: {request_per_second: 1}}\n": "tiers.a.request_per_second is not a setting",
    "default_tier: a\ntiers: {a: {concurrency: 0}}\n": "tiers.a.concurrency is not valid",
    "default_tier: a\ntiers: {a: {on_limit: drop}}\n": "tiers.a.on_limit is not valid",
    "default_tier: a\ntiers: {a: {}, a: {}}\n": "'a' stands twice",
    "default_tier: a\ntiers: {a: {}}\nstorage: mysql://x\n": "storage is not valid",
    "default_tier: [": "is no YAML: expected the node content, but found '<stream end>', at line 1, column 16",
    "default_tier: 2026-02-30\n": "is no YAML: day is out of range",
    "default_tier: !!timestamp x\n": "is no YAML",
    "default_tier: " + 1000 * "[" + 1000 * "]": "is no YAML",
    "": "the file is not valid",
}


@pytest.mark.parametrize(("content", "sentence"), MISTAKES.items())
def test_a_mistake_gets_a_sentence(tmp_path, content, sentence):
    (tmp_path / "access.yaml").write_text(content)
    with pytest.raises(AccessError, match=re.escape(sentence)):
        load_rules(tmp_path / "access.yaml", None)


def test_a_missing_file_gets_a_sentence(tmp_path):
    with pytest.raises(AccessError, match="cannot be read"):
        load_rules(None, tmp_path / "keys.yaml")


def test_the_example_of_the_docs_is_valid(tmp_path):
    page = (Path(__file__).parents[5] / "docs" / "access.md").read_text(encoding="utf-8")
    (tmp_path / "access.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL).group(1))
    rules = load_rules(tmp_path / "access.yaml", None)
    assert rules.tenant("acme").tier.weight == 4 and rules.tenant("other").tier_name == "free"


def test_a_reload_is_all_or_nothing(tmp_path):
    access, keys = tmp_path / "access.yaml", tmp_path / "keys.yaml"
    key, entry = create_key("root", "admin")
    append_key(keys, entry)
    access.write_text(GOOD)
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}

    async def check() -> None:
        async with serving(access=access, api_keys=keys) as (_, _, client):
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            later, entry = create_key("later")
            append_key(keys, entry)
            access.write_text("default_tier: none\ntiers: {}\n")
            bad = await client.post("/debug/reload", headers=headers)
            assert bad.status_code == 409 and "the old rules stay in force" in bad.json()["error"]["message"]
            unknown = await client.get("/v1/models", headers={"x-api-key": later})
            assert unknown.status_code == 401, "half of a reload is none"
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 429
            access.write_text(GOOD.replace("1}", "9}"))
            assert (await client.post("/debug/reload", headers=headers)).json() == {"tiers": 1, "keys": 2}
            assert (await client.get("/v1/models", headers={"x-api-key": later})).status_code == 200
            assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
            page = (await client.get("/metrics", headers=headers)).text
            assert 'access_reloads_total{model_name="tiny-model",result="failed"} 1.0' in page

    asyncio.run(check())


def test_a_storage_that_cannot_be_used_leaves_the_old_rules(tmp_path):
    access = tmp_path / "access.yaml"
    access.write_text(GOOD)

    async def check() -> None:
        async with serving(access=access) as (app, _, client):
            access.write_text(GOOD + "storage: redis://user:secret@host:no-port\n")
            bad = await client.post("/debug/reload", json={})
            assert bad.status_code == 409 and "storage is not valid" in bad.json()["error"]["message"]
            assert "secret" not in bad.text and app.state.front.access.rules.file.storage == "memory"

    asyncio.run(check())


def test_streams_go_on_while_a_long_file_is_read(tmp_path):
    keys = tmp_path / "keys.yaml"
    key, entry = create_key("root", "admin")
    append_key(keys, entry)
    line = keys.read_text()

    async def check() -> None:
        async with serving(api_keys=keys) as (_, _, client):
            others = (line.replace(entry.id, f"{number:012x}") for number in range(400))
            keys.write_text("".join([line, *others]))
            reloading = asyncio.create_task(client.post("/debug/reload", headers={"x-api-key": key}))
            turns = 0
            while not reloading.done():
                await asyncio.sleep(0.001)
                turns += 1
            assert reloading.result().json() == {"tiers": 1, "keys": 401}
            assert turns >= 10, "the file was read on the event loop"

    asyncio.run(check())


@pytest.mark.parametrize("fails", ["open", "closed"])
def test_without_redis_it_admits_or_refuses_as_the_file_says(tmp_path, fails):
    (tmp_path / "a.yaml").write_text(GOOD + f"storage: redis://:secret@127.0.0.1:1/0\non_storage_failure: {fails}\n")

    async def check() -> None:
        async with serving(access=tmp_path / "a.yaml") as (_, _, client):
            answer = await client.post("/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1})
            assert answer.status_code == (200 if fails == "open" else 503) and "secret" not in answer.text
            assert 'limit_storage_failures_total{model_name="tiny-model"} 1.0' in (await client.get("/metrics")).text

    asyncio.run(check())


@settings(max_examples=40)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=25))
def test_never_more_calls_are_open_than_the_limit_and_all_places_come_back(limit, calls):
    async def check() -> None:
        gate, most = Gate(), 0
        tier = Tier(concurrency=limit, on_limit="queue", queue_seconds=5)

        async def free() -> None:
            return None

        async def call(turns: int) -> None:
            nonlocal most
            assert await gate.enter(tier, free) is None
            try:
                most = max(most, gate.open)
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                gate.leave()

        tasks = [asyncio.create_task(call(turns)) for turns, _ in calls]
        await asyncio.sleep(0)
        for task, (_, leaves) in zip(tasks, calls, strict=True):
            if leaves:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert most <= limit and gate.open == 0 and gate.requests.waiting == 0

    asyncio.run(check())


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 80)), max_size=15))
def test_tokens_are_conserved(calls):
    """What is counted is what was used and what is reserved."""

    async def check() -> None:
        rates, tier, used = RateLimits(None, lambda: None), Tier(tokens_per_minute=100), 0
        for prompt, reserved, output in calls:
            tokens = Tokens(prompt, reserved)
            limited = await rates.reserve("t", tier, tokens)
            assert (limited is None) == (used + prompt + reserved <= 100)
            if limited is None:
                await rates.correct(Reservation(tier, "t", tokens, time.time()), Tokens(prompt, output))
                used += prompt + output
            assert (await rates.levels("t", tier))[0].remaining == max(0, 100 - used)

    asyncio.run(check())


@pytest.mark.parametrize("turns", range(4))
def test_a_client_that_leaves_while_a_place_comes_back_takes_none(turns):
    async def check() -> None:
        gate, tier = Gate(), Tier(concurrency=1, on_limit="queue", queue_seconds=5)

        async def free() -> None:
            return None

        assert await gate.enter(tier, free) is None
        waiting = asyncio.create_task(gate.enter(tier, free))
        for _ in range(5):
            await asyncio.sleep(0)
        gate.leave()
        for _ in range(turns):  # of the loop, between the place and the end of its call
            await asyncio.sleep(0)
        has_place = waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() is not has_place and gate.open == has_place

    asyncio.run(check())
