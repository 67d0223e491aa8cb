"""The forward pass of one rank of a parallel group: its stage, and what goes between the stages.

Stage 0 has the embedding and the head, so that the sampler's rank has the logits. The last stage sends it the hidden
states of the tokens that are sampled or scored. Ranks of a stage exchange within its layers, and see none of this.
"""

from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from sojourn.engine.compute.attention.backend import AttentionBackend
from sojourn.engine.compute.buffers import to_device
from sojourn.engine.compute.communication.communicator import Receipt, TransferTimes
from sojourn.engine.compute.kv_cache import KVCache
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.runner.batch import Batch
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.runner.rows import PackedStep
from sojourn.engine.runner.stream import Task
from sojourn.engine.runner.tables import StepTensors, Tables
from sojourn.engine.techniques.group.rank_step import Ranks, has_unknown_tokens
from sojourn.engine.techniques.group.traffic import GroupReport, HiddenTimes, StepExchanges, Traffic, merged, report

GROUP = "group"  # the name of its parts


class Stages:
    """What a rank receives and hands on. Steps pass through in the order of their launch."""

    def __init__(self, ranks: Ranks, placed: PlacedModel, *, records: bool):
        """`records`: what the ranks report is wanted."""
        self.layout = ranks.layout
        self._ranks = ranks
        self._stage, self._pipeline = ranks.communicators.stage, ranks.communicators.pipeline
        self._under_way: deque[tuple[set[str], list[str]]] = deque()  # of steps: their requests, those to forget
        self._arriving: deque[Receipt] = deque()  # residual streams of the next steps, from the stage before
        self._returning: deque[Receipt] = deque()  # rows of steps under way, to the first stage
        self.traffic = Traffic(ranks.communicators)
        self._hidden = HiddenTimes(ranks.layout)
        self._records = records
        self._model, self._dtype, self._device = placed.model, placed.dtype, placed.device

    def concluded(self, batch: Batch, begun: Task, end: Task) -> Task:
        """Two parts of a step as one: between them other stages compute it, and this one may compute other steps."""
        batch.parts[GROUP].elsewhere_ns = max(0, end.begin_ns - begun.end_ns)
        end.begin_ns = begun.begin_ns
        end.load_ns, end.store_ns = begun.load_ns, begun.store_ns
        return end

    def report(self, task: Task, batch: Batch) -> GroupReport | None:
        """Of this step on rank 0, and what the other ranks reported since the last call."""
        if not self._records:
            return None
        step = batch.parts[GROUP]
        others = self._ranks.take_reports()
        for each in others:
            self._hidden.add(each.rank, TransferTimes(each.sent_ns, each.met_ns))
        own = report(0, task.end_ns - task.begin_ns - step.elsewhere_ns, step.exchanges)
        times = [(each.rank, each.busy_ns, each.communication_ns, each.bubble_ns) for each in (own, *others)]
        return GroupReport(times, step.exchanges, self._hidden.take())

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
            try:
                work(task, batch)
            except RuntimeError as error:  # of an exchange, whose message says nothing of ranks
                if (loss := self._ranks.loss()) is None:
                    raise
                raise loss from error
            step, times = batch.parts.setdefault(GROUP, StepExchanges()), self._pipeline.take_times()
            step.exchanges = merged(step.exchanges, self.traffic.take())
            if self._records:
                self._hidden.add(0, times)

        return run

    def take_times(self) -> TransferTimes:
        """Of this rank, since the last call."""
        return self._pipeline.take_times()

    def expect(self, num_tokens: int) -> None:
        """The stage before sends a step of so many tokens next. Asked for early, it arrives while another is computed.

        Called by the thread that hears of steps, while another one computes them.
        """
        if not self.layout.is_first_stage:
            self._arriving.append(self._pipeline.recv(self._room(num_tokens), self.layout.stage - 1))

    def expect_rows(self, batch: Batch) -> None:
        """The first stage has handed a step on: the last one returns its rows."""
        if batch.logit_rows:
            rows = self._room(batch.logit_rows)
            self._returning.append(self._pipeline.recv(rows, self.layout.pipeline_parallel - 1))

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
        residual = model.embed(step.ids) if layout.is_first_stage else self._arriving.popleft().wait()
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
        num_sampled = len(batch.step.sample_tokens)
        rows = self._returning.popleft().wait() if batch.logit_rows else self._room(0)
        return rows[:num_sampled], rows[num_sampled:]

    def _room(self, num_rows: int) -> torch.Tensor:
        return torch.empty((num_rows, self._model.config.hidden_size), dtype=self._dtype, device=self._device)
