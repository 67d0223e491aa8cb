"""The forward pass of one rank of a parallel group: its stage, and what goes between the stages.

Stage 0 has the embedding and the head, so that the sampler's rank has the logits. The last stage sends it the hidden
states of the tokens that are sampled or scored. Ranks of a stage exchange within its layers, and see none of this.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from msgspec.structs import astuple

from engine.compute.attention.backend import AttentionBackend
from engine.compute.buffers import to_device
from engine.compute.kv_cache import KVCache
from engine.compute.operations.backend import Operations
from engine.runner.batch import Batch
from engine.runner.rank_step import Ranks, has_unknown_tokens
from engine.runner.rows import PackedStep
from engine.runner.stream import Task
from engine.runner.tables import StepTensors, Tables
from engine.runner.traffic import Traffic, merged, report
from engine.token.models.decoder import Decoder


class Stages:
    """What a rank receives and hands on. Steps pass through in the order of their launch."""

    def __init__(self, ranks: Ranks, model: Decoder, dtype: torch.dtype, device: torch.device):
        self.layout = ranks.layout
        self._ranks = ranks
        self._stage, self._pipeline = ranks.communicators.stage, ranks.communicators.pipeline
        self._under_way: deque[tuple[set[str], list[str]]] = deque()  # of steps: their requests, those to forget
        self.traffic = Traffic(ranks.communicators)
        self._model, self._dtype, self._device = model, dtype, device

    def concluded(self, begun: Task, end: Task) -> Task:
        """Two parts of a step as one: between them other stages compute it, and this one may compute other steps."""
        end.elsewhere_ns = max(0, end.begin_ns - begun.end_ns)
        end.begin_ns = begun.begin_ns
        end.exchanges = merged(begun.exchanges, end.exchanges)
        return end

    def reports(self, task: Task) -> list[tuple[int, int, int, int]]:
        """Of this step on rank 0, and what the other ranks reported since the last call: see RankReport."""
        own = report(0, task.end_ns - task.begin_ns - task.elsewhere_ns, task.exchanges)
        return [astuple(each) for each in (own, *self._ranks.take_reports())]

    def launched(self, batch: Batch) -> None:
        """A step is under way. Its rows are sampled much later, and belong to its requests until then."""
        if self.layout.pipeline_parallel > 1:
            self._under_way.append((set(batch.request_ids), []))

    def collected(self) -> list[str]:
        """The oldest step under way is over: requests that ended meanwhile, and that the sampler can forget."""
        return self._under_way.popleft()[1] if self._under_way else []

    def postpones(self, request_id: str) -> bool:
        """Whether the sampler forgets a request only when a step under way is over."""
        for requests, ended in self._under_way:
            if request_id in requests:
                ended.append(request_id)
                return True
        return False

    def counted(self, work: Callable[[Task, Batch], None], batch: Batch) -> Callable[[Task], None]:
        """Work of this rank, with the times of its exchanges."""

        def run(task: Task) -> None:
            work(task, batch)
            task.exchanges = self.traffic.take()

        return run

    def share_sampled_ids(self, step: PackedStep, tables: Tables) -> None:
        """Gives the ranks of the first stage the last ids of rows whose tokens the host had not read at the plan."""
        if self._stage.size == 1 or not self.layout.is_first_stage or not has_unknown_tokens(step):
            return
        rows = to_device(torch.from_numpy(step.rows.astype(np.int64)), self._device)
        ids = self._stage.broadcast(tables.last(rows), 0)
        tables.remember(rows, ids)

    def hidden(
        self, step: StepTensors, operations: Operations, attention: AttentionBackend, kv_cache: KVCache
    ) -> torch.Tensor | None:
        """[num_tokens, hidden_size] behind the last layer; None where the step has gone to the next stage."""
        layout, model = self.layout, self._model
        if layout.pipeline_parallel == 1:
            return model(step.ids, step.positions, step.slots, operations, attention, kv_cache)
        if layout.is_first_stage:
            residual = model.embed(step.ids)
        else:
            residual = self._pipeline.recv(self._room(len(step.ids)), layout.stage - 1)
        behind = model.run_layers(residual, step.positions, step.slots, operations, attention, kv_cache)
        if layout.is_last_stage:
            return behind
        self._pipeline.send(behind, layout.stage + 1)
        return None

    def return_rows(self, rows: torch.Tensor) -> None:
        """The last stage's part of a step ends: [num_rows, hidden_size] go to stage 0."""
        if len(rows):
            self._pipeline.send(rows, 0)

    def returned_rows(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """What the last stage returns of the oldest step under way: the rows that are sampled, and those scored."""
        num_rows, num_sampled = batch.logit_rows, len(batch.step.sample_tokens)
        rows = self._room(num_rows)
        if num_rows:
            self._pipeline.recv(rows, self.layout.pipeline_parallel - 1)
        return rows[:num_sampled], rows[num_sampled:]

    def _room(self, num_rows: int) -> torch.Tensor:
        return torch.empty((num_rows, self._model.config.hidden_size), dtype=self._dtype, device=self._device)
