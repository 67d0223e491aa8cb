"""LoRA adapters in host memory: read beside the loop when a request first names one, and put into slots by steps."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.request.plan import ScheduledTokens
from sojourn.engine.techniques.lora.checkpoint.checkpoint import AdapterDescription, AdapterError, describe
from sojourn.engine.techniques.lora.checkpoint.fit import AdaptedModel
from sojourn.engine.techniques.lora.kernels.backend import LinearAdapters, LoraBackend, LoraTile, tiles_of
from sojourn.engine.techniques.lora.kernels.backends import make_lora
from sojourn.engine.techniques.lora.slots import HostAdapters, slot_of
from sojourn.engine.token.models.decoder import Decoder
from sojourn.metrics.errors import ModelError
from sojourn.metrics.memory.plan import GIB, shown_bytes

RUNTIME_RANK = 64  # of adapters that are loaded at run time, by default

log = logging.getLogger(__name__)


@dataclass(slots=True)
class AdapterPreparation:
    """An adapter on its way into host memory. `ready_ns`, `error` and `packed` count once it is done."""

    waits_for: ClassVar[str] = "adapter"
    ready_ns: int = 0
    error: str | None = None
    packed: Any = None
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def adapter_ready_ns(self) -> int:
        return self.ready_ns

    def finish(self, error: str | None = None) -> None:
        self.error, self.ready_ns = error, time.monotonic_ns()
        self._done.set()


class Adapters:
    """Owns the adapters in host memory. All but the reading happens in the thread of the loop.

    Requests that come while live ones need all of the memory wait, first come, first served.
    """

    def __init__(self, model: AdaptedModel, backend: LoraBackend, max_rank: int, host_gib: float):
        self.backend = backend
        self.max_rank = max_rank
        self._model = model
        self._host = HostAdapters(int(host_gib * GIB))
        self._known: dict[str, AdapterPreparation] = {}
        self._queued: deque[tuple[AdapterReference, AdapterPreparation]] = deque()  # without memory yet
        self._keys: dict[str, str] = {}  # live request → its adapter's key
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        for index, linear in enumerate(model.linears):
            linear.addition = LinearAdapters(backend, index)

    def begin(self, request_id: str, adapter: AdapterReference) -> AdapterPreparation | None:
        """A request needs the adapter until `forget`. None where it is in host memory."""
        self._keys[request_id] = adapter.key
        self._host.use(adapter.key, request_id)
        known = self._known.get(adapter.key)
        if known is not None and known.is_done and known.error is not None:
            self._drop(adapter.key)  # its file may be there by now
            known = None
        if known is None:
            known = self._known[adapter.key] = AdapterPreparation()
            self._queue(adapter, known)
        return None if known.is_done and known.error is None else known

    def forget(self, request_id: str) -> None:
        key = self._keys.pop(request_id, None)
        if key is None:
            return
        self._host.forget(key, request_id)
        if not self._host.is_used(key):
            known = self._known.get(key)
            if known is not None and not self._host.holds(key):
                self._queued = deque(item for item in self._queued if item[1] is not known)
                del self._known[key]
        if self._queued:
            self._read_queued()

    def packed(self, adapter: AdapterReference) -> Any:
        """For the backend. A request that runs needs the adapter, so that it is in host memory."""
        return self._known[adapter.key].packed

    def read(self, adapter: AdapterReference) -> Any:
        """For the backend, from the adapter's files. Raises AdapterError."""
        description = describe(Path(adapter.folder))
        if description.digest != adapter.digest:
            raise AdapterError(f"the files of adapter {adapter.name} changed since it was loaded; load it again")
        check_fits(self._model, description, self.max_rank)
        return self.backend.pack(self._model.read(description))

    def tiles(self, items: Sequence[ScheduledTokens]) -> list[LoraTile]:
        slots = [slot_of(item.request) for item in items]
        return tiles_of(slots, [item.new_tokens for item in items], self.backend.tile_tokens)

    def _queue(self, adapter: AdapterReference, preparation: AdapterPreparation) -> None:
        needed, most = self._bytes(adapter), self._host.capacity_bytes
        if needed > most:
            preparation.finish(
                f"adapter {adapter.name} takes {shown_bytes(needed)}, and lora_host_gib leaves {shown_bytes(most)} for "
                "adapters; raise it"
            )
            return
        self._queued.append((adapter, preparation))
        self._read_queued()

    def _read_queued(self) -> None:
        while self._queued:
            adapter, preparation = self._queued[0]
            evicted = self._host.admit(adapter.key, self._bytes(adapter))
            if evicted is None:
                return
            for key in evicted:
                self._known.pop(key, None)
            self._queued.popleft()
            self._reader.submit(self._prepare, adapter, preparation)

    def _bytes(self, adapter: AdapterReference) -> int:
        return adapter.parameters * self.backend.parameter_bytes

    def _drop(self, key: str) -> None:
        self._known.pop(key, None)
        if self._host.holds(key):
            self._host.drop(key)

    def _prepare(self, adapter: AdapterReference, preparation: AdapterPreparation) -> None:
        """In the reader's thread."""
        try:
            preparation.packed = self.read(adapter)
            preparation.finish()
        except AdapterError as error:
            preparation.finish(str(error))
        except Exception as error:  # it concerns the requests of this adapter alone
            log.exception("adapter %s could not be read", adapter.name)
            preparation.finish(f"adapter {adapter.name} could not be read: {error!r}"[:300])


def _warn_of_base(config: EngineConfig, description: AdapterDescription) -> None:
    """Folders have any name: that of another base model proves nothing."""
    said, served = description.base_model, config.served_model_name or model_folder(config.model).name
    if said and Path(said).name != served:
        log.warning("adapter %s says that its base model is %s; it is served with %s", description.folder, said, served)


def check_fits(model: AdaptedModel, description: AdapterDescription, max_rank: int) -> None:
    """Raises AdapterError for an adapter of another model, or of a rank that slots have no room for."""
    model.fitted(description)
    rank = max(module.rank for module in description.modules)
    if rank > max_rank:
        raise AdapterError(f"adapter {description.folder} has rank {rank}, and max_lora_rank is {max_rank}; raise it")


def make_adapters(config: EngineConfig, model: Decoder, dtype: torch.dtype, device: torch.device) -> Adapters:
    """Raises ModelError for an adapter of the settings that does not fit the model."""
    adapted = AdaptedModel(model)
    max_rank = checked_rank(config, adapted)
    backend = make_lora(config.fused_operations, device, dtype, config.max_loras, max_rank, adapted.layers)
    return Adapters(adapted, backend, max_rank, config.lora_host_gib)


def checked_rank(config: EngineConfig, model: AdaptedModel) -> int:
    """The largest rank that slots have room for. Raises ModelError as `make_adapters`."""
    if not model.linears:
        raise ModelError("this model has no linear layers that adapters could change")
    try:
        found = [describe(folder) for folder in config.lora_adapters.values()]
        ranks = [module.rank for description in found for module in description.modules]
        most = config.max_lora_rank or max([*ranks, RUNTIME_RANK if config.lora_runtime_loading else 1])
        for description in found:
            check_fits(model, description, most)
            _warn_of_base(config, description)
    except AdapterError as error:
        raise ModelError(str(error)) from None
    return most
