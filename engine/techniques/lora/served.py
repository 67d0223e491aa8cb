"""The LoRA adapters that requests may name: those of the settings, and those that are loaded at run time."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.config import EngineConfig
from sojourn.engine.messages import LoadAdapter
from sojourn.engine.server.body.reader import BodyReader
from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.errors import ApiError, engine_not_ready, invalid
from sojourn.engine.settings.named_paths import NAME as ADAPTER_NAME
from sojourn.engine.techniques.lora.checkpoint.checkpoint import CONFIG, WEIGHTS, AdapterError, describe
from sojourn.interop.exported.prometheus import Exporter
from sojourn.metrics.errors import InputError

LOAD_SECONDS = 300  # for the core to read an adapter


class LoadLoraAdapter(Strict):
    """POST /v1/load_lora_adapter, as vLLM has it."""

    unsupported: ClassVar[dict] = {}

    lora_name: str = Field(min_length=1, max_length=128, description="the name by which requests ask for it")
    lora_path: str = Field(min_length=1, max_length=4096, description="its folder, below the setting lora_folder")
    load_inplace: bool = Field(False, description="replaces the adapter of that name; open requests keep the old one")


class UnloadLoraAdapter(Strict):
    """POST /v1/unload_lora_adapter, as vLLM has it."""

    unsupported: ClassVar[dict] = {}

    lora_name: str = Field(min_length=1, max_length=128, description="the adapter; its open requests go on")


BODIES = {"POST /v1/load_lora_adapter": LoadLoraAdapter, "POST /v1/unload_lora_adapter": UnloadLoraAdapter}


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    reference: AdapterReference
    created: int  # Unix time


class ServedAdapters:
    """Name → adapter. Raises InputError for an adapter of the settings that cannot be read, or has the model's name."""

    def __init__(self, config: EngineConfig, model_name: str):
        self._max_loras = config.max_loras
        self._model_name = model_name
        self._root = None if config.lora_folder is None else config.lora_folder.expanduser()
        self._loading: set[str] = set()  # names
        self._named: dict[str, ServedAdapter] = {}
        for name, folder in config.lora_adapters.items():
            if name == model_name:
                raise InputError(f"lora_adapters names an adapter {name!r}, which is the name of the model")
            self._add(name, describe(folder.expanduser()).named(name))

    def find(self, name: str) -> AdapterReference | None:
        found = self._named.get(name)
        return None if found is None else found.reference

    @property
    def names(self) -> list[str]:
        return list(self._named)

    def card(self, name: str) -> dict[str, Any]:
        """An adapter as GET /v1/models shows it; vLLM's fields."""
        adapter = self._named[name]
        card = {"id": name, "object": "model", "created": adapter.created, "owned_by": "sojourn"}
        return card | {"parent": self._model_name, "rank": adapter.reference.rank}

    async def load(self, body: LoadLoraAdapter, core: CoreClient) -> None:
        """Raises ApiError: 400 for a name or a folder that cannot be used, 503 without a core."""
        name = body.lora_name
        if not ADAPTER_NAME.fullmatch(name) or name == self._model_name:
            raise invalid("lora_name", f"`lora_name`={name[:128]!r} cannot be the name of an adapter")
        if name in self._loading or (name in self._named and not body.load_inplace):
            message = f"the adapter `{name}` is loaded; unload it first, or set `load_inplace`"
            raise invalid("lora_name", message, code="adapter_loaded")
        if core.state != "ready":
            raise engine_not_ready(core.state)
        self._loading.add(name)
        try:
            folder = self._folder(body.lora_path)
            reference = (await asyncio.to_thread(describe, folder)).named(name)
            error = await asyncio.wait_for(core.questions.ask(reference.key, LoadAdapter(reference)), LOAD_SECONDS)
        except AdapterError as refusal:
            raise invalid("lora_path", self._without_root(str(refusal))) from None
        except TimeoutError:
            raise ApiError(500, f"the core did not read the adapter in {LOAD_SECONDS} s", code="adapter_slow") from None
        finally:
            self._loading.discard(name)
        if error is not None:
            raise invalid("lora_path", self._without_root(error))
        self._add(name, reference)

    def unload(self, name: str) -> None:
        """Its open requests go on. Raises ApiError 404."""
        if self._named.pop(name, None) is None:
            message = f"the adapter `{name[:128]}` is not loaded"
            raise ApiError(404, message, param="lora_name", code="adapter_not_found")

    def observe(self, exporter: Exporter, core: CoreClient) -> None:
        """Counts adapters whose requests have a place in the batch, and those whose requests wait for one."""
        running: set[str] = set()
        waiting: set[str] = set()
        for stream in core.streams.values():
            if stream.request.adapter is not None:
                (running if stream.is_admitted else waiting).add(stream.request.adapter.name)
        exporter.observe_adapters(self._max_loras, running, waiting)

    def _add(self, name: str, reference: AdapterReference) -> None:
        self._named[name] = ServedAdapter(reference, int(time.time()))

    def _folder(self, path: str) -> Path:
        """A path of a client, relative to lora_folder or absolute. Links are followed, and must end below it, too."""
        root = self._root.resolve()
        refused = invalid("lora_path", f"`lora_path`={path[:200]!r} is no adapter below this server's lora_folder")
        try:
            folder = (root / path).resolve()
            files = [folder, *((folder / name).resolve() for name in (CONFIG, WEIGHTS))]
            fits = all(file.is_relative_to(root) and file.exists() for file in files)
        except (OSError, ValueError, RuntimeError):  # a null byte, too long a name, a loop of links
            raise refused from None
        if not fits or folder == root:
            raise refused
        return folder

    def _without_root(self, sentence: str) -> str:
        """A sentence for a client: it need not know where the operator's files lie."""
        return sentence.replace(f"{self._root.resolve()}/", "")


def add_routes(app: FastAPI, adapters: ServedAdapters, core: CoreClient, bodies: BodyReader, body_of) -> None:
    """For lora_runtime_loading."""

    @app.post("/v1/load_lora_adapter", openapi_extra=body_of(LoadLoraAdapter))
    async def load(request: Request) -> Response:
        body = await bodies.parse(LoadLoraAdapter, request)
        await adapters.load(body, core)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", openapi_extra=body_of(UnloadLoraAdapter))
    async def unload(request: Request) -> Response:
        body = await bodies.parse(UnloadLoraAdapter, request)
        adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
