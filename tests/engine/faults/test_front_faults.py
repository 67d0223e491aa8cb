"""Faults of the front: on the real front of the bundled model, without its core."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.faults.front import WriteFaults, plant_in_front
from sojourn.engine.faults.plan import ConnectionResets, SlowWrites, planned
from sojourn.engine.server.app import build_app
from sojourn.metrics.errors import InputError


def front_with(faults: str, **settings):
    app = build_app(EngineConfig(model="scenarios/tiny-model", faults=faults, **settings))
    plant_in_front(app, planned(faults))
    return app.state.front


def took_ms(work) -> float:
    begin = time.monotonic()
    work()
    return (time.monotonic() - begin) * 1e3


def test_a_slow_tokeniser_costs_by_the_prompt_and_by_its_tokens():
    front = front_with("slow_tokeniser:ms=5,us_per_token=1000")
    ids = front.first.tokenizer.encode("the keeper of the light")
    assert took_ms(lambda: front.first.tokenizer.encode("the keeper of the light")) >= 5 + len(ids)


def test_a_slow_detokeniser_costs_by_the_token_and_changes_no_text():
    front = front_with("slow_detokeniser:ms=2")
    tokenizer = front.first.tokenizer
    ids, stream = tokenizer.encode("the keeper of the light"), tokenizer.stream()
    text = []
    assert took_ms(lambda: text.extend(map(stream.push, ids))) >= 2 * len(ids)
    assert "".join(text) == tokenizer.decode(ids)


def test_an_event_loop_is_held_once_requests_come():
    front = front_with("event_loop_block:ms=30,every_ms=1")
    lags = []

    async def beside() -> None:
        for _ in range(3):
            begin = time.monotonic()
            await asyncio.sleep(0.002)
            lags.append(time.monotonic() - begin)

    async def serve() -> None:
        await beside()
        quiet = max(lags)
        with pytest.raises(AttributeError):  # no core is there to take it; the beats begin before
            front.first.core.submit(SimpleNamespace())
        lags.clear()
        await beside()
        assert max(lags) >= 0.025 > quiet

    asyncio.run(serve())


def test_slow_moderation_needs_moderation_and_delays_its_check():
    with pytest.raises(InputError, match="needs checks to slow down; set moderation"):
        front_with("slow_moderation:ms=20")
    settings = Path("scenarios/faults/settings/moderation.yaml")
    front = front_with("slow_moderation:ms=20", moderation=settings)
    profile = front.moderation.profile()
    assert took_ms(lambda: asyncio.run(profile.judge("a text", "input", profile.input_rules))) >= 20


class Transport:
    def __init__(self):
        self.is_aborted = False
        self.written = []

    def abort(self) -> None:
        self.is_aborted = True


class Cycle:
    """uvicorn's answer in progress."""

    def __init__(self):
        self.transport = Transport()

    async def send(self, message) -> None:
        self.transport.written.append(message["body"])


async def answer(scope, receive, send) -> None:
    for text in (b"a", b"b", b"c", b"d"):
        await send({"type": "http.response.body", "body": text})


def calls_through(fault, number: int, method: str = "POST") -> list[Transport]:
    faulty, cycles = WriteFaults(answer, fault), [Cycle() for _ in range(number)]
    for cycle in cycles:
        asyncio.run(faulty({"type": "http", "method": method}, None, cycle.send))
    return [cycle.transport for cycle in cycles]


def test_writes_of_a_share_of_the_calls_are_slow():
    assert took_ms(lambda: calls_through(SlowWrites(ms=5, share=0.5), 4)) >= 2 * 4 * 5
    assert took_ms(lambda: calls_through(SlowWrites(ms=5), 4, "GET")) < 20


def test_a_share_of_the_connections_is_lost_behind_some_writes():
    lost = calls_through(ConnectionResets(share=0.25, after_writes=2), 8)
    assert [transport.is_aborted for transport in lost] == [False, False, False, True] * 2
    assert all(transport.written[:2] == [b"a", b"b"] for transport in lost)
