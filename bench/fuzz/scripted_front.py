"""The whole front in one process, in front of a scripted core: no socket, no model, no second process."""

import asyncio
from typing import Any

from starlette.types import Message

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig
from sojourn.engine.sampling import TokenLogprobs
from sojourn.engine.server.app import build_app
from sojourn.metrics.ledger import new_ledger
from tests.engine.server.scripted_core import READY

BLOCKS = (1000, 24, 0)
LOGPROBS = TokenLogprobs(300, -0.5, 1, [(300, -0.5)])
MAX_ANSWER_TOKENS = 4
CALL_SECONDS = 20


class ScriptedCore:
    """Answers each submitted sequence at once with a few tokens, as the core's messages would."""

    def __init__(self, client: Any):
        self._client = client
        client.ready, client.state = READY, "ready"
        client._send = self._receive
        self._step = 0

    def _receive(self, encoded: bytes) -> None:
        message = messages.decode_to_core(encoded)
        if isinstance(message, messages.Submit):
            asyncio.get_running_loop().call_soon(self._answer, message)
        elif isinstance(message, messages.Abort):
            self._end(message.request_id, "abort")

    def _answer(self, submit: messages.Submit) -> None:
        name, sampling = submit.request_id, submit.sampling
        count = min(sampling.max_tokens, MAX_ANSWER_TOKENS)
        self._step += 1
        entry = LOGPROBS if sampling.logprobs is not None else None
        outputs = [
            messages.Output(
                name, 300 + index, finish_reason="length" if index == count - 1 else None, logprobs=entry,
                prompt_logprobs=self._prompt_logprobs(submit) if index == 0 else None,
            )
            for index in range(count)
        ]  # fmt: skip
        self._client._take(messages.Tokens(1, (), [(name, 0)], outputs, self._step, BLOCKS, 0, 1))
        self._end(name, "length")

    def _end(self, name: str, reason: str) -> None:
        ended = messages.Ended(
            name, reason, booked_ns=1, ledger=new_ledger(), waits={}, cached_tokens=0, computed_tokens=1
        )
        self._client._take_observed(messages.Observed(None, [ended]))

    def _prompt_logprobs(self, submit: messages.Submit) -> list[TokenLogprobs] | None:
        if submit.sampling.prompt_logprobs is None:
            return None
        return [LOGPROBS] * (len(submit.prompt_token_ids) - 1)


class ScriptedFront:
    """Calls the ASGI application. Raises whatever the application raises: a fault of ours."""

    def __init__(self, **settings: Any):
        self.loop = asyncio.new_event_loop()
        self.app = build_app(EngineConfig(model="tiny-model", telemetry="off", **settings))
        first = self.app.state.front.first
        self.core = ScriptedCore(first.core)

        async def passes(*_: Any) -> None:
            """Grammars are compiled in a process of their own, which this fuzzer does not start."""

        first.grammars.check = passes

    def call(self, method: str, path: str, headers: list[tuple[bytes, bytes]], content: bytes) -> tuple[int, bytes]:
        """Status and body. Raises TimeoutError where no answer comes."""
        return self.loop.run_until_complete(asyncio.wait_for(self._call(method, path, headers, content), CALL_SECONDS))

    async def _call(self, method: str, path: str, headers: list, content: bytes) -> tuple[int, bytes]:
        answer: list[Message] = []
        sent = False
        ended = asyncio.Event()

        async def receive() -> Message:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": content, "more_body": False}
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            answer.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                ended.set()

        raw, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": raw, "raw_path": raw.encode("utf-8", "replace"), "query_string": query.encode("utf-8", "replace"),
            "root_path": "", "headers": [(b"host", b"127.0.0.1"), *headers], "client": ("127.0.0.1", 5),
            "server": ("127.0.0.1", 8000), "state": {},
        }  # fmt: skip
        await self.app(scope, receive, send)
        return answer[0]["status"], b"".join(message.get("body", b"") for message in answer[1:])
