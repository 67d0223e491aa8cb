"""A step as the other ranks of a parallel group are given it, and what each of them reports of it.

The packed step is a delta already: new blocks of requests, tokens that the host has read, and rows of tables that every
rank keeps. So no rank but the first knows a request.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from sojourn.engine.compute.communication.communicator import Communicators
from sojourn.engine.compute.communication.layout import ParallelLayout
from sojourn.engine.request.plan import StepPlan
from sojourn.engine.runner.batch import Batch, PromptRows
from sojourn.engine.runner.rows import UNKNOWN, PackedStep, split
from sojourn.engine.runner.technique import ComputingTechnique


class RankStep(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 → rank: the work of one step, without requests."""

    packed: bytes  # int32 numbers: the parts of a PackedStep
    lengths: list[int]  # of the parts
    num_tokens: int
    scored_rows: list[int]  # the step's tokens whose successors in the prompt are scored
    follows: bool  # see StepPlan
    graph_size: int | None  # of the CUDA graph that every rank replays
    parts: dict[str, Any]  # by the name of a technique: what its half on every rank needs

    def batch(self, techniques: Sequence[ComputingTechnique]) -> Batch:
        """The work as this rank's runner computes it."""
        packed = split(np.frombuffer(bytearray(self.packed), dtype=np.int32), self.lengths)
        new = np.diff(packed.query_start)
        rows = self.scored_rows
        prompts = PromptRows(rows, [0] * len(rows), [0] * len(rows), []) if rows else None
        lens = new.tolist(), (packed.past + new).tolist()
        batch = Batch(packed, *lens, None, [], [], prompts=prompts, graph_size=self.graph_size)
        for technique in techniques:
            if technique.name in self.parts:
                technique.follow(batch, self.parts[technique.name])
        return batch


class BetweenSteps(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 → rank: work of a technique, while no step is under way."""

    name: str
    shared: Any


class Conclude(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 → the other ranks of the first stage: the last stage returns the oldest step under way.

    These ranks share collectives, so that all have to do this between the same two steps.
    """


class RankReport(msgspec.Struct, frozen=True, tag=True):
    """Where the time of a rank's part of a step went. Rank → rank 0, behind each part."""

    rank: int
    busy_ns: int  # it computed
    communication_ns: int  # it exchanged with other ranks
    bubble_ns: int  # it waited for another stage
    # Of the tensors that it sent to another stage, and of those that it received: see TransferTimes.
    sent_ns: list[int]
    met_ns: list[int]


class Ranks(Protocol):
    """The other ranks, as a runner sees them."""

    layout: ParallelLayout
    communicators: Communicators

    def agree(self, num_blocks: int) -> int:
        """The blocks that every rank has room for: the least of all. Waits for all of them, and books the wait."""

    def send(self, work: RankStep | BetweenSteps) -> None:
        """Hands work to all other ranks. Raises GroupError where one of them is lost."""

    def conclude(self) -> None:
        """Has the other ranks of the first stage conclude a step."""

    def take_reports(self) -> Sequence[RankReport]:
        """Those that arrived since the last call."""

    def loss(self) -> Exception | None:
        """Why an exchange has just failed, where a rank is lost; waits a moment for the word of it."""

    def close(self) -> None:
        """Ends the other ranks."""


def rank_step(plan: StepPlan, batch: Batch, techniques: Sequence[ComputingTechnique]) -> RankStep:
    step, prompts = batch.step, batch.prompts
    scored = [] if prompts is None else prompts.rows
    shared = {technique.name: technique.share(plan, batch) for technique in techniques}
    parts = {name: part for name, part in shared.items() if part is not None}
    num_tokens = len(step.known_ids)
    return RankStep(step.whole.tobytes(), step.lengths, num_tokens, scored, plan.follows, batch.graph_size, parts)


def has_unknown_tokens(step: PackedStep) -> bool:
    """Whether the step reads tokens that were sampled and that the host had not read when it was planned."""
    return bool(step.known_ids.size) and int(step.known_ids.min()) == UNKNOWN
