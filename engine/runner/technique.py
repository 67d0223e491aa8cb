"""The computing half of a technique: what a runner asks of it for each request and at each step, never per token.

A technique that the settings do not ask for is in no runner's tuple. The order of the tuple is that of the hooks.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from sojourn.engine.request.plan import Preparation, ScheduledTokens, StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.runner.batch import Batch, Results
from sojourn.engine.runner.graphs import Decoded
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.runner.preparation import refused
from sojourn.engine.runner.stream import Task


class Reserved(NamedTuple):
    """Memory that a technique will take."""

    weight_bytes: int = 0
    work_bytes: int = 0
    adapter_bytes: int = 0
    tier_bytes: int = 0
    kv_bytes_per_token: int = 0


class ComputingTechnique(Protocol):
    """The hooks that a technique does not need do nothing."""

    name: ClassVar[str]  # of its folder, and of its part in plans and batches

    def reserve(self, model: PlacedModel) -> Reserved:
        """What it will take beside this outline. Raises ModelError where the two do not go together."""
        return Reserved()

    def load(self, model: PlacedModel) -> None:
        """The model is loaded. What the technique takes now is measured with it. Raises ModelError."""

    def allocate(self, runner: Any) -> None:
        """The KV pool of a ModelRunner is there, and no step was computed yet. Raises ModelError."""

    def agree(self, least: Callable[[int], int]) -> None:
        """Ranks of a group have different room: `least` gives the smallest of what all of them say."""

    def weights(self) -> Sequence[Any]:
        """Objects of its own with tensors that leave the device while the model sleeps."""
        return ()

    def begin(self, request: Request) -> Preparation | None:
        """A request arrived. None: it waits for nothing here."""

    def forget(self, request_id: str) -> None:
        """The request ended, or was never known."""

    def preempt(self, request_id: str) -> None:
        """The request lost its blocks, and may come back."""

    def allow(self, request: Request, drafts: list[int]) -> list[int]:
        """Those of the next tokens, from the first on, that the request may get."""
        return drafts

    def arrange(self, items: list[ScheduledTokens]) -> None:
        """The order of the batch: neighbours may share work. Single tokens stay first."""

    def prepare(self, plan: StepPlan, batch: Batch) -> None:
        """On the host, before the step is launched: notes in the batch what its next hooks need."""

    def before_copies(self, task: Task, batch: Batch) -> None:
        """In the order of the device's work, as all that follow: before the step copies any block."""

    def behind_copies(self, task: Task, batch: Batch) -> None: ...

    def before_forward(self, batch: Batch) -> None: ...

    def behind_forward(self, found: Results | Decoded, hidden: torch.Tensor | None) -> None:
        """`hidden` [num_tokens, hidden_size] are behind all layers; None where another process computes the rest."""

    def before_capture(self, size: int) -> None:
        """A forward pass of `size` single tokens follows, which a graph captures."""

    def before_replay(self, batch: Batch) -> None:
        """A graph replays the step."""

    def collect(self, plan: StepPlan, batch: Batch, outcome: StepOutcome) -> None:
        """The step is computed: adds to its outcome, in the host's order."""

    def between_steps(self, work: Any) -> Any:
        """Work that its planning half wants done at once."""

    def share(self, plan: StepPlan, batch: Batch) -> Any:
        """What the other ranks of a group need for the step, as msgpack has it; None: nothing."""

    def follow(self, batch: Batch, shared: Any) -> None:
        """On another rank, instead of `prepare`."""

    def share_between_steps(self, work: Any) -> Any:
        """As `share`, of `between_steps`."""

    def follow_between_steps(self, shared: Any) -> None: ...


class Absent(ComputingTechnique):
    """Refuses the requests that need a technique which this engine does not have."""

    def __init__(self, name: str, needs: Callable[[Request], bool], sentence: str):
        self.name, self._needs, self._sentence = name, needs, sentence

    def begin(self, request: Request) -> Preparation | None:
        return refused(self._sentence) if self._needs(request) else None
