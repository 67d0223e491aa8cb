"""What a rank beside the first computes of a step: as much as the first, but no request and no sample."""

import time
from collections import deque

import torch

from sojourn.engine.runner.batch import Batch
from sojourn.engine.runner.runner import ModelRunner
from sojourn.engine.runner.stream import Task
from sojourn.engine.techniques.group.rank_step import BetweenSteps, Conclude, RankReport, RankStep
from sojourn.engine.techniques.group.stages import Stages
from sojourn.engine.techniques.group.traffic import report
from sojourn.engine.token.sampling.logprobs import chunks


class Follower:
    """Computes what rank 0 plans, with all exchanges that the other ranks wait for."""

    def __init__(self, runner: ModelRunner, stages: Stages):
        self._runner, self._eager, self._stages = runner, runner.eager, stages
        self._layout = stages.layout
        self._handed_on: deque[Batch] = deque()  # steps that the stages behind the first compute now
        self._ended_ns = 0  # when the part before was computed

    def expect(self, step: RankStep) -> None:
        """A step was heard of, while another one may still be computed."""
        self._stages.expect(step.num_tokens)

    @torch.inference_mode()
    def follow(self, work: RankStep | Conclude | BetweenSteps) -> RankReport | None:
        """What the rank did of a step; None of work that is no part of one."""
        if isinstance(work, BetweenSteps):
            self._runner.part(work.name).follow_between_steps(work.shared)
            return None
        begin_ns = time.monotonic_ns()
        waited_ns = begin_ns - self._ended_ns if self._waits_for_stages(work) else 0
        if isinstance(work, RankStep):
            self._compute(work.batch(self._runner.techniques))
        else:
            self._conclude(self._handed_on.popleft())
        stages, self._ended_ns = self._stages, time.monotonic_ns()
        duration_ns = self._ended_ns - begin_ns
        return report(self._layout.rank, duration_ns, stages.traffic.take(), stages.take_times(), waited_ns)

    def _waits_for_stages(self, work: RankStep | Conclude) -> bool:
        """Whether the time since the part before is a bubble: there is work, and other stages have it."""
        return isinstance(work, RankStep) and work.follows and not self._layout.is_first_stage

    def _compute(self, batch: Batch) -> None:
        eager, stages, layout, task = self._eager, self._stages, self._layout, Task(lambda task: None)
        stages.share_sampled_ids(batch.step, eager.tables)
        if batch.graph_size is not None:
            self._runner.forward.replay(task, batch)
            return
        step = eager.inputs(task, batch)
        hidden = eager.compute(batch, step)
        if hidden is None:
            if layout.is_first_stage:
                stages.expect_rows(batch)
                self._handed_on.append(batch)
            return
        sampled, scored = eager.chosen(batch, step, hidden)
        if layout.is_first_stage:
            self._join_logits(sampled, scored)
        else:
            stages.return_rows(torch.cat((sampled, scored)))

    def _conclude(self, batch: Batch) -> None:
        self._join_logits(*self._stages.returned_rows(batch))

    def _join_logits(self, sampled: torch.Tensor, scored: torch.Tensor) -> None:
        """The head's matrix is divided: rank 0 needs this rank's part of the logits."""
        eager = self._eager
        for part in chunks(len(scored), eager.sampler.vocab_size):
            eager.model.logits(scored[part])
        eager.model.logits(sampled, dtype=eager.logit_dtype)
