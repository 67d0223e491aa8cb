"""Rank 0 of a parallel group: around the runner of its own part, what goes to the other ranks and comes back."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import LaunchedStep, Preparation, StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.runner.batch import Batch
from sojourn.engine.runner.forward import Computed, Forward
from sojourn.engine.runner.memory_plan import with_pool
from sojourn.engine.runner.runner import ModelRunner
from sojourn.engine.runner.stream import Task
from sojourn.engine.runner.technique import ComputingTechnique
from sojourn.engine.techniques.group.rank_step import BetweenSteps, Ranks, rank_step
from sojourn.engine.techniques.group.stages import GROUP, Stages
from sojourn.engine.techniques.group.traffic import bubble_ns, communication_ns
from sojourn.metrics.compute.startup import StartupClock


class GroupRunner:
    """Implements engine.request.plan.Runner."""

    def __init__(self, inner: ModelRunner, stages: Stages, ranks: Ranks):
        self.inner = inner
        self._ranks, self._stages = ranks, stages
        inner.forward = StagedForward(inner.forward, stages, inner)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        batch = self.inner.prepare(plan)
        self._ranks.send(rank_step(plan, batch, self.inner.techniques))
        prepared_ns = time.monotonic_ns()
        self._stages.launched(batch)
        task = self.inner.stream.submit(self._stages.counted(self.inner.compute, batch))
        return LaunchedStep(plan, prepared_ns, time.monotonic_ns(), (batch, task))

    def collect(self, step: LaunchedStep) -> StepOutcome:
        batch, task = step.state
        wait_began_ns = time.monotonic_ns()
        self.inner.stream.wait(task)
        if not self._stages.layout.is_last_stage:
            task = self._concluded(task, batch)
        outcome = self.inner.read(step.plan, batch, task, wait_began_ns)
        exchanges = batch.parts[GROUP].exchanges
        outcome.communication_ns, outcome.bubble_ns = communication_ns(exchanges), bubble_ns(exchanges)
        if (report := self._stages.report(task, batch)) is not None:
            outcome.parts[GROUP] = report
        for request_id in self._stages.collected():
            self.inner.sampler.forget(request_id)
        return outcome

    def begin(self, request: Request) -> Preparation | None:
        return self.inner.begin(request)

    def forget(self, request_id: str) -> None:
        if self._stages.postpones(request_id):
            self.inner.release(request_id)
        else:
            self.inner.forget(request_id)

    def close(self) -> None:
        self._ranks.close()

    @property
    def stores_beside_steps(self) -> bool:
        return self.inner.stores_beside_steps

    def between_steps(self, name: str, work: Any) -> Any:
        shared = self.inner.part(name).share_between_steps(work)
        if shared is not None:
            self._ranks.send(BetweenSteps(name, shared))
        return self.inner.between_steps(name, work)

    def _concluded(self, begun: Task, batch: Batch) -> Task:
        """The rest of a step whose layers other stages have computed, too."""
        self._ranks.conclude()
        task = self.inner.stream.submit(self._stages.counted(self._conclude, batch))
        self.inner.stream.wait(task)
        return self._stages.concluded(batch, begun, task)

    def _conclude(self, task: Task, batch: Batch) -> None:
        computed = self.inner.eager.logits(batch, *self._stages.returned_rows(batch))
        self.inner.sample(task, batch, computed)


class StagedForward:
    """The forward pass of a rank that has a stage of the layers."""

    def __init__(self, forward: Forward, stages: Stages, runner: ModelRunner):
        self._forward, self._stages, self._tables = forward, stages, runner.eager.tables
        self.sizes, self.size_for = forward.sizes, forward.size_for
        self.capture, self.drop_graphs = forward.capture, forward.drop_graphs

    def __call__(self, task: Task, batch: Batch) -> Computed | None:
        self._stages.share_sampled_ids(batch.step, self._tables)
        computed = self._forward(task, batch)
        if computed is None:
            self._stages.expect_rows(batch)
        return computed


def rank_runner(
    config: EngineConfig, folder: Path, startup: StartupClock, techniques: Sequence[ComputingTechnique], ranks: Ranks
) -> tuple[ModelRunner, Stages]:
    """The runner of a rank's own part. All ranks load together, and agree on sizes. Raises ModelError."""
    runner = ModelRunner(config, folder, startup, techniques, ranks.layout, ranks.communicators)
    stages = Stages(ranks, runner.placed, records=config.telemetry == "full")
    eager = runner.eager
    eager.layers = lambda step: stages.hidden(step, eager.operations, eager.attention, eager.kv_cache)
    memory = runner.memory
    per_token = memory.kv_bytes // memory.kv_tokens  # with a drafter's
    runner.memory = with_pool(memory, ranks.agree(memory.num_kv_blocks), config.block_size, per_token)
    runner.allocate(startup)
    for technique in techniques:
        technique.agree(ranks.agree)
    return runner, stages
