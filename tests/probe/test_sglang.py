"""SGLang's plugin against a scripted SGLang: what it records, and that it never changes or harms the server."""

import ast
import asyncio
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from sojourn.interop.probe.folder import call_name, import_probe
from sojourn.metrics.ledger import SERVER_ACCOUNTS
from tests.probe import foreign_sglang
from tests.probe.foreign_sglang import SOURCES, Req, install

WHEEL = os.environ.get("SOJOURN_SGLANG_SOURCE")  # the folder `sglang` of an unpacked wheel


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    from sojourn_probe import sglang

    monkeypatch.setenv("SOJOURN_PROBE", str(tmp_path / "probe"))
    sglang._probes.clear()
    return tmp_path / "probe"


def some_requests(count=24, seed=1):
    draw = random.Random(seed)
    return [Req(f"r{n}-{n:08x}", draw.randint(5, 90), draw.randint(1, 12)) for n in range(count)]


def served(scheduler):
    plans = scheduler.serve(some_requests())
    from sojourn_probe import sglang

    for probe in sglang._probes.values():
        probe.writer.close()
    return plans


@pytest.mark.parametrize(("overlap", "tokens"), [(False, 100_000), (True, 100_000), (False, 250)])
def test_ledgers_close_and_plans_stay(folder, monkeypatch, overlap, tokens):
    from sojourn_probe.sglang import plugin

    owner, _, _, apply = install(monkeypatch)
    plugin()
    apply()
    settings = {"tokens": tokens, "enable_overlap": overlap}
    assert served(owner(**settings)) == foreign_sglang.Scheduler(**settings).serve(some_requests())
    run = import_probe(folder)
    requests, steps = run.table("requests"), run.table("steps")
    assert len(requests) == 24 and (requests.finish_reason == "length").all()
    booked = requests[[f"ledger_{info.column}" for info in SERVER_ACCOUNTS]].sum(axis=1)
    assert (booked == requests.finished_ns - requests.arrived_ns).all()
    wanted = {req.rid: req.sampling_params.max_new_tokens for req in some_requests()}
    assert dict(zip(requests.request_id, requests.output_tokens, strict=True)) == wanted
    assert (steps.blocks_free + steps.blocks_active + steps.blocks_reusable == tokens).all()
    assert (requests.preemptions.sum() > 0) == (tokens < 1000)
    assert "batch_cap" in {name for cell in requests.waits for name in cell} or tokens < 1000
    content = b"".join(file.read_bytes() for file in folder.glob("*.probe"))
    assert (424242).to_bytes(4, "big") not in content


def test_request_is_named_after_its_call(folder, monkeypatch):
    from sojourn_probe.sglang import SGLangMiddleware, plugin

    _, tokenizer, app, apply = install(monkeypatch)
    plugin()
    apply()
    assert app.added == [SGLangMiddleware]
    named = []

    async def server(scope, receive, send):
        for obj in (
            SimpleNamespace(rid=None, text="some words", sampling_params={}),
            SimpleNamespace(rid="own", text="some words", sampling_params={}),
            SimpleNamespace(rid=None, text=["a", "batch"], sampling_params={}),
            SimpleNamespace(rid=None, text="some words", sampling_params={"n": 2}),
        ):
            named.extend([rid async for rid in tokenizer().generate_request(obj, None)])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [(b"x-request-id", b"mine")]}
    middleware = SGLangMiddleware(server)
    asyncio.run(middleware(scope, None, send))
    middleware._writer.close()
    assert call_name(named[0], {"mine": None}) == "mine" and named[1:] == ["own", None, None]


def test_another_version_switches_the_plugin_off(folder, monkeypatch, caplog):
    from sojourn_probe.sglang import plugin

    class Changed(foreign_sglang.Scheduler):
        def run_batch(self, work):
            return object()

    owner, _, app, apply = install(monkeypatch, Changed)
    plugin()
    apply()
    assert owner.run_batch is Changed.__dict__["run_batch"] and not app.added
    assert "run_batch takes (work)" in caplog.text


def test_fault_of_the_probe_ends_the_probe(folder, monkeypatch, caplog):
    from sojourn_probe import sglang

    owner, _, _, apply = install(monkeypatch)
    sglang.plugin()
    apply()
    scheduler = owner()
    scheduler.tree_cache = None
    assert scheduler.serve(some_requests()) == foreign_sglang.Scheduler().serve(some_requests())
    assert "switches itself off" in caplog.text


def test_nothing_is_hooked_without_a_target(monkeypatch):
    from sojourn_probe.sglang import plugin

    monkeypatch.delenv("SOJOURN_PROBE", raising=False)
    owner, _, app, apply = install(monkeypatch)
    before = dict(owner.__dict__)
    plugin()
    apply()
    assert dict(owner.__dict__) == before and not app.added


@pytest.mark.peer
@pytest.mark.skipif(not WHEEL, reason="SOJOURN_SGLANG_SOURCE names no unpacked wheel")
def test_scripted_methods_are_those_of_the_wheel():
    for file, methods in SOURCES.items():
        tree = ast.parse((Path(WHEEL) / file).read_text(encoding="utf-8"))
        functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
        found = {each.name: [arg.arg for arg in each.args.args if arg.arg != "self"] for each in functions}
        assert {name: found.get(name) for name in methods} == methods
