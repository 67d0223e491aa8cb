"""The application in this process, with a core that answers each request with a text: whole calls, one at a time."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.server.app import build_app
from sojourn.engine.server.core.sequence import SequenceStream
from sojourn.metrics.ledger import CLOCKED, new_ledger
from tests.engine.server.scripted_core import READY

Script = Callable[[messages.Submit], str]  # what the model says to a request


class AnsweringCore:
    """Says its script to every request, `burst` tokens at a time. With `mute` it stops before the end."""

    def __init__(self, config: EngineConfig, encode: Callable[[str], list[int]], script: Script, burst: int = 1):
        self.config, self.ready, self.state, self.failure = config, READY, "ready", None
        self.streams: dict[str, SequenceStream] = {}
        self.submitted: list[messages.Submit] = []
        self.cached_tokens = 0
        self._encode, self._script, self._burst = encode, script, burst
        self._tasks: set[asyncio.Task] = set()

    def require_ready(self) -> messages.Ready:
        return self.ready

    def admit(self, num_sequences: int) -> None:
        """There is always room."""

    def submit(self, stream: SequenceStream) -> None:
        self.submitted.append(stream.request)
        self.streams[stream.request.request_id] = stream
        task = asyncio.create_task(self._play(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def abort(self, stream: SequenceStream) -> None:
        if not stream.has_last_token and not stream.done.is_set():
            self._end(stream, "abort")

    async def _play(self, stream: SequenceStream) -> None:
        request = stream.request
        stream.admit(self.cached_tokens)
        stop = request.sampling.stop_token_ids[:1]
        ids = [*self._encode(self._script(request)), *stop]
        reason = "stop" if len(ids) <= request.sampling.max_tokens else "length"
        ids = ids[: request.sampling.max_tokens]
        for index, token_id in enumerate(ids):
            if stream.done.is_set():
                return
            finish_reason = reason if index == len(ids) - 1 else None
            output = messages.Output(request.request_id, token_id, finish_reason=finish_reason)
            stream.add(output, (0,) * len(CLOCKED), time.monotonic_ns())
            if index % self._burst == self._burst - 1:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        self._end(stream, reason)

    def _end(self, stream: SequenceStream, reason: str) -> None:
        self.streams.pop(stream.request.request_id, None)
        size = len(stream.request.prompt_token_ids)
        ended = messages.Ended(
            stream.request.request_id, reason, time.monotonic_ns(), new_ledger(), {}, self.cached_tokens, size
        )
        stream.end(ended)


def scripted_app(folder: Path | str, script: Script | str, *, burst: int = 1, **settings):
    """(ASGI application, its scripted core)."""
    config = EngineConfig(model=str(folder), telemetry="off", served_model_name="tiny-model", **settings)
    app = build_app(config)
    model = app.state.front.first
    say = script if callable(script) else lambda request: script
    model.core = AnsweringCore(config, lambda text: model.tokenizer.encode(text, add_special_tokens=False), say, burst)
    return app, model.core


def post(app, path: str, body: dict, headers: dict[str, str] | None = None) -> httpx.Response:
    """One request, its answer as a whole."""

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=20) as client:
            answer = await client.post(path, json={"model": "tiny-model"} | body, headers=headers)
        await app.state.front.first.grammars.stop()
        return answer

    return asyncio.run(ask())


def events_of(answer: httpx.Response) -> list[dict]:
    """The JSON of its server-sent events."""
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def model_with_template(folder: Path, template: str) -> Path:
    """The bundled checkpoint with another chat template."""
    folder.mkdir()
    for file in model_folder("tiny-model").resolve().iterdir():
        if file.suffix in (".json", ".safetensors") and file.name != "tokenizer_config.json":
            (folder / file.name).symlink_to(file)
    (folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder
