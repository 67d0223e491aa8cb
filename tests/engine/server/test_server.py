"""The server under stress: full queues, lost clients, killed processes, and what its records say afterwards."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.core import build
from sojourn.engine.server.app import build_app
from sojourn.metrics.compute.startup import startups_of
from sojourn.metrics.errors import ModelError
from sojourn.metrics.ledger import SERVER_ACCOUNTS, closes
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.closure import open_books, table
from tests.engine.server_process import Running, post, serving, wait_for

pytestmark = pytest.mark.server

MODEL = "tiny-model"


@pytest.mark.slow
def test_tokens_after_a_stop_string_are_in_no_record(tmp_path):
    with serving(tmp_path, MODEL, "--run-dir", str(tmp_path / "run")) as server:
        text = post(server, max_tokens=40, temperature=0).json()["choices"][0]["text"]
        post(server, max_tokens=40, temperature=0, stop=text[10:13])
    for row in RunDirectory(tmp_path / "run").table("requests").itertuples():
        assert len(row.token_ns) == row.output_tokens


def test_disconnect_frees_a_running_and_a_queued_request_within_a_step_and_a_full_queue_gets_429(tmp_path):
    limits = ("--max-num-seqs", "1", "--max-waiting", "1")
    with serving(tmp_path, MODEL, *limits, "--run-dir", str(tmp_path / "run")) as server:
        asked = {"model": MODEL, "prompt": "The", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with httpx.Client() as first, httpx.Client() as second:
            with first.stream("POST", f"{server.url}/v1/completions", json=asked) as running:
                lines = running.iter_lines()  # kept: a dropped iterator closes the stream
                next(lines)
                with second.stream("POST", f"{server.url}/v1/completions", json=asked):
                    wait_for(lambda: server.gauge("sojourn_request_waiting") == 1)
                wait_for(lambda: server.gauge("sojourn_request_waiting") == 0)
                assert server.gauge("sojourn_request_running") == 1
            wait_for(lambda: server.gauge("sojourn_request_running") == 0)
        wait_for(lambda: 'outcome="abort"} 2.0' in httpx.get(f"{server.url}/metrics").text)
        check_that_a_full_queue_gets_429(server)
        check_that_a_call_that_could_never_be_admitted_is_refused_for_good(server)
    requests = RunDirectory(tmp_path / "run").table("requests").sort_values("arrived_ns")[:2]
    assert requests.finish_reason.tolist() == ["abort", "abort"]
    assert (requests.output_tokens < 2000).all()


def check_that_a_full_queue_gets_429(server: Running) -> None:
    """One request runs and one waits: both are served, and a third is refused."""
    asked = {"model": MODEL, "prompt": "The", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    stream = contextlib.ExitStack()
    with httpx.Client() as first, httpx.Client() as second, stream:
        running = stream.enter_context(first.stream("POST", f"{server.url}/v1/completions", json=asked))
        lines = running.iter_lines()
        next(lines)
        waiting = stream.enter_context(second.stream("POST", f"{server.url}/v1/completions", json=asked))
        assert waiting.status_code == 200
        wait_for(lambda: server.gauge("sojourn_request_waiting") == 1)
        refused = httpx.post(f"{server.url}/v1/completions", json=asked)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
        typed = openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.RateLimitError):
            typed.completions.create(model=MODEL, prompt="x")
    wait_for(lambda: server.gauge("sojourn_request_running") == 0)
    assert post(server, max_tokens=1).status_code == 200


@pytest.mark.slow
def test_requests_that_find_a_free_place_are_not_counted_as_waiting(tmp_path):
    with (
        serving(tmp_path, MODEL, "--max-waiting", "1", "--max-num-seqs", "24") as server,
        ThreadPoolExecutor(24) as pool,
    ):
        answers = list(pool.map(lambda i: post(server, max_tokens=8).status_code, range(24)))
    assert answers == [200] * 24


def test_sigterm_lets_open_streams_finish_and_ends_late_ones_with_an_error(tmp_path):
    with serving(tmp_path, MODEL, "--drain-seconds", "4", "--run-dir", str(tmp_path / "run")) as server:
        asked = {"model": MODEL, "prompt": "The", "stream": True, "ignore_eos": True}
        with httpx.Client() as first, httpx.Client() as second, contextlib.ExitStack() as streams:
            url = f"{server.url}/v1/completions"
            short = streams.enter_context(first.stream("POST", url, json=asked | {"max_tokens": 60}))
            long = streams.enter_context(second.stream("POST", url, json=asked | {"max_tokens": 4000, "n": 32}))
            short_lines, long_lines = short.iter_lines(), long.iter_lines()
            next(short_lines), next(long_lines)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: httpx.get(f"{server.url}/ready").json()["status"] == "draining")
            assert post(server).status_code == 503
            assert [line for line in short_lines if line][-1] == "data: [DONE]"
            last = [line for line in long_lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_draining"
        assert server.process.wait(timeout=10) == 0
    assert "ends after its open calls, in 4 s at most; a second signal" in server.log.read_text()
    assert "get temperature=0.7, top_k=40 of generation_config.json" in server.log.read_text()
    requests = RunDirectory(tmp_path / "run").table("requests").sort_values("arrived_ns")
    assert requests.finish_reason.isna().tolist() == [False, True]
    rows = table(tmp_path / "run", "requests")
    assert [fault for row in rows for fault in open_books(row)] == []
    assert not any(row["ledger_request_lost_ns"] for row in rows), "a core that lives tells where the time went"


@pytest.mark.slow
def test_core_ends_when_its_front_is_killed_while_it_loads_and_while_it_works(tmp_path):
    for wait_for_ready in (False, True):
        command = [sys.executable, "-m", "sojourn", "serve", MODEL, "--port", "0"]
        front = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        line = front.stdout.readline()
        wait_for(lambda front=front: psutil.Process(front.pid).children())
        core = psutil.Process(front.pid).children()[0]
        if wait_for_ready:
            line = front.stdout.readline()
            url = line.rsplit(" ", 1)[1].strip()
            asked = {"model": MODEL, "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
            stream = httpx.stream("POST", f"{url}/completions", json=asked)
            lines = stream.__enter__().iter_lines()
            next(lines)
        front.kill()
        front.wait()
        gone, _ = psutil.wait_procs([core], timeout=20)
        assert gone == [core]


def test_client_that_leaves_behind_a_full_socket_was_not_served(tmp_path):
    """A scripted ASGI server: its socket is full after some writes; when the client leaves, it drops the rest."""

    async def lose_the_client() -> None:
        app = build_app(
            EngineConfig(model=MODEL, threads=1, num_kv_blocks=64, run_dir=tmp_path / "run", spare_core=False)
        )
        body = json.dumps({"model": MODEL, "prompt": "The", "max_tokens": 50, "ignore_eos": True, "stream": True})
        left, writes, messages = asyncio.Event(), [], [{"type": "http.request", "body": body.encode()}]

        async def receive() -> dict:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            writes.append(message)
            if len(writes) > 5:
                asyncio.get_running_loop().call_later(0.5, left.set)
                await left.wait()

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "http_version": "1.1", "scheme": "http", "server": ("x", 80), "client": ("x", 1), "root_path": "",
        }  # fmt: skip
        async with app.router.lifespan_context(app):
            while app.state.front.first.core.state != "ready":
                await asyncio.sleep(0.05)
            await app(scope, receive, send)
            assert not app.state.front.first.core.streams

    asyncio.run(lose_the_client())
    row = RunDirectory(tmp_path / "run").table("requests").iloc[0]
    assert row.finish_reason == "abort" and row.output_tokens > 5
    assert all(getattr(row, f"ledger_{info.column}") >= 0 for info in SERVER_ACCOUNTS)


@pytest.mark.slow
def test_slow_upload_is_the_clients_time_and_not_the_tokenizers(tmp_path):
    with serving(tmp_path, MODEL, "--run-dir", str(tmp_path / "run")) as server:

        def slowly():
            yield b'{"model": "tiny-model", "prompt": '
            time.sleep(1.0)
            yield b'"The", "max_tokens": 2}'

        json_type = {"content-type": "application/json"}
        assert httpx.post(f"{server.url}/v1/completions", content=slowly(), headers=json_type).status_code == 200
    row = RunDirectory(tmp_path / "run").table("requests").iloc[0]
    assert row.ledger_token_encode_ns < 500_000_000


@pytest.mark.slow
def test_killed_core_ends_streams_with_an_error_event_and_is_restarted(tmp_path):
    """One call has begun to write, two wait behind it. The core hangs before it dies: nobody hears of it again."""
    hung_s = 0.5
    with (
        serving(tmp_path, MODEL, "--run-dir", str(tmp_path / "run"), "--max-num-seqs", "1") as server,
        ThreadPoolExecutor(2) as pool,
    ):
        asked = {"model": MODEL, "prompt": "The", "max_tokens": 3000, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            waiting = [pool.submit(post, server, max_tokens=9, stream=streamed) for streamed in (True, False)]
            wait_for(lambda: server.gauge("sojourn_request_waiting") == 2)
            killed = server.core_pid()
            os.kill(killed, signal.SIGSTOP)
            time.sleep(hung_s)
            os.kill(killed, signal.SIGKILL)
            rest = [line for line in lines if line]
        begun, unbegun = (answer.result() for answer in waiting)
        for last in (rest[-1], begun.text.strip().splitlines()[-1]):
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_core_died"
        assert unbegun.status_code == 503 and "[DONE]" not in "".join(rest)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 503
        early = post(server, max_tokens=1)
        assert early.status_code == 503 and "retry-after" in early.headers
        server.wait_ready()
        assert server.core_pid() != killed
        assert post(server, max_tokens=3).status_code == 200
        assert server.gauge("sojourn_telemetry_core_restarts_total") == 1
    requests = sorted(table(tmp_path / "run", "requests"), key=lambda row: row["arrived_ns"])
    startups = startups_of(RunDirectory(tmp_path / "run").meta())
    assert len(startups) == 2 and [startup.unaccounted_ns for startup in startups] == [0, 0]
    assert [fault for row in requests for fault in open_books(row)] == []
    assert ["died" in (row["error"] or "") for row in requests] == [True] * 3 + [False]
    assert all(row["ledger_request_lost_ns"] >= 0.9e9 * hung_s for row in requests[:3])
    assert requests[0]["ledger_compute_decode_ns"] and not requests[3]["ledger_request_lost_ns"]
    assert all(row["written_ns"] is not None for row in requests), "the error was written, too"
    steps = RunDirectory(tmp_path / "run").table("steps").sort_values("begin_ns")
    assert steps.step.is_monotonic_increasing and steps.step.is_unique


def check_that_a_call_that_could_never_be_admitted_is_refused_for_good(server: Running) -> None:
    assert len(post(server, n=2, max_tokens=2).json()["choices"]) == 2
    refused = post(server, n=3, max_tokens=2)
    assert refused.status_code == 400 and "a call may have 2" in refused.json()["error"]["message"]


def check_that_a_request_larger_than_the_pool_is_refused_and_the_largest_that_fits_is_served(server: Running) -> None:
    refused = post(server, prompt=[7] * 636, max_tokens=5)
    assert refused.status_code == 400 and "KV pool holds 640 tokens" in refused.json()["error"]["message"]
    assert post(server, prompt=[7] * 636, max_tokens=4, ignore_eos=True).json()["usage"]["completion_tokens"] == 4


def test_server_that_records_by_itself_leaves_a_run_that_reads_and_every_ledger_closes(tmp_path):
    with serving(tmp_path, MODEL, "--run-dir", str(tmp_path / "run"), "--num-kv-blocks", "40") as server:
        assert post(server, max_tokens=3).status_code == 200
        asynchronous = [
            {"prompt": "x " * (40 * i + 1), "max_tokens": 30, "stream": i % 2 == 0, "stop": ["zq"] if i % 3 else None}
            for i in range(8)
        ]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda body: post(server, **body).status_code, asynchronous))
        assert answers == [200] * 8
        check_that_a_request_larger_than_the_pool_is_refused_and_the_largest_that_fits_is_served(server)
    run = RunDirectory.open(tmp_path / "run")
    requests, steps = run.table("requests").sort_values("arrived_ns"), run.table("steps")
    assert not run.meta()["valid"] and len(requests) == 10
    [startup] = startups_of(run.meta())
    assert startup.unaccounted_ns == 0 and not startup.spared_ns
    assert startup.phases_ns["imports"] > startup.phases_ns["sockets"] > 0 < startup.phases_ns["process"]
    assert startup.weight_bytes == run.meta()["core"]["num_parameters"] * 4
    assert (steps.end_ns < requests.arrived_ns.iloc[1]).sum() == 3, "of the first request, which was alone"
    for row in requests.itertuples():
        latency = row.written_ns - row.arrived_ns
        left = latency - sum(getattr(row, f"ledger_{info.column}") for info in SERVER_ACCOUNTS)
        assert closes(left, latency), f"{left} ns of {latency} have no account"
    command = [sys.executable, "-m", "sojourn", "serve", MODEL, "--port", "0", "--run-dir", str(tmp_path / "run")]
    again = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 1 and "already holds a run" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["/nowhere"], "does not exist"),
        (["empty"], "config.json"),
        (["cut"], "is damaged or not complete"),
        (["tiny-model", "--run-dir", "/proc/nowhere"], "cannot be made"),
        (["tiny-model", "--port", "taken"], "choose another with --port"),
    ],
    ids=str,
)  # fmt: skip
def test_server_that_cannot_start_says_why_in_a_sentence(tmp_path, arguments, says):
    (tmp_path / "empty").mkdir()
    cut = shutil.copytree(model_folder(MODEL), tmp_path / "cut") / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = [port if word == "taken" else word for word in arguments]
        if "--port" not in words:
            words += ["--port", "0"]
        command = [sys.executable, "-m", "sojourn", "serve", *words]
        environment = {"PYTHONPATH": str(Path(__file__).parents[3])}
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=os.environ | environment
        )
    assert done.returncode == 1
    assert says in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("folder", "settings", "says"),
    [
        ("weightless", {}, r"no \*\.safetensors"),
        (MODEL, {"max_model_len": 5000}, "model's own limit 4096"),
        (MODEL, {"device": "cuda"}, "--device cpu"),
    ],
    ids=str,
)
def test_core_that_cannot_start_raises_a_sentence(tmp_path, folder, settings, says):
    """The server writes it, as it does for `cut` above."""
    if folder == "weightless":
        without = shutil.ignore_patterns("*.safetensors")
        folder = str(shutil.copytree(model_folder(MODEL), tmp_path / folder, ignore=without))
    with pytest.raises(ModelError, match=says):
        build(EngineConfig(model=folder, threads=1, **settings), 0, print)
