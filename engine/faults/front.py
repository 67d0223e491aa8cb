"""Faults of the front process, wrapped around the real tokenizer, checks and sockets."""

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sojourn.engine.faults.delay import Window, after, spend
from sojourn.engine.faults.plan import (
    ConnectionResets,
    EventLoopBlock,
    Fault,
    FrontFault,
    SlowDetokeniser,
    SlowModeration,
    SlowTokeniser,
    SlowWrites,
)
from sojourn.engine.server.front import Front
from sojourn.engine.server.gateway.moderation.verdict import Moderator, Verdict
from sojourn.metrics.errors import InputError


def plant_in_front(app: FastAPI, faults: list[Fault]) -> None:
    """Wraps parts of the front, before the application starts. Raises InputError for a fault without its object."""
    for fault in faults:
        if isinstance(fault, FrontFault):
            PLANTS[type(fault)](app, app.state.front, fault)


def slow_tokeniser(app: FastAPI, front: Front, fault: SlowTokeniser) -> None:
    tokenizer, window = front.first.tokenizer, Window(fault)

    def cost(ids: list[int]) -> None:
        if window.is_open():
            spend(fault.ms / 1e3 + len(ids) * fault.us_per_token / 1e6, fault.by)

    tokenizer.encode = after(tokenizer.encode, cost)


def slow_detokeniser(app: FastAPI, front: Front, fault: SlowDetokeniser) -> None:
    tokenizer, window = front.first.tokenizer, Window(fault)

    def cost(_: str) -> None:
        if window.is_open():
            spend(fault.ms / 1e3, fault.by)

    def slowed(stream: Any) -> None:
        stream.push = after(stream.push, cost)

    tokenizer.stream = after(tokenizer.stream, slowed)


def event_loop_block(app: FastAPI, front: Front, fault: EventLoopBlock) -> None:
    """Beats for as long as the server runs; its window begins with the first request."""
    window, beating = Window(fault), set[asyncio.Task]()

    async def beat() -> None:
        while True:
            await asyncio.sleep(fault.every_ms / 1e3)
            if window.is_open():
                spend(fault.ms / 1e3, fault.by)

    submit = front.first.core.submit

    def submitting(sequence: Any) -> None:
        if not beating:
            beating.add(asyncio.get_running_loop().create_task(beat()))
        submit(sequence)

    front.first.core.submit = submitting


def slow_moderation(app: FastAPI, front: Front, fault: SlowModeration) -> None:
    if front.moderation is None:
        raise InputError("the fault slow_moderation needs checks to slow down; set moderation, or leave it out")
    window = Window(fault)

    def slowed(check: Callable[..., Any]) -> Callable[..., Any]:
        async def checking(text: str, kind: str) -> Verdict:
            if kind == "input" and window.is_open():
                await _pause(fault)
            return await check(text, kind)

        return checking

    moderators: dict[int, Moderator] = {
        id(rule.moderator): rule.moderator
        for profile in front.moderation.profiles.values()
        for rule in profile.input_rules
    }
    for moderator in moderators.values():
        moderator.check = slowed(moderator.check)


def slow_writes(app: FastAPI, front: Front, fault: SlowWrites) -> None:
    app.add_middleware(WriteFaults, fault=fault)


class WriteFaults:
    """ASGI middleware, the outermost: it stands between the server's writes and the socket."""

    def __init__(self, app: ASGIApp, fault: SlowWrites | ConnectionResets):
        self._app, self._fault, self._window = app, fault, Window(fault)
        self._calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_call = scope["type"] == "http" and scope["method"] == "POST"
        if not (is_call and self._window.is_open() and self._is_hit()):
            return await self._app(scope, receive, send)
        writes = 0

        async def faulty(message: Message) -> None:
            nonlocal writes
            if message.get("body"):
                writes += 1
                if isinstance(self._fault, SlowWrites):
                    await _pause(self._fault)
                elif writes > self._fault.after_writes:
                    send.__self__.transport.abort()  # uvicorn's answer in progress
            await send(message)

        await self._app(scope, receive, faulty)

    def _is_hit(self) -> bool:
        """Evenly: of 100 calls with a share of 0.25 each fourth."""
        self._calls += 1
        return int(self._calls * self._fault.share) > int((self._calls - 1) * self._fault.share)


async def _pause(fault: SlowWrites | SlowModeration) -> None:
    """Asleep, only this call waits. At work, the event loop does."""
    if fault.by == "sleep":
        await asyncio.sleep(fault.ms / 1e3)
    else:
        spend(fault.ms / 1e3, fault.by)


PLANTS: dict[type[FrontFault], Callable[[FastAPI, Front, Any], None]] = {
    SlowTokeniser: slow_tokeniser,
    SlowDetokeniser: slow_detokeniser,
    EventLoopBlock: event_loop_block,
    SlowModeration: slow_moderation,
    SlowWrites: slow_writes,
    ConnectionResets: slow_writes,
}
