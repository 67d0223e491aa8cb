"""One model of a front: whether it is loaded, how much memory it has, and when it was used last."""

import asyncio
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.server.model import Model
from sojourn.engine.server.models.history import History
from sojourn.metrics.errors import SojournError
from sojourn.metrics.memory.plan import MemoryPlan

# The states of a core → what a client sees. A core that is replaced, or is silent, stays hot: its requests get 503.
STATES = {
    "loading": "loading", "ready": "hot", "hung": "hot", "restarting": "hot", "falling_asleep": "sleeping",
    "sleeping": "sleeping", "waking": "waking", "cold": "cold", "draining": "hot", "failed": "failed",
}  # fmt: skip
RETRY_SECONDS = 10  # after a model could not be loaded: until then requests get the same sentence
USUAL_LOAD_SECONDS = 5  # where none was measured
PROCESS_BYTES = 400 << 20  # of a core, where none was measured: interpreter and libraries


class ServedModel:
    """`make` builds the model, and raises SojournError; the first one is there from the start."""

    def __init__(self, name: str, config: EngineConfig, make: Callable[[], Model], built: Model | None = None):
        self.name = name
        self.config = config
        self.built = built
        self._make = make
        self._making = asyncio.Lock()
        self.num_waiting = 0  # calls that wait for it
        self.num_using = 0  # calls on their way to its core
        self.used_at = 0.0  # time.monotonic() of the last call
        self.change: asyncio.Task[None] | None = None  # loads or wakes it
        self.failure: SojournError | None = None  # of the last attempt
        self._failed_at = 0.0
        self.history = History(name, self.state)
        self._created = int(time.time())
        self._plan: MemoryPlan | None = None
        self.load_seconds: float | None = None  # that its last load took

    @property
    def state(self) -> str:
        """hot, sleeping, cold, loading, waking or failed."""
        if self.is_changing:
            return "loading" if self.built is None or self.built.core.state in ("cold", "loading") else "waking"
        if self.built is None:
            return "cold" if self.failure is None else "failed"
        return STATES[self.built.core.state]

    @property
    def is_hot(self) -> bool:
        """Its core takes calls, or says itself why not."""
        if self.built is None or self.is_changing:
            return False
        # The core of a front that has just begun is nobody's change: it loads, and its calls get 503 as ever.
        return self.built.core.state not in ("cold", "falling_asleep", "sleeping", "waking", "failed")

    @property
    def is_changing(self) -> bool:
        return self.change is not None and not self.change.done()

    @property
    def is_idle(self) -> bool:
        return not (self.num_using or self.num_waiting or self.is_changing) and not (
            self.built is not None and self.built.core.streams
        )

    @property
    def may_sleep(self) -> bool:
        """A core that is silent, or that another one replaces, would not answer."""
        return self.is_idle and self.built is not None and self.built.core.state == "ready"

    @property
    def expected_seconds(self) -> int:
        """Until it is hot, for `Retry-After`."""
        asleep = self.state in ("sleeping", "waking")
        seconds = self.built.core.sleep.wake_seconds if asleep else self.load_seconds
        return max(1, math.ceil(seconds or USUAL_LOAD_SECONDS))

    @property
    def plan(self) -> MemoryPlan | None:
        """Of its last core."""
        if self.built is not None and (ready := self.built.core.ready) is not None:
            self._plan = ready.memory
        return self._plan

    @property
    def needed_bytes(self) -> int:
        """When it is hot: by its last plan, or by the files of its weights."""
        if self.plan is not None:
            return self.plan.total_bytes
        kv = int((self.config.kv_cache_gib or 0) * (1 << 30))
        return PROCESS_BYTES + _file_bytes(model_folder(self.config.model)) + kv

    @property
    def held_bytes(self) -> int:
        """Now: a sleeping model has no KV pool."""
        state = self.state
        if state in ("cold", "failed") or self.built is None:
            return 0
        if state == "sleeping" and self.plan is not None:
            return self.plan.total_bytes - self.plan.kv_bytes
        return self.needed_bytes

    def card(self) -> dict[str, Any]:
        """As GET /v1/models shows it, with its state."""
        unknown = {"id": self.name, "object": "model", "created": self._created, "owned_by": "sojourn"}
        card = unknown if self.built is None else self.built.card()
        detail = {} if self.failure is None else {"detail": self.sentence(self.failure)}
        return card | {"state": self.state} | detail

    def sentence(self, error: SojournError) -> str:
        """For a client, which need not know where the operator's files lie."""
        return str(error).replace(str(model_folder(self.config.model)), f"`{self.name}`")

    async def build(self) -> Model:
        """The model with its tokenizer and template; one for all who ask at once. Raises SojournError."""
        async with self._making:
            if self.built is None:
                self.built = await asyncio.to_thread(self._make)
            return self.built

    def note(self) -> bool:
        """Remembers its state and memory of now; whether the state is another one."""
        changed = self.history.note(self.state, self.held_bytes)
        if changed and self.state == "hot":
            self.used_at = time.monotonic()  # it becomes idle from now on
        return changed

    def fail(self, error: SojournError) -> None:
        self.failure, self._failed_at = error, time.monotonic()

    @property
    def recent_failure(self) -> SojournError | None:
        recent = time.monotonic() - self._failed_at < RETRY_SECONDS
        return self.failure if recent else None


def _file_bytes(folder: Path) -> int:
    files = [folder] if folder.is_file() else [*folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)
