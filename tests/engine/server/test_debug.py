"""The debug routes of a running server."""

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx
import pytest
from fastapi import FastAPI, Request

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.body.reader import BodyReader
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.core.spare import Spare
from sojourn.engine.server.endpoints.debug import SHOWN_AT_ONCE, add_debug_routes
from sojourn.engine.server.telemetry import recent
from sojourn.engine.server.telemetry.full import Telemetry
from sojourn.engine.server.telemetry.recent import RECENT_REQUESTS, RECENT_STEPS, Recent, request
from sojourn.metrics.compute.kernels import CLASSES
from sojourn.metrics.ledger import SERVER_ACCOUNTS
from sojourn.metrics.records import STAGES, RequestRecord
from sojourn.metrics.records.step import COLUMNS
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.server_process import ended_request, post, serving, wait_for
from tests.interop.exported.test_perfetto import checked, named
from tests.metrics.random_records import random_request, random_step


def get(server, path: str, **query) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", params=query, timeout=30)


def profile(server, **body) -> httpx.Response:
    return httpx.post(f"{server.url}/debug/profile", json=body, timeout=60)


class Load:
    """Keeps the server busy with generations, one after the other."""

    def __init__(self, server, max_tokens: int = 200):
        self.answers = []
        self._server, self._max_tokens, self._over = server, max_tokens, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.is_set():
            body = {"max_tokens": self._max_tokens, "ignore_eos": True, "temperature": 0}
            self.answers.append(post(self._server, **body))

    def __enter__(self) -> "Load":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()


def test_steps_and_requests_are_shown_by_the_names_of_the_records(api_server):
    answer = httpx.post(f"{api_server.url}/v1/completions", headers={"x-request-id": "shown-1"}, timeout=30,
                        json={"model": "tiny-model", "prompt": "The", "max_tokens": 5, "ignore_eos": True})  # fmt: skip
    assert answer.status_code == 200
    one = ended_request(api_server, "shown-1")
    assert set(one) == set(RequestRecord.__struct_fields__)
    assert one["output_tokens"] == len(one["token_ns"]) == 5 and one["finish_reason"] == "length"
    assert set(one["ledger"]) == set(one["ttft"]) == {info.name for info in SERVER_ACCOUNTS}
    assert sum(one["ledger"].values()) == pytest.approx(one["written_ns"] - one["arrived_ns"], rel=0.05)
    assert one in get(api_server, "/debug/requests", last=1000).json()["requests"]
    steps = get(api_server, "/debug/steps", last=4000).json()["steps"]
    assert [shown["step"] for shown in steps] == list(range(steps[0]["step"], steps[0]["step"] + len(steps)))
    assert set(steps[-1]) == set(COLUMNS) and list(steps[-1]["stages"]) == list(STAGES)
    assert min(shown["step"] for shown in steps if "shown-1" in shown["request_ids"]) == one["first_step"]
    assert get(api_server, "/debug/steps", last=1).json()["steps"] == [steps[-1]]


@pytest.mark.parametrize("path", ["steps", "requests"])
@pytest.mark.parametrize(("last", "status"), [
    ("0", 400), ("1", 200), ("most", 200), ("more", 400), ("-1", 400), ("1.5", 400), ("x", 400), ("", 400),
    ("9" * 40, 400),
])  # fmt: skip
def test_last_has_bounds(api_server, path, last, status):
    most = RECENT_STEPS if path == "steps" else RECENT_REQUESTS
    asked = {"most": str(most), "more": str(most + 1)}.get(last, last)
    answer = get(api_server, f"/debug/{path}", last=asked)
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert error["param"] == "last" and f"1 to {most:,}" in error["message"]


def test_what_a_path_does_not_know_is_refused(api_server):
    assert get(api_server, "/debug/steps", first=3).json()["error"]["param"] == "first"
    unknown = get(api_server, "/debug/requests/nobody")
    assert unknown.status_code == 404 and "'nobody'" in unknown.json()["error"]["message"]


def test_records_of_many_steps_are_made_a_few_at_a_time(monkeypatch):
    """While thousands of them were made at once, no stream would get a token."""
    telemetry, made, decode = Telemetry(EngineConfig(model="tiny-model")), [], recent.step
    for number in range(3 * SHOWN_AT_ONCE):
        telemetry.recent.add_step(random_step(Random(number), number))
    monkeypatch.setattr(recent, "step", lambda packed: made.append(packed) or decode(packed))
    app, core = FastAPI(), CoreClient(EngineConfig(model="tiny-model"), telemetry, Spare())  # which is not started
    add_debug_routes(app, core, telemetry, BodyReader(core.config), lambda _: {})
    (show,) = (route.endpoint for route in app.routes if route.path == "/debug/steps")

    async def check() -> None:
        shown = await show(Request({"type": "http", "query_string": b"last=96"}))
        counts = []
        async for _ in shown.body_iterator:
            counts.append(len(made))
        assert counts == [0, SHOWN_AT_ONCE, 2 * SHOWN_AT_ONCE, 3 * SHOWN_AT_ONCE, 3 * SHOWN_AT_ONCE]
        await core.stop()

    asyncio.run(check())


def test_the_rings_keep_the_newest_whole():
    rng, kept = Random(2), Recent()
    some = [random_step(rng) for _ in range(50)]
    steps = [some[number % 50].with_columns(step=number) for number in range(RECENT_STEPS + 3)]
    requests = [random_request(rng, number) for number in range(RECENT_REQUESTS + 2)]
    for record in steps:
        kept.add_step(record)
    for record in requests:
        kept.add_request(record)
    assert kept.steps() == steps[3:] and kept.last_step == steps[-1].step
    assert kept.steps(0) == [] and kept.steps(2) == steps[-2:] and kept.steps(61) == steps[-61:]
    assert [request(packed) for packed in kept.packed_requests()] == requests[2:]
    assert kept.packed_request(requests[0].request_id) is None
    kept.add_request(requests[2])  # again: it is the newest now
    assert request(kept.packed_requests(1)[0]) == requests[2] and len(kept.packed_requests()) == RECENT_REQUESTS


@pytest.mark.parametrize(("body", "param"), [
    ({}, "steps"), ({"steps": 0}, "steps"), ({"steps": 1001}, "steps"), ({"steps": 1.5}, "steps"),
    ({"steps": "5"}, "steps"), ({"steps": 5, "timeout_s": 0}, "timeout_s"),
    ({"steps": 5, "timeout_s": 301}, "timeout_s"), ({"steps": 5, "step": 5}, "step"),
])  # fmt: skip
def test_a_burst_that_cannot_be_is_refused(api_server, body, param):
    answer = profile(api_server, **body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param


def test_without_work_a_burst_says_so(api_server):
    answer = profile(api_server, steps=5, timeout_s=0.2)
    assert answer.status_code == 409 and answer.json()["error"]["code"] == "no_steps"
    assert "timeout_s=0.2" in answer.json()["error"]["message"]


def test_a_burst_under_load_accounts_for_its_time_and_disturbs_nobody(api_server):
    alone = post(api_server, max_tokens=200, ignore_eos=True, temperature=0).json()["choices"][0]["text"]
    with Load(api_server) as load:
        answer = profile(api_server, steps=60)
        wait_for(lambda: len(load.answers) > 1, timeout_s=30)
    assert answer.status_code == 200, answer.text
    burst = answer.json()
    assert burst["steps"]["asked"] == burst["steps"]["profiled"] == 60
    assert burst["steps"]["last"] == burst["steps"]["first"] + 59
    assert list(burst["classes"]) == list(CLASSES)
    assert sum(one["ns"] for one in burst["classes"].values()) == burst["window_ns"] > 0
    assert sum(one["share"] for one in burst["classes"].values()) == pytest.approx(1)
    assert burst["classes"]["gemm"]["ns"] > 0 and burst["classes"]["communication"]["ns"] == 0
    assert burst["dropped_kernels"] == 0 < burst["traced_kernels"] and burst["differs"]
    assert set(burst["blocked_ns"]) == {"start", "stop", "read"}
    assert {one.json()["choices"][0]["text"] for one in load.answers} == {alone}
    run = RunDirectory(burst["files"]["run_dir"])
    wait_for(lambda: len(run.table("kernels")) > 0)
    kernels = run.table("kernels")
    assert kernels.total_ns.sum() == burst["window_ns"]
    assert set(kernels.step) == set(range(burst["steps"]["first"], burst["steps"]["last"] + 1))
    trace = checked(run.path / burst["files"]["trace"])
    assert {event["name"] for event in named(trace, "device")} >= {"attend", "draw"}
    assert sum(event["name"].startswith("step ") for event in named(trace, "engine")) == 60


def test_without_a_run_directory_a_burst_is_told_in_the_answer_alone(tool_server):
    with Load(tool_server):
        burst = profile(tool_server, steps=5).json()
    assert burst["files"] is None and burst["steps"]["profiled"] == 5
    assert sum(one["ns"] for one in burst["classes"].values()) == burst["window_ns"]
    steps = get(tool_server, "/debug/steps").json()["steps"]
    assert {"wait", "commit"} <= set(steps[-1]["stages"]) and get(tool_server, "/debug/requests", last=1).json()[
        "requests"
    ]


@pytest.mark.slow
def test_a_core_that_dies_ends_the_burst(tmp_path):
    def is_refused(answer: httpx.Response) -> bool:
        return answer.json()["error"]["code"] == "profile_running"

    def long_burst(server) -> httpx.Response:
        while is_refused(answer := profile(server, steps=5, timeout_s=50)):  # a short one was first
            pass
        return answer

    with serving(tmp_path) as server, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(long_burst, server)
        wait_for(lambda: is_refused(profile(server, steps=5, timeout_s=0.05)))
        os.kill(server.core_pid(), signal.SIGKILL)
        answer = asking.result()
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_core_died"
        server.wait_ready()
        assert profile(server, steps=5, timeout_s=0.1).json()["error"]["code"] == "no_steps"


def test_one_burst_at_a_time(api_server):
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: profile(api_server, steps=1000, timeout_s=1), range(2)))
    assert sorted(answer.json()["error"]["code"] for answer in answers) == ["no_steps", "profile_running"]
    assert [answer.status_code for answer in answers] == [409, 409]
