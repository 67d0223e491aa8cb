"""The application in this process, with a core that is a script: no process, no model, no device."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import httpx
from fastapi import FastAPI

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig
from sojourn.engine.server.app import build_app
from sojourn.engine.server.core.client import CoreClient
from sojourn.metrics.ledger import CLOCKED, Account, new_ledger
from sojourn.metrics.memory.plan import MemoryPlan
from tests.engine.simulated import SHAPE

MODEL = "tiny-model"
PLAN = MemoryPlan(
    free_bytes=9, process_bytes=1, weight_bytes=1, kv_bytes=1, work_bytes=1, table_bytes=1, num_kv_blocks=1024,
    kv_tokens=16_384,
)  # fmt: skip
READY = messages.Ready(
    model_name=MODEL, device="cpu", dtype="float32", threads=1, max_model_len=2048, num_kv_blocks=1024, block_size=16,
    weights="float32", weight_bytes=1, num_parameters=1, shape=SHAPE, memory=PLAN,
)  # fmt: skip


class ScriptedCore:
    """The far side of the front's socket. Each turn gives one token to every request, unless `holds` is set."""

    is_alive = True  # as of a process

    def __init__(self, client: CoreClient, token_seconds: float = 0.001):
        self._client = client
        self._token_seconds = token_seconds
        self._left: dict[str, int] = {}  # request → tokens that it still gets
        self._begun: dict[str, int] = {}  # request → when it was submitted
        self.submitted: list[messages.Submit] = []
        self.holds = False
        self.output_ids: list[int] = []  # what every request gets, over and over; else ids that mean nothing
        self.aborted: list[str] = []  # while they still got tokens
        self._client._process = self

    def send(self, encoded: bytes) -> None:
        message = messages.decode_to_core(encoded)
        if isinstance(message, messages.Submit):
            self.submitted.append(message)
            self._left[message.request_id], self._begun[message.request_id] = (
                message.sampling.max_tokens, message.encoded_ns,
            )  # fmt: skip
        elif isinstance(message, messages.Abort) and self._left.pop(message.request_id, None) is not None:
            self.aborted.append(message.request_id)
            asyncio.get_running_loop().call_soon(self._end, message.request_id, "abort")

    def die(self) -> None:
        self._left.clear()
        self._client._set_state("restarting")
        self._client.fail_open_streams()

    async def run(self) -> None:
        self._client.ready = READY
        self._client._set_state("ready")
        step = 0
        while True:
            await asyncio.sleep(self._token_seconds)
            if not self.holds and self._left:
                step += 1
                self._turn(step)

    def _turn(self, step: int) -> None:
        now_ns, admitted, outputs, ended = time.monotonic_ns(), [], [], []
        for request_id, left in list(self._left.items()):
            admitted.append((request_id, 0))
            base = messages.LedgerBase(self._ledger(request_id, now_ns), {})
            token_id = self._next_id(request_id, left)
            outputs.append(messages.Output(request_id, token_id, base, "length" if left == 1 else None))
            self._left[request_id] -= 1
            if left == 1:
                del self._left[request_id]
                ended.append(request_id)
        clock_ns, blocks = (0,) * len(CLOCKED), (1024, 0, 0)
        tokens = messages.Tokens(now_ns, clock_ns, admitted, outputs, step + 1, blocks, 0, len(outputs))
        self._client._take_tokens(tokens)
        for request_id in ended:
            self._end(request_id, "length")

    def _next_id(self, request_id: str, left: int) -> int:
        if not self.output_ids:
            return 60 + left % 20
        asked = next(submit for submit in reversed(self.submitted) if submit.request_id == request_id)
        return self.output_ids[(asked.sampling.max_tokens - left) % len(self.output_ids)]

    def _end(self, request_id: str, reason: str) -> None:
        now_ns = time.monotonic_ns()
        ended = messages.Ended(request_id, reason, now_ns, self._ledger(request_id, now_ns), {}, 0, 0, first_step=1)
        self._client._take_observed(messages.Observed(None, [ended]))

    def _ledger(self, request_id: str, now_ns: int) -> list[int]:
        ledger = new_ledger()
        ledger[Account.COMPUTE_DECODE] = now_ns - self._begun[request_id]
        return ledger


@contextlib.asynccontextmanager
async def serving(model: str = MODEL, **settings) -> AsyncIterator[tuple[FastAPI, ScriptedCore, httpx.AsyncClient]]:
    """The application, its core, and a client of it."""
    app = build_app(EngineConfig(model=model, **settings))
    core = ScriptedCore(app.state.front.first.core)
    turns = asyncio.create_task(core.run())
    await asyncio.sleep(0)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    json_type = {"content-type": "application/json"}
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers=json_type) as client:
            yield app, core, client
    finally:
        turns.cancel()
        app.state.front.close()
