"""A step as the other ranks of a parallel group are given it, and what each of them reports of it.

The packed step is a delta already: new blocks of requests, tokens that the host has read, and rows of tables that every
rank keeps. So no rank but the first knows a request.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.compute.communication.communicator import Communicators
from sojourn.engine.compute.communication.layout import ParallelLayout
from sojourn.engine.runner.batch import Batch, PromptRows
from sojourn.engine.runner.rows import UNKNOWN, PackedStep, split
from sojourn.engine.techniques.lora.kernels.backend import LoraTile
from sojourn.engine.techniques.tiers.transfers import Transfers


class RankStep(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 → rank: the work of one step, without requests."""

    packed: bytes  # int32 numbers: the parts of a PackedStep
    lengths: list[int]  # of the parts
    num_tokens: int
    scored_rows: list[int]  # the step's tokens whose successors in the prompt are scored
    tiles: list[LoraTile]  # tokens that use adapters
    adapter_loads: list[tuple[int, AdapterReference]]  # slots that every rank fills first, with its part
    follows: bool  # see StepPlan
    stores: list[tuple[int, int]]  # KV blocks that go to slots of host memory first: every rank moves its part
    loads: list[tuple[int, int]]  # ... and those that come from there
    graph_size: int | None  # of the CUDA graph that every rank replays

    def batch(self) -> Batch:
        """The work as this rank's runner computes it."""
        packed = split(np.frombuffer(bytearray(self.packed), dtype=np.int32), self.lengths)
        new = np.diff(packed.query_start)
        rows = self.scored_rows
        prompts = PromptRows(rows, [0] * len(rows), [0] * len(rows), []) if rows else None
        transfers = Transfers(self.stores, self.loads) if self.stores or self.loads else None
        lens = new.tolist(), (packed.past + new).tolist()
        return Batch(packed, *lens, None, [], [], prompts=prompts, transfers=transfers, tiles=self.tiles,
                     graph_size=self.graph_size)  # fmt: skip


class Move(msgspec.Struct, frozen=True, tag=True):
    """Rank 0 → rank: KV blocks to and from slots of host memory, while no step is under way."""

    stores: list[tuple[int, int]]
    loads: list[tuple[int, int]]


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

    def send(self, work: RankStep | Move) -> None:
        """Hands work to all other ranks. Raises GroupError where one of them is lost."""

    def conclude(self) -> None:
        """Has the other ranks of the first stage conclude a step."""

    def take_reports(self) -> Sequence[RankReport]:
        """Those that arrived since the last call."""

    def loss(self) -> Exception | None:
        """Why an exchange has just failed, where a rank is lost; waits a moment for the word of it."""

    def close(self) -> None:
        """Ends the other ranks."""


def rank_step(batch: Batch, adapter_loads: Sequence[tuple[int, AdapterReference]], *, follows: bool) -> RankStep:
    step, prompts = batch.step, batch.prompts
    scored = [] if prompts is None else prompts.rows
    num_tokens, moves = len(step.known_ids), batch.transfers or Transfers()
    return RankStep(step.whole.tobytes(), step.lengths, num_tokens, scored, batch.tiles, list(adapter_loads), follows,
                    moves.stores, moves.loads, batch.graph_size)  # fmt: skip


def has_unknown_tokens(step: PackedStep) -> bool:
    """Whether the step reads tokens that were sampled and that the host had not read when it was planned."""
    return bool(step.known_ids.size) and int(step.known_ids.min()) == UNKNOWN
