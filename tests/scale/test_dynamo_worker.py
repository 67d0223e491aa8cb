"""What `scale/dynamo_worker.py` tells Dynamo's registry. Both are scripted here; tests/peers has real ones."""

import asyncio
import importlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock
from urllib.parse import urlsplit

import pytest

LATE = 0  # in the place of a status: no answer in time


@pytest.fixture
def worker(monkeypatch) -> ModuleType:
    """The module, with names in the place of the packages of Dynamo's environment."""
    for name in ("common.backend", "common.backend.publisher", "common.backend.run", "common.utils.token_ids",
                 "llm.exceptions"):  # fmt: skip
        monkeypatch.setitem(sys.modules, f"dynamo.{name}", MagicMock(LLMEngine=object))
    monkeypatch.setitem(sys.modules, "aiohttp", SimpleNamespace(ClientError=ConnectionError, ClientTimeout=MagicMock()))
    module = importlib.import_module("sojourn.scale.dynamo_worker")
    del sys.modules["sojourn.scale.dynamo_worker"]  # nobody else gets it with these names
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    return module


class ScriptedServer:
    """As the worker's HTTP session reaches it: a status by path."""

    def __init__(self, **statuses: int):
        self._statuses = statuses

    @asynccontextmanager
    async def get(self, url: str, timeout: object) -> AsyncIterator[SimpleNamespace]:
        if (status := self._statuses[urlsplit(url).path.strip("/")]) == LATE:
            raise TimeoutError
        yield SimpleNamespace(status=status)

    async def close(self) -> None:
        """Nothing is open."""


class Registry:
    """Notes what it is asked for; the first `faults` changes fail."""

    def __init__(self, faults: int = 0):
        self.asked: list[str] = []
        self._faults = faults

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if len(self.asked) <= self._faults:
            raise ConnectionError("no registry")

    async def register_endpoint_instance(self) -> None:
        self._ask("in")

    async def unregister_endpoint_instance(self) -> None:
        self._ask("out")


def watch(worker: ModuleType, server: ScriptedServer, registry: Registry) -> None:
    """For some looks at the server."""

    async def scenario() -> None:
        engine = worker.SojournEngine("http://127.0.0.1:1", Path("model"))
        engine.session, engine.endpoint, engine.facts = server, registry, MagicMock()
        await engine.start(0)
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in engine.watching), "the watch goes on"
        await engine.cleanup()

    asyncio.run(scenario())


def test_metrics_that_are_late_do_not_take_a_ready_server_out(worker):
    registry = Registry()
    watch(worker, ScriptedServer(ready=200, metrics=LATE), registry)
    assert registry.asked == []


def test_a_registry_that_does_not_answer_is_asked_again(worker):
    registry = Registry(faults=2)
    watch(worker, ScriptedServer(ready=503, metrics=503), registry)
    assert registry.asked == ["out", "out", "out"], "twice in vain"
