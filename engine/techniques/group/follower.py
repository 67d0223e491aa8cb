"""What a rank beside the first computes of a step: as much as the first, but no request and no sample."""

import time
from collections import deque

import torch

from sojourn.engine.runner.batch import Batch
from sojourn.engine.runner.runner import ModelRunner
from sojourn.engine.runner.stream import Task
from sojourn.engine.techniques.group.rank_step import Conclude, Move, RankReport, RankStep
from sojourn.engine.techniques.group.traffic import report
from sojourn.engine.techniques.tiers.transfers import Transfers
from sojourn.engine.token.sampling.logprobs import chunks


class Follower:
    """Computes what rank 0 plans, with all exchanges that the other ranks wait for."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self._layout = runner.ranks.layout
        self._handed_on: deque[Batch] = deque()  # steps that the stages behind the first compute now
        self._ended_ns = 0  # when the part before was computed

    def expect(self, step: RankStep) -> None:
        """A step was heard of, while another one may still be computed."""
        self._runner.stages.expect(step.num_tokens)

    @torch.inference_mode()
    def follow(self, work: RankStep | Conclude | Move) -> RankReport | None:
        """What the rank did of a step; None of work that is no part of one."""
        if isinstance(work, Move):
            self._runner.host_slots.move(Transfers(work.stores, work.loads))
            return None
        begin_ns = time.monotonic_ns()
        waited_ns = begin_ns - self._ended_ns if self._waits_for_stages(work) else 0
        if isinstance(work, RankStep):
            self._take_adapters(work)
            self._compute(work.batch())
        else:
            self._conclude(self._handed_on.popleft())
        runner = self._runner
        stages, self._ended_ns = runner.stages, time.monotonic_ns()
        duration_ns = self._ended_ns - begin_ns
        return report(self._layout.rank, duration_ns, stages.traffic.take(), stages.take_times(), waited_ns)

    def _waits_for_stages(self, work: RankStep | Conclude) -> bool:
        """Whether the time since the part before is a bubble: there is work, and other stages have it."""
        return isinstance(work, RankStep) and work.follows and not self._layout.is_first_stage

    def _take_adapters(self, work: RankStep) -> None:
        """Reads the parts of adapters that come into slots: rank 0 has found that their files are good."""
        if (adapters := self._runner.adapters) is None:
            return
        for slot, adapter in work.adapter_loads:
            adapters.backend.install(slot, adapters.read(adapter))
        adapters.backend.begin(work.tiles)

    def _compute(self, batch: Batch) -> None:
        runner, layout = self._runner, self._layout
        if batch.graph_size is not None:
            runner.replayed(Task(lambda task: None), batch)
            return
        step = runner.inputs(Task(lambda task: None), batch)
        hidden = runner.hidden(step, batch.query_lens, batch.context_lens)
        if hidden is None:
            if layout.is_first_stage:
                runner.stages.expect_rows(batch)
                self._handed_on.append(batch)
            return
        sampled, scored = runner.chosen(batch, step, hidden)
        if layout.is_first_stage:
            self._join_logits(sampled, scored)
        else:
            runner.stages.return_rows(torch.cat((sampled, scored)))

    def _conclude(self, batch: Batch) -> None:
        self._join_logits(*self._runner.stages.returned_rows(batch))

    def _join_logits(self, sampled: torch.Tensor, scored: torch.Tensor) -> None:
        """The head's matrix is divided: rank 0 needs this rank's part of the logits."""
        runner = self._runner
        for part in chunks(len(scored), runner.shape.vocab_size):
            runner.model.logits(scored[part])
        runner.model.logits(sampled, dtype=runner.logit_dtype)
