"""StepPlan → tensors → model → sampled ids: the only place that knows both requests and tensors."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sojourn.engine.compute.backends import make_attention, make_operations
from sojourn.engine.compute.buffers import to_device
from sojourn.engine.compute.communication.communicator import Communicators
from sojourn.engine.compute.communication.layout import ONE_PROCESS, ParallelLayout
from sojourn.engine.config import EngineConfig, largest_step_tokens
from sojourn.engine.request.plan import LaunchedStep, Preparation, StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.runner.batch import OVERFLOWED, Batch, batch_order, prompt_rows, sampled_rows
from sojourn.engine.runner.build import allocated, chosen_device, chosen_dtypes
from sojourn.engine.runner.forward import Computed, EagerForward, Forward, GraphForward
from sojourn.engine.runner.graphs import wants_graphs
from sojourn.engine.runner.measured_memory import measured_memory
from sojourn.engine.runner.memory_plan import planned
from sojourn.engine.runner.outcome import finish, keep_scores, outcome_of
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.runner.preparation import all_of, refused
from sojourn.engine.runner.rows import StableRows, pack
from sojourn.engine.runner.stream import Task, make_stream, step_threads
from sojourn.engine.runner.tables import make_tables
from sojourn.engine.runner.technique import ComputingTechnique
from sojourn.engine.runner.weight_reference import reference_predictions
from sojourn.engine.sampling import keeps_rows, unfit
from sojourn.engine.token.models.registry import load_model
from sojourn.engine.token.sampling.entropy import EntropyProbe
from sojourn.engine.token.sampling.sampler import Sampler
from sojourn.metrics.compute.startup import StartupClock


class ModelRunner:
    """Owns the device: the weights, the KV cache and the tables.

    On CUDA `launch` queues the forward pass and the sampler. A CPU computes in a thread of its own if steps overlap;
    else in `collect`, and its time is the stage `wait`, because that is when the host waits for the computation.
    """

    def __init__(
        self, config: EngineConfig, folder: Path, startup: StartupClock, techniques: Sequence[ComputingTechnique] = (),
        layout: ParallelLayout = ONE_PROCESS, communicators: Communicators | None = None,
    ):  # fmt: skip
        """Loads the model, or this rank's part. `allocate` comes before the first step. Raises ModelError."""
        self.config, self.techniques = config, techniques
        startup.enter("kernels")
        device = chosen_device(config)
        dtype, kv_dtype = chosen_dtypes(config, device)
        attention = make_attention(config.attention_backend, device, dtype, kv_dtype)
        operations = make_operations(config.fused_operations, device, dtype, kv_dtype)
        startup.enter("memory_plan")
        self.memory = planned(config, folder, techniques, layout)
        startup.enter("reference")
        reference = reference_predictions(config, folder, dtype, device)
        startup.enter("conversion")
        model = load_model(
            folder, dtype, device, config.max_model_len, load_format=config.load_format, weights=config.weights,
            window=config.window_and_sinks, startup=startup, layout=layout, communicators=communicators,
        )  # fmt: skip
        startup.enter("setup")
        self.weight_error = None if reference is None else reference.error_of(model)
        del reference
        max_model_len = config.max_model_len or model.config.max_model_len
        most_tokens = largest_step_tokens(config, device.type)
        self.placed = PlacedModel(model, folder, device, dtype, kv_dtype, max_model_len, most_tokens)
        self.shape = model.shape(kv_dtype)
        self.overlap = device.type == "cuda" if config.overlap == "auto" else config.overlap == "on"
        self.stream = make_stream(device, self.overlap or layout.pipeline_parallel > 1)
        # With several stages a request's rows are in use until a step ends that was launched before it did.
        max_rows = config.max_num_seqs * min(2, layout.pipeline_parallel)
        self.sampler = Sampler(self.shape.vocab_size, device, max_rows=max_rows)
        records = config.telemetry == "full"
        self.entropy_probe = EntropyProbe(self.shape.vocab_size, device) if records else None
        self.rows = StableRows(config.max_num_seqs)
        size = (config.max_num_seqs, -(-max_model_len // config.block_size), config.block_size)
        tables = make_tables(*size, device, gathers=not attention.indexes_tables)
        attention.reserve(config.max_num_seqs, most_tokens)
        self.eager = EagerForward(
            self.placed, attention, operations, tables, self.sampler, techniques, block_size=config.block_size,
            counts_experts=records,
        )  # fmt: skip
        has_graphs = wants_graphs(config, device, attention, operations)
        draws = layout.rank == 0
        self.forward: Forward = GraphForward(self.eager, config, draws=draws) if has_graphs else self.eager
        packed = model.held_as is not None  # by this project's kernels or by torch's
        alone = packed and device.type == "cpu" and layout.size == 1  # ranks that measure apart would exchange unlike
        self.threads = step_threads(model, self.shape) if alone else None
        for technique in techniques:
            technique.load(self.placed)

    def allocate(self, startup: StartupClock) -> None:
        """The KV pool of the memory plan, and what needs it. Raises ModelError."""
        num_blocks, block_size = self.memory.num_kv_blocks, self.config.block_size
        self.eager.kv_cache = allocated(self.placed, num_blocks, block_size)
        for technique in self.techniques:
            technique.allocate(self)
        with startup.phase("capture"):
            self.forward.capture()

    @property
    def inner(self) -> "ModelRunner":
        """What computes: a group's runner is around it."""
        return self

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        batch = self.prepare(plan)
        prepared_ns = time.monotonic_ns()
        task = self.stream.submit(lambda task: self.compute(task, batch))
        return LaunchedStep(plan, prepared_ns, time.monotonic_ns(), (batch, task))

    def collect(self, step: LaunchedStep) -> StepOutcome:
        batch, task = step.state
        wait_began_ns = time.monotonic_ns()
        self.stream.wait(task)
        return self.read(step.plan, batch, task, wait_began_ns)

    def begin(self, request: Request) -> Preparation | None:
        # A tokenizer may know more ids than its model, and one of them on the device would end the process.
        sentence = unfit(request.sampling, request.token_ids, self.shape.vocab_size)
        if sentence is not None:
            return refused(sentence)
        begun = (technique.begin(request) for technique in self.techniques)
        return all_of([preparation for preparation in begun if preparation is not None])

    def forget(self, request_id: str) -> None:
        self.release(request_id)
        self.sampler.forget(request_id)

    def release(self, request_id: str) -> None:
        """A request ended, and a step under way may still sample it."""
        for technique in self.techniques:
            technique.forget(request_id)
        self.rows.release(request_id)

    def close(self) -> None:
        """Nothing here outlives the process."""

    @property
    def stores_beside_steps(self) -> bool:
        return self.placed.device.type == "cpu"  # a GPU would gather the blocks behind the step that is under way

    def between_steps(self, name: str, work: Any) -> Any:
        return self.part(name).between_steps(work)

    def part(self, name: str) -> ComputingTechnique:
        """The technique of that name, which this engine has."""
        return next(technique for technique in self.techniques if technique.name == name)

    def allow(self, request: Request, drafts: list[int]) -> list[int]:
        for technique in self.techniques:
            drafts = technique.allow(request, drafts)
        return drafts

    def prepare(self, plan: StepPlan) -> Batch:
        for request, *_ in plan.preempted:
            self.sampler.forget(request.id)
            self.rows.release(request.id)
            for technique in self.techniques:
                technique.preempt(request.id)
        items = sorted(plan.scheduled, key=batch_order)
        for technique in self.techniques:
            technique.arrange(items)
        has_drafts = plan.num_drafts > 0
        rows = sampled_rows(items, has_drafts=has_drafts)
        if has_drafts or any(keeps_rows(each.sampling) and not self.sampler.knows(each.id) for each in rows.requests):
            self.stream.drain()  # rows are written now, and the tables may grow
        batch = Batch(
            pack(items, self.rows, self.config.block_size, plan.copies),
            [item.new_tokens for item in items],
            [item.past_tokens + item.new_tokens for item in items],
            self.sampler.prepare(*rows),
            [request.id for request in rows.requests],
            items,
            has_drafts,
            prompts=prompt_rows(items),
        )
        if rows.requests and self.entropy_probe is not None:
            batch.entropy_sample = self.entropy_probe.sample_row(rows.requests, self.sampler.edits, rows.drafts)
        for row, request in enumerate(rows.requests):
            if (top := request.sampling.logprobs) is not None:
                batch.scored.append(row)
                batch.scored_tops.append(top)
        for technique in self.techniques:
            technique.prepare(plan, batch)
        batch.graph_size = self.forward.size_for(batch)
        return batch

    @torch.inference_mode()
    def compute(self, task: Task, batch: Batch) -> None:
        """The device's work of a step, in its order."""
        if self.threads is not None:
            self.threads.take(len(batch.step.known_ids), sum(batch.context_lens))
        computed = self.forward(task, batch)
        if computed is not None:  # else other processes compute the rest
            self.sample(task, batch, computed)

    def sample(self, task: Task, batch: Batch, computed: Computed) -> None:
        """From the logits of the sampling rows to what the host reads. The tables remember the ids."""
        task.forward_done()
        ids = computed.ids
        if ids is None:
            ids = self._drawn(batch, computed)
        keep_scores(batch, computed.logits, ids)

    def _drawn(self, batch: Batch, computed: Computed) -> torch.Tensor:
        rows, tables = batch.results.rows, self.eager.tables
        masks = None if batch.masks is None else to_device(batch.masks(), self.placed.device)
        if computed.overflowed is None:
            return self.sampler.sample(computed.logits, batch.sampling, masks, (rows, tables.last_ids))
        ids = self.sampler.sample(computed.logits, batch.sampling, masks).masked_fill(computed.overflowed, OVERFLOWED)
        tables.remember(rows, ids)
        return ids

    def read(self, plan: StepPlan, batch: Batch, task: Task, wait_began_ns: int) -> StepOutcome:
        """What a step gave whose task is done."""
        outcome = outcome_of(batch, task, wait_began_ns)
        for technique in self.techniques:
            technique.collect(plan, batch, outcome)
        return finish(outcome, batch)

    def renew_sampler(self) -> None:
        """Frees the tables of requests that are forgotten."""
        vocab_size, device = self.shape.vocab_size, self.placed.device
        self.sampler = self.eager.sampler = Sampler(vocab_size, device, max_rows=self.config.max_num_seqs)


def make_single_runner(
    config: EngineConfig,
    folder: Path,
    startup: StartupClock | None = None,
    techniques: Sequence[ComputingTechnique] = (),
) -> ModelRunner:
    """Of one process that computes the whole model. Raises ModelError."""
    startup = startup or StartupClock()
    runner = ModelRunner(config, folder, startup, techniques)
    if runner.placed.device.type == "cuda":
        with startup.phase("memory_probe"):
            runner.memory = measured_memory(runner)
    runner.allocate(startup)
    return runner
