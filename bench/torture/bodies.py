"""How long the event loop stops while bodies are checked that were made to stop it."""

import argparse
import asyncio
import contextlib
import json
import time
from types import SimpleNamespace
from typing import Any

from bench.torture.promises import Outcome, main
from sojourn.engine.config import EngineConfig
from sojourn.engine.process import freeze_startup_objects, share_interpreter
from sojourn.engine.server.body.reader import BodyReader
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.openai.chat_request import ChatRequest, DetokenizeRequest
from sojourn.engine.server.openai.protocol import CompletionRequest
from sojourn.engine.server.openai.responses_request import ResponsesRequest

TICK_SECONDS, BOUND_MS = 0.0005, 50.0


class Upload:
    """A request as `BodyReader` reads it, whose body is there at once."""

    def __init__(self, content: bytes):
        self.headers: dict[str, str] = {}
        self.state = SimpleNamespace()
        self._content = content

    async def stream(self):
        yield self._content


def _encoded(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny-model"} | fields).encode()


def _many(fields: int) -> bytes:
    return b",".join(b'"field%d":1' % index for index in range(fields))


def bodies() -> dict[str, tuple[type, bytes]]:
    part, said = {"type": "text", "text": "x"}, {"role": "user", "content": "x"}
    call = {"id": "a", "function": {"name": "f", "arguments": '{"a":[' + "[]," * 80_000 + "[]]}"}}
    item = {"role": "user", "content": [{"type": "input_text", "text": "x"}]}
    return {
        "300,000 unknown fields": (CompletionRequest, b'{"prompt":"x",' + _many(300_000) + b"}"),
        "300,000 unknown fields of a message": (ChatRequest, b'{"messages":[{' + _many(300_000) + b"}]}"),
        "100 messages of 1,000 parts": (ChatRequest, _encoded(messages=[said | {"content": [part] * 1000}] * 100)),
        "24 messages of 1,000 parts": (ChatRequest, _encoded(messages=[said | {"content": [part] * 1000}] * 24)),
        "10,000 messages": (ChatRequest, _encoded(messages=[said] * 10_000)),
        "20 calls with long arguments": (
            ChatRequest, _encoded(messages=[{"role": "assistant", "tool_calls": [call]}] * 20),
        ),
        "10,000 items": (ResponsesRequest, _encoded(input=[item] * 10_000)),
        "1,000,000 ids": (DetokenizeRequest, _encoded(tokens=[5] * 1_000_000)),
        "390,000 ids": (DetokenizeRequest, _encoded(tokens=[50_000] * 390_000)),
        "390,000 ids that are none": (DetokenizeRequest, _encoded(tokens=[-5] * 390_000)),
        "2,000,000 lists": (CompletionRequest, b'{"prompt":[' + b"[]," * 2_000_000 + b"[]]}"),
        "99,000 lists": (CompletionRequest, b'{"prompt":[' + b"[]," * 99_000 + b"[]]}"),
        "500,000 entries of logit_bias": (
            CompletionRequest, _encoded(prompt="x", logit_bias={str(index): 1 for index in range(500_000)}),
        ),
        "79,000 entries of logit_bias": (
            CompletionRequest, _encoded(prompt="x", logit_bias={str(index): 1 for index in range(79_000)}),
        ),
        "2,000,000 short texts": (CompletionRequest, b'{"prompt":[' + b'"a",' * 1_999_000 + b'"a"]}'),
        "8 MB of text": (CompletionRequest, _encoded(prompt="hello, wo" * 900_000)),
        "6 MB of JSON in a text": (CompletionRequest, _encoded(prompt=json.dumps([{"a": 1, "b": [1, 2]}] * 250_000))),
    }  # fmt: skip


async def pauses_ms(kind: type, content: bytes, rounds: int) -> list[float]:
    """The longest lateness of a timer in each round, in milliseconds."""
    reader, found, worst = BodyReader(EngineConfig(model="tiny-model")), [], 0.0

    async def tick() -> None:
        nonlocal worst
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(TICK_SECONDS)
            worst = max(worst, time.perf_counter() - begin - TICK_SECONDS)

    ticking = asyncio.create_task(tick())
    for _ in range(rounds):
        await asyncio.sleep(0.01)
        worst = 0.0
        with contextlib.suppress(ApiError):
            await reader.parse(kind, Upload(content))
        await asyncio.sleep(0.01)
        found.append(worst * 1000)
    ticking.cancel()
    reader.close()
    return found


def run(outcome: Outcome, arguments: argparse.Namespace) -> None:
    """Checks the worst bodies that we know beside a timer. In this process, without a client and without a model."""
    share_interpreter()
    freeze_startup_objects()
    for name, (kind, content) in bodies().items():
        found = asyncio.run(pauses_ms(kind, content, 2 if arguments.short else 5))
        note = f"{len(content) / 1e6:.1f} MB; the best of {len(found)} rounds, the worst had {max(found):.0f} ms"
        outcome.below(f"{name} do not stop the event loop", min(found), BOUND_MS, "ms", note)


if __name__ == "__main__":
    main("bodies", run)
