"""The models of one front. A call that names one waits until it is hot; idle ones make room for it."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from urllib.parse import quote

from fastapi import Request
from starlette.requests import ClientDisconnect

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.config import EngineConfig
from sojourn.engine.server.core.call import Caller
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.errors import ApiError, Rejection, unknown_model
from sojourn.engine.server.http.connections import wait_for_disconnect
from sojourn.engine.server.model import Model
from sojourn.engine.server.models.served_model import ServedModel
from sojourn.metrics.errors import InputError, ModelError, ServerError, SojournError
from sojourn.metrics.memory.plan import GIB, shown_bytes

log = logging.getLogger(__name__)
WATCH_SECONDS = 0.5  # between two looks for idle models
SHOWN_MODELS = 20  # names in the sentence about one that does not exist
SUBFOLDER = "models"  # of a run directory: the records of the further models


class Models:
    """The first model is that of the command line. Raises InputError where two have one name."""

    def __init__(self, config: EngineConfig, first: Model, make: Callable[[EngineConfig], Model]):
        """`make` builds a further model, whose core is cold. It raises SojournError."""
        self._config = config
        self.first = ServedModel(first.name, config, lambda: first, first)
        self._named = {first.name: self.first}
        self._memory = asyncio.Lock()  # one model at a time takes memory
        self._freed = asyncio.Event()  # a call has left its model
        for name, folder in config.models.items():
            if name in self._named:
                raise InputError(f"models: {name!r} is the name of two models; rename one")
            own = _settings_of(config, name, folder)
            self._named[name] = ServedModel(name, own, partial(make, own))

    @property
    def all(self) -> list[ServedModel]:
        return list(self._named.values())

    @property
    def is_single(self) -> bool:
        return len(self._named) == 1

    @property
    def has_streams(self) -> bool:
        return any(core.streams for core in self.cores)

    @property
    def built(self) -> list[Model]:
        return [model.built for model in self.all if model.built is not None]

    @property
    def only_hot(self) -> Model | None:
        """The only model of a front that has one, if its core is up: a call need not name it."""
        return self.first.built if self.is_single and self.first.is_hot else None

    @property
    def cores(self) -> list[CoreClient]:
        return [model.core for model in self.built]

    def find(self, name: str | None) -> ServedModel | None:
        """The model of that name; the first one where a call names none; None where there is none."""
        return self.first if name is None else self._named.get(name)

    def find_adapter(self, name: str | None) -> AdapterReference | None:
        """The adapter of that name; None for the first model itself. Raises ApiError 404."""
        adapters = self.first.built.adapters
        if name is None or name == self.first.name:
            return None
        if (adapter := adapters.find(name)) is None:
            raise unknown_model(name, [*self._named, *adapters.names], SHOWN_MODELS)
        return adapter

    async def use(self, model: ServedModel, request: Request, caller: Caller, *, computes: bool) -> Model:
        """The model, with its core up if the call `computes`. The wait for it is booked as `cold_start`.

        The caller owes a `leave`. Raises Rejection 429 where too many calls wait, ApiError 503 where the model cannot
        be loaded or takes too long; then it owes none.
        """
        model.num_using += 1
        try:
            if computes and not model.is_hot:
                await self._wait(model, request, caller)
            elif model.built is None:
                try:
                    await model.build()
                except SojournError as error:
                    raise self._refusal(model, error) from None
        except BaseException:
            self.leave(model)
            raise
        return model.built

    def leave(self, model: ServedModel) -> None:
        """A call does not use it any more, or uses its core alone."""
        model.num_using -= 1
        model.used_at = time.monotonic()
        self._freed.set()

    async def fall_asleep(self, model: ServedModel, level: int) -> None:
        """Level 1: without its KV pool; level 2: without its weights, too. Raises ApiError 409 where it cannot."""
        async with self._memory:
            if not model.is_idle:
                raise ApiError(409, f"the model `{model.name}` has open calls; try again", code="model_busy")
            if not model.may_sleep and model.state not in ("sleeping", "cold"):
                state = model.state if model.built is None else model.built.core.state
                message = f"the model `{model.name}` is {state}, and only one that is ready can sleep; try again"
                raise ApiError(409, message, code="model_not_ready")
            if level == 1 and model.may_sleep:
                await self._put_to_sleep(model)
            elif level == 2 and model.state != "cold":
                await self._unload(model)

    async def wake(self, model: ServedModel) -> None:
        """Loads or wakes it. Raises ApiError 503."""
        if not model.is_hot:
            try:
                await asyncio.shield(self._change(model))
            except SojournError as error:
                raise self._refusal(model, error) from None

    async def watch(self) -> None:
        """Puts models to sleep that were idle for long enough, and notes what all of them are."""
        limit = self._config.model_idle_seconds
        while True:
            await asyncio.sleep(min(WATCH_SECONDS, limit or WATCH_SECONDS))
            self._note()
            for model in self.all if limit is not None else ():
                if model.may_sleep and time.monotonic() - model.used_at >= limit:
                    async with self._memory:
                        if model.may_sleep:
                            await self._try_to_put_to_sleep(model)

    async def stop(self) -> None:
        """Ends all cores."""
        self._tell()
        for model in self.all:
            if model.is_changing:
                model.change.cancel()
        await asyncio.gather(*(model.change for model in self.all if model.change is not None), return_exceptions=True)
        await asyncio.gather(*(core.stop() for core in self.cores))

    def _note(self) -> None:
        if any([model.note() for model in self.all]):
            self._tell()

    def _tell(self) -> None:
        """Writes to the run directory what the models were. A single one that was never put to sleep needs no word."""
        found = [model.history.residence(model.needed_bytes) for model in self.all]
        if not self.is_single or any(residence.count("sleeping") for residence in found):
            self.first.built.telemetry.residences(found)

    async def drain(self, seconds: float) -> None:
        await asyncio.gather(*(core.drain(seconds) for core in self.cores))

    def give_up(self) -> None:
        for core in self.cores:
            core.give_up()

    async def _wait(self, model: ServedModel, request: Request, caller: Caller) -> None:
        limit, seconds = self._config.model_queue, self._config.model_wait_seconds
        if model.num_waiting >= limit:
            message = f"model_queue, {limit} calls, wait for the model `{model.name}`; try again after the given time"
            raise Rejection(429, message, code="model_queue_full", retry_after_seconds=model.expected_seconds)
        began_ns = time.monotonic_ns()
        model.num_waiting += 1
        gone = asyncio.create_task(wait_for_disconnect(request.receive))
        try:
            change = self._change(model)
            await asyncio.wait((change, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if change.done():
                change.result()
            elif gone.done():
                raise ClientDisconnect
            else:
                message = f"the model `{model.name}` was not loaded within model_wait_seconds={seconds:g}; try again"
                raise Rejection(503, message, code="model_loading", retry_after_seconds=model.expected_seconds)
        except SojournError as error:
            raise self._refusal(model, error) from None
        finally:
            gone.cancel()
            model.num_waiting -= 1
            waited_ns = time.monotonic_ns() - began_ns
            caller.cold_start_ns += waited_ns
            model.history.add_wait(waited_ns)

    def _change(self, model: ServedModel) -> asyncio.Task[None]:
        """The one task that makes it hot; all who wait for the model share it."""
        if not model.is_changing:
            model.change = asyncio.create_task(self._make_hot(model), name=f"load {model.name}")
            model.change.add_done_callback(_take_error)  # all who waited for it may have left
            model.change.add_done_callback(lambda _: self._note())
            self._note()
        return model.change

    async def _make_hot(self, model: ServedModel) -> None:
        if (error := model.recent_failure) is not None:
            raise error
        async with self._memory:
            try:
                core = (await model.build()).core
                await self._make_room(model)
                if core.state in ("falling_asleep", "sleeping"):
                    await core.sleep.end()
                else:
                    await self._load(model)
            except SojournError as error:
                log.error("the model %s cannot be used: %s", model.name, error)
                model.fail(error)
                raise
        model.failure = None

    async def _load(self, model: ServedModel) -> None:
        core, began = model.built.core, time.monotonic()
        if core.state in ("cold", "failed"):
            await core.start()
        model.built.watch()
        while core.state not in ("ready", "failed", "draining"):
            await core.wait_for_change()
        if core.state != "ready":
            raise ServerError(core.failure or "the server is shutting down")
        model.load_seconds = time.monotonic() - began
        print(f"Sojourn has loaded {model.name}: {core.ready.startup.sentence()}", flush=True)
        if self._config.models_gib is not None and self._held_bytes() > self._limit:
            await self._make_room_after(model)

    async def _put_to_sleep(self, model: ServedModel) -> None:
        await model.built.core.sleep.begin()
        self._note()

    async def _try_to_put_to_sleep(self, model: ServedModel) -> None:
        """For a caller that is not the model's: a core that dies meanwhile is its supervisor's business."""
        try:
            await self._put_to_sleep(model)
        except ApiError as error:
            log.warning("the model %s did not fall asleep: %s", model.name, error)

    async def _unload(self, model: ServedModel) -> None:
        assert model.plan is not None, "remembered: the core's goes with it"
        await model.built.core.unload()
        self._note()

    @property
    def _limit(self) -> int:
        return int(self._config.models_gib * GIB)

    def _held_bytes(self, without: ServedModel | None = None) -> int:
        return sum(model.held_bytes for model in self.all if model is not without)

    async def _make_room(self, model: ServedModel) -> None:
        """Raises ModelError where it alone is too large, ServerError where the others stay busy for too long."""
        if self._config.models_gib is None:
            return
        if model.needed_bytes > self._limit:
            raise ModelError(
                f"the model `{model.name}` needs {shown_bytes(model.needed_bytes)}, and models_gib allows "
                f"{shown_bytes(self._limit)} for all; raise it, or lower kv_cache_gib"
            )
        try:
            async with asyncio.timeout(self._config.model_wait_seconds):
                while self._held_bytes(model) + model.needed_bytes > self._limit:
                    await self._free_some(model)
        except TimeoutError:
            busy = ", ".join(other.name for other in self.all if other is not model and other.held_bytes)
            raise ServerError(f"models_gib has no room for `{model.name}` while {busy} have calls; try again") from None

    async def _make_room_after(self, model: ServedModel) -> None:
        """It needs more than its files had told."""
        try:
            await self._make_room(model)
        except SojournError:
            await self._unload(model)
            raise

    async def _free_some(self, wanted: ServedModel) -> None:
        """Puts the idle model to sleep that was used the longest ago; unloads one where all idle ones sleep."""
        others = (each for each in self.all if each is not wanted and each.is_idle)
        idle = sorted(others, key=attrgetter("used_at"))
        for model in idle:
            if model.may_sleep:
                await self._try_to_put_to_sleep(model)
                return
        for model in idle:
            if model.state == "sleeping":
                await self._unload(model)
                return
        self._freed.clear()
        # An Ended behind the last token makes a model idle, and sets no event.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._freed.wait(), WATCH_SECONDS)

    def _refusal(self, model: ServedModel, error: SojournError) -> ApiError:
        if isinstance(error, ApiError):
            return error
        message = f"the model `{model.name}` cannot be used: {model.sentence(error)}"
        return Rejection(503, message, code="model_failed", retry_after_seconds=model.expected_seconds)


def _take_error(change: asyncio.Task[None]) -> None:
    if not change.cancelled():
        change.exception()


def _settings_of(config: EngineConfig, name: str, folder: Path) -> EngineConfig:
    """The same settings for another model: its records go into a folder of their own."""
    run_dir = None if config.run_dir is None else config.run_dir / SUBFOLDER / quote(name, safe="")
    changes = {"model": str(folder), "served_model_name": name, "models": {}, "models_gib": None, "run_dir": run_dir}
    return config.model_copy(update=changes)
