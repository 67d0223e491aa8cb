"""Calls that do not end well: one record with a closing ledger each, and nothing of them stays behind."""

import asyncio
import contextlib
import gc
import json
import os
import signal
from itertools import product

import httpx
import pandas as pd
import psutil
import pytest

from sojourn.engine.config import model_folder
from sojourn.engine.sampling import Grammar
from sojourn.engine.server.call_response import CallResponse
from sojourn.engine.server.core.call import Call
from sojourn.engine.server.core.queue_speed import QueueSpeed
from sojourn.engine.server.core.sequence import SequenceStream
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.openai.completion_serializer import CompletionSerializer
from sojourn.engine.techniques.grammar.checks import GrammarChecks
from sojourn.metrics.ledger import SERVER_ACCOUNTS, closes
from tests.engine.server.core.own_application import MODEL, abandoned, rows, running, until

pytestmark = pytest.mark.server


def test_a_call_left_after_one_of_its_choices_ended_has_a_closed_ledger(application):
    async def check(app, client) -> None:
        core = app.state.front.first.core
        prompts = ["The function returns", "Return a list"]
        asked = {"prompt": prompts, "temperature": 0, "ignore_eos": True, "model": MODEL}
        answer = await client.post("/v1/completions", json=asked | {"max_tokens": 60})
        first, second = (choice["text"] for choice in answer.json()["choices"])
        stop = next(first[i : i + 4] for i in range(len(first)) if first[i : i + 4] not in second)

        async def leave(written: list) -> None:
            await until(lambda: len(core.streams) == 1)
            await asyncio.sleep(0.3)  # time that only the other choice knows of

        await abandoned(app, asked | {"max_tokens": 4000, "stop": stop}, leave, "left")

    application.run(check)
    row = next(row for row in application.rows(2) if row.request_id == "left")
    latency = row.finished_ns - row.arrived_ns
    left = latency - sum(getattr(row, f"ledger_{info.column}") for info in SERVER_ACCOUNTS)
    assert row.finish_reason == "abort" and closes(left, latency), f"{left} ns of {latency} have no account"


def test_a_fault_of_ours_is_told_recorded_as_an_error_and_leaves_nothing(application, monkeypatch):
    def fail(*_) -> bytes:
        raise ZeroDivisionError

    async def ask(client: httpx.AsyncClient, stream: bool) -> None:
        body = {"model": MODEL, "prompt": "x", "n": 2, "max_tokens": 3, "stream": stream, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "ours"})
        assert answer.headers["x-request-id"] == "ours"
        last = answer.text.strip().splitlines()[-1].removeprefix("data: ")
        assert json.loads(last)["error"]["type"] == "server_error" and "ZeroDivision" not in answer.text
        if not stream:
            assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"

    async def check(app, client) -> None:
        for stream, part in ((False, "body"), (True, "closing")):
            with monkeypatch.context() as patch:
                patch.setattr(CompletionSerializer, part, fail)
                await ask(client, stream)
            assert not app.state.front.first.core.streams

    application.run(check)
    recorded = application.rows(2)
    assert [row.error for row in recorded] == ["the server failed on this request"] * 2
    assert all(pd.isna(row.finish_reason) for row in recorded)


def test_calls_that_come_at_once_do_not_all_find_the_last_free_place(tmp_path):
    """Their prompts are read beside each other, and only then are they handed to a core that here stands still."""

    async def check() -> None:
        async with running(tmp_path, max_num_seqs=1, max_waiting=2) as (app, client):
            core_pid = app.state.front.first.core.pid()
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            os.kill(core_pid, signal.SIGSTOP)
            try:
                calls = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(12)]
                await until(lambda: sum(call.done() for call in calls) == 9)
            finally:
                os.kill(core_pid, signal.SIGCONT)
            codes = [answer.status_code for answer in await asyncio.gather(*calls)]
        assert sorted(codes) == [200] * 3 + [429] * 9

    asyncio.run(check())


def test_a_core_that_died_with_a_queue_leaves_none_to_the_next(tmp_path):
    async def check() -> None:
        async with running(tmp_path, max_num_seqs=1, max_waiting=2) as (app, client):
            core = app.state.front.first.core
            asked = {"model": MODEL, "prompt": "x", "ignore_eos": True}
            calls = [
                asyncio.create_task(client.post("/v1/completions", json=asked | {"max_tokens": 4000})) for _ in range(3)
            ]
            await until(lambda: core.num_waiting == 2 and core.free_places == 0)
            os.kill(core.pid(), signal.SIGKILL)
            assert [answer.status_code for answer in await asyncio.gather(*calls)] == [503] * 3
            await until(lambda: core.state == "ready")
            assert (await client.post("/v1/completions", json=asked | {"n": 3, "max_tokens": 1})).status_code == 200

    asyncio.run(check())
    assert sorted(isinstance(row.error, str) for row in rows(tmp_path)) == [False, True, True, True]


def test_a_response_that_fails_in_the_middle_keeps_the_text_that_was_streamed(tmp_path):
    async def check() -> None:
        async with running(tmp_path) as (app, client):
            core = app.state.front.first.core
            body = {"model": MODEL, "input": "x", "stream": True, "ignore_eos": True, "min_tokens": 400}
            call = asyncio.create_task(client.post("/v1/responses", json=body))
            await until(lambda: any(len(stream.token_ns) > 20 for stream in core.streams.values()))
            os.kill(core.pid(), signal.SIGKILL)
            lines = (await call).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        streamed = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        (item,) = events[-1]["response"]["output"]
        assert events[-1]["type"] == "response.failed" and item["status"] == "incomplete"
        assert streamed and item["content"][0]["text"] == streamed

    asyncio.run(check())


def test_abandoned_calls_leave_one_record_each_and_no_object(application):
    """In the queue, before and after the first token, whole and streamed, with one and with several sequences."""
    count, together = 240, 40
    kinds = (Call, SequenceStream)

    def living() -> int:
        gc.collect()
        return sum(type(thing) in kinds for thing in gc.get_objects())

    async def check(app, client) -> None:
        front = app.state.front

        async def at_once(written: list) -> None:
            await asyncio.sleep(0)

        async def queued(written: list) -> None:
            await until(lambda: len(front.first.core.streams) > 0)

        async def answering(written: list) -> None:
            await until(lambda: len(written) > 1)

        async def leave_one(index: int) -> None:
            leave = (at_once, queued, answering)[index % 3]
            body = {"n": 1 + index % 4, "max_tokens": 40, "stream": index % 2 == 0 or leave is answering}
            await abandoned(app, body, leave, f"gone-{index}")

        await asyncio.gather(*map(leave_one, range(together)))
        await until(lambda: not front.first.core.streams)
        before = len(asyncio.all_tasks()), living()
        for begin in range(together, count, together):
            await asyncio.gather(*map(leave_one, range(begin, begin + together)))
        await until(lambda: len(asyncio.all_tasks()) <= before[0] and living() <= before[1] + 1)
        assert not front.first.core.streams
        assert (await client.post("/v1/completions", json={"model": MODEL, "prompt": "x"})).status_code == 200

    application.run(check)
    names = [row.request_id for row in application.rows(241) if row.request_id.startswith("gone-")]
    assert sorted(names) == sorted(f"gone-{index}" for index in range(count))


def test_calls_with_the_same_name_are_both_answered_and_recorded(application):
    async def check(app, client) -> None:
        body = {"model": MODEL, "prompt": "x", "n": 2, "max_tokens": 30}
        headers = {"x-request-id": "twin"}
        calls = [client.post("/v1/completions", json=body, headers=headers) for _ in range(3)]
        answers = await asyncio.gather(*calls)
        assert [len(answer.json()["choices"]) for answer in answers] == [2] * 3
        names = {answer.headers["x-request-id"] for answer in answers}
        assert len(names) == 3 and "twin" in names
        assert {answer.json()["id"].removeprefix("cmpl-") for answer in answers} == names
        return names

    names = application.run(check)
    assert {row.request_id for row in application.rows(3)} == names


def test_the_time_to_try_again_comes_from_the_queue_that_stands_now():
    now = [1000.0]
    speed = QueueSpeed(lambda: now[0])
    assert speed.seconds_to_clear(50) == 1  # nothing is known
    for _ in range(10):  # without a queue, an hour apart
        speed.observe(1, queue_stands=False)
        now[0] += 3600
    speed.observe(8, queue_stands=True)
    for _ in range(10):
        now[0] += 0.5
        speed.observe(2, queue_stands=True)
    assert speed.seconds_to_clear(40) == 10  # four a second
    now[0] += 600
    assert speed.seconds_to_clear(40) == 60
    speed.observe(1, queue_stands=False)
    assert speed.seconds_to_clear(40) == 1


def test_a_checker_that_is_lost_is_no_verdict_on_a_grammar():
    async def check() -> None:
        checks = GrammarChecks(model_folder(MODEL))
        checks.start()
        try:
            good = Grammar("regex", "[a-c]+")
            await checks.check(Grammar("regex", "x"), "guided_regex")
            for child in psutil.Process().children():
                if "sojourn.engine.techniques.grammar.worker" in child.cmdline():
                    child.kill()
            with pytest.raises(ApiError) as lost:
                while True:  # until it is the turn of a worker that was killed
                    await checks.check(good, "guided_regex")
                    good = Grammar("regex", good.source + "d")
            assert lost.value.status == 503
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(ApiError):
                        await checks.check(good, "guided_regex")
                        break
        finally:
            await checks.stop()

    asyncio.run(check())


def test_nothing_of_a_call_waits_for_the_garbage_collector(application):
    """Else it runs every few requests, and all streams wait for it."""
    kinds = (Call, CallResponse, SequenceStream)
    bodies = {
        "/v1/completions": {"prompt": "Hello", "n": 2, "max_tokens": 4},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
        "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    }

    async def last_chunk_written(written: list) -> None:
        await until(lambda: len(written) > 1 and not written[-1].get("more_body"))

    async def check(app, client) -> None:
        for stream, (path, body) in product((False, True), bodies.items()):
            gc.collect()
            gc.disable()
            try:
                await abandoned(app, body | {"stream": stream}, last_chunk_written, path=path)
                await asyncio.sleep(0.1)
                left = [type(thing) for thing in gc.get_objects() if type(thing) in kinds]
            finally:
                gc.enable()
            assert not left, (path, stream, left)

    application.run(check)
    assert [row.finish_reason for row in application.rows(6)] == ["length"] * 2 * len(bodies)


SUMMED_UP = {
    "/v1/completions": {"max_tokens": 4, "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream_options": {"include_usage": True},
    },
    "/v1/responses": {"input": "x", "max_output_tokens": 4},
}  # fmt: skip


@pytest.mark.parametrize("stays", [True, False])
def test_what_sums_up_a_stream_is_written_after_its_last_text(application, monkeypatch, stays):
    """A last token waits for no ledger, and the ledger that is told holds how long its text took to write. Who leaves
    between the two was not told all."""
    delivered: list[dict] = []
    deliver, text_is_out = CallResponse._deliver, asyncio.Event()

    async def slow(self, send, body, piece) -> None:
        if body["more_body"] and piece.finish_reason is not None:
            await asyncio.sleep(0.2)
        await deliver(self, send, body, piece)
        delivered.append(body)
        if not stays and piece.finish_reason is not None:
            text_is_out.set()
            await asyncio.sleep(60)

    async def leave(written: list) -> None:
        await (asyncio.sleep(60) if stays else text_is_out.wait())

    async def check(app, client) -> None:
        monkeypatch.setattr(CallResponse, "_deliver", slow)
        for path, body in SUMMED_UP.items():
            text_is_out.clear()
            await abandoned(app, body | {"stream": True}, leave, path=path)

    application.run(check)
    records = application.rows(3)
    assert [row.finish_reason for row in records] == ["length" if stays else "abort"] * len(SUMMED_UP)
    ends = [place for place, body in enumerate(delivered) if not body["more_body"]]
    assert len(ends) == (len(SUMMED_UP) if stays else 0)
    for place, row in zip(ends, records, strict=stays):
        text, end = (body["body"] for body in delivered[place - 1 : place + 1])
        assert text and b"[DONE]" not in text and b"delta" not in end
        events = [json.loads(event.split(b"data: ")[1]) for event in end.split(b"\n\n") if b"data: {" in event]
        final = events[-1].get("response", events[-1])
        assert 200 <= final["ledger"]["request.stream"] <= row.ledger_request_stream_ns / 1e6 and final["usage"]
