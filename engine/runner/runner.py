"""StepPlan → tensors → model → sampled ids: the only place that knows both requests and tensors."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.compute.attention.backend import AttentionInputs
from sojourn.engine.compute.backends import make_attention, make_operations
from sojourn.engine.compute.buffers import to_device
from sojourn.engine.compute.communication.layout import ONE_PROCESS
from sojourn.engine.compute.kv_cache import KVCache, clear_blocks
from sojourn.engine.config import EngineConfig, largest_step_tokens
from sojourn.engine.request.plan import LaunchedStep, Preparation, StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.runner.batch import (
    OVERFLOWED,
    Batch,
    batch_order,
    finishes,
    prompt_rows,
    rows_with_drafts,
    sampled_logprobs,
    sampled_tokens,
)
from sojourn.engine.runner.build import allocated, chosen_device, chosen_dtypes
from sojourn.engine.runner.decode import decode
from sojourn.engine.runner.expert_tokens import ExpertTokens
from sojourn.engine.runner.graphs import Decoded, DecodeGraphs, captured, graph_sizes, wants_graphs
from sojourn.engine.runner.measured_memory import measured_memory
from sojourn.engine.runner.memory_plan import planned, window_of, with_pool
from sojourn.engine.runner.outcome import keep_scores, outcome, prompt_scores, sent
from sojourn.engine.runner.rows import StableRows, pack
from sojourn.engine.runner.stream import Task, make_stream, step_threads
from sojourn.engine.runner.tables import StepTensors, make_tables
from sojourn.engine.runner.weight_reference import reference_predictions
from sojourn.engine.sampling import keeps_rows, unfit
from sojourn.engine.techniques.grammar.guides import Guides, refused
from sojourn.engine.techniques.group.rank_step import Move, Ranks, rank_step
from sojourn.engine.techniques.group.stages import Stages
from sojourn.engine.techniques.lora.host import Adapters, both, make_adapters
from sojourn.engine.techniques.lora.kernels.backend import decode_slots
from sojourn.engine.techniques.speculation.drafting import Drafting
from sojourn.engine.techniques.speculation.proposers.drafters import Target
from sojourn.engine.techniques.speculation.proposers.proposers import make_proposer
from sojourn.engine.techniques.speculation.settings import PROPOSING
from sojourn.engine.techniques.tiers.host_slots import HostSlots, move_blocks
from sojourn.engine.techniques.tiers.transfers import Transfers
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
        self, config: EngineConfig, folder: Path, startup: StartupClock | None = None, ranks: Ranks | None = None
    ):
        """`ranks` are the others of a parallel group; this one computes its part of each step."""
        startup = startup or StartupClock()
        startup.enter("kernels")
        self.ranks = ranks
        layout = ONE_PROCESS if ranks is None else ranks.layout
        self.config, self.device = config, chosen_device(config)
        on_cuda = self.device.type == "cuda"
        self.overlap = on_cuda if config.overlap == "auto" else config.overlap == "on"
        self.dtype, self.kv_dtype = chosen_dtypes(config, self.device)
        self.block_size = config.block_size
        self.attention = make_attention(config.attention_backend, self.device, self.dtype, self.kv_dtype)
        self.operations = make_operations(config.fused_operations, self.device, self.dtype, self.kv_dtype)
        startup.enter("memory_plan")
        self.memory = planned(config, folder, layout)
        self.adapters: Adapters | None = None
        startup.enter("reference")
        reference = reference_predictions(config, folder, self.dtype, self.device)
        startup.enter("conversion")
        self.model = load_model(
            folder, self.dtype, self.device, config.max_model_len, load_format=config.load_format,
            weights=config.weights, window=config.window_and_sinks, startup=startup,
            layout=layout, communicators=None if ranks is None else ranks.communicators,
        )  # fmt: skip
        startup.enter("setup")
        self.weight_error = None if reference is None else reference.error_of(self.model)
        del reference
        self.max_model_len = config.max_model_len or self.model.config.max_model_len
        self.shape = self.model.shape(self.kv_dtype)
        max_rows = config.max_num_seqs * (1 if layout.pipeline_parallel == 1 else 2)  # ended requests leave later
        self.sampler = Sampler(self.shape.vocab_size, self.device, max_rows=max_rows)
        self.logit_dtype = torch.float32 if self.sampler.fused is None else self.dtype
        records = config.telemetry == "full"
        self.entropy_probe = EntropyProbe(self.shape.vocab_size, self.device) if records else None
        self.experts = ExpertTokens(self.model if records else None)
        self.guides = Guides(folder, self.shape.vocab_size)
        self.stages = None if ranks is None else Stages(ranks, self.model, self.dtype, self.device, records=records)
        self.stream = make_stream(self.device, self.overlap or layout.pipeline_parallel > 1)
        self.drafting: Drafting | None = None  # while the memory is measured
        self.host_slots: HostSlots | None = None  # of KV tiers
        self.rows = StableRows(config.max_num_seqs)
        size = (config.max_num_seqs, -(-self.max_model_len // self.block_size), self.block_size)
        self.tables = make_tables(*size, self.device, gathers=not self.attention.indexes_tables)
        self.graphs: DecodeGraphs | None = None
        has_graphs = wants_graphs(config, self.device, self.attention, self.operations)
        self.graph_sizes = graph_sizes(config.max_num_seqs) if has_graphs else []
        self.most_tokens = largest_step_tokens(config, self.device.type)
        self.window = window_of(config, self.shape, self.most_tokens)
        self.attention.reserve(config.max_num_seqs, self.most_tokens)
        self.target = Target(
            self.model, folder, self.device, self.dtype, self.kv_dtype, self.max_model_len, self.most_tokens
        )
        packed = self.model.held_as is not None  # by this project's kernels or by torch's
        alone = packed and not on_cuda and ranks is None  # ranks that measure apart would exchange unlike
        self.threads = step_threads(self.model, self.shape) if alone else None
        if config.has_loras:
            self.adapters = make_adapters(config, self.model, self.dtype, self.device)
        if on_cuda and ranks is None:
            with startup.phase("memory_probe"):
                self.memory = measured_memory(self, config)
        if ranks is not None:
            num_blocks = ranks.agree(self.memory.num_kv_blocks)
            per_token = self.memory.kv_bytes // self.memory.kv_tokens  # with a drafter's
            self.memory = with_pool(self.memory, num_blocks, self.block_size, per_token)
        self.num_blocks = self.memory.num_kv_blocks
        self.kv_cache = self.allocate(self.num_blocks)
        if config.speculation != "none" and layout.rank == 0:  # of a group, too: drafts are part of the plan
            proposer = make_proposer(config, self.target, self.kv_cache, self.attention, self.operations)
            follows_steps = PROPOSING[config.speculation].follows_steps
            self.drafting = Drafting(proposer, self.guides, self.shape.vocab_size, follows_steps=follows_steps)
        with startup.phase("capture"):
            self.graphs = self.capture(config, self.graph_sizes)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        for preemption in plan.preempted:
            self.sampler.forget(preemption.request.id)
            self.rows.release(preemption.request.id)
            if self.drafting is not None:
                self.drafting.proposer.forget(preemption.request.id)
        batch = self._prepare(plan)
        if self.ranks is not None:
            self.ranks.send(rank_step(batch, plan.parts.get("lora", ()), follows=plan.follows))
        prepared_ns = time.monotonic_ns()
        if self.stages is not None:
            self.stages.launched(batch)
        task = self._submit(self._execute, batch)
        return LaunchedStep(plan, prepared_ns, time.monotonic_ns(), (batch, task))

    def begin(self, request: Request) -> Preparation | None:
        # A tokenizer may know more ids than its model, and one of them on the device would end the process.
        sentence = unfit(request.sampling, request.token_ids, self.shape.vocab_size)
        if sentence is not None:
            return refused(sentence)
        grammar = self.guides.begin(request)
        if request.adapter is None:
            return grammar
        return both(self.read_adapter(request.id, request.adapter), grammar)

    def read_adapter(self, request_id: str, adapter: AdapterReference) -> Preparation | None:
        if self.adapters is None:
            return refused(f"this engine serves no adapters, and {adapter.name} is one; set lora_adapters")
        return self.adapters.begin(request_id, adapter)

    def forget(self, request_id: str) -> None:
        if self.adapters is not None:
            self.adapters.forget(request_id)
        if self.stages is None or not self.stages.postpones(request_id):
            self.sampler.forget(request_id)
        if self.drafting is not None:
            self.drafting.proposer.forget(request_id)
        self.guides.forget(request_id)
        self.rows.release(request_id)

    def close(self) -> None:
        if self.ranks is not None:
            self.ranks.close()

    def collect(self, step: LaunchedStep) -> StepOutcome:
        batch, task = step.state
        results, wait_began_ns = batch.results, time.monotonic_ns()
        self.stream.wait(task)
        if self.stages is not None and not self.stages.layout.is_last_stage:
            task = self._concluded(task, batch)
        if batch.transfers is not None:
            self.host_slots.finish_stores()
        ids = results.ids.tolist()
        sampled = sampled_tokens(batch, ids)
        ends = batch.constrained or min(ids, default=0) < 0
        finished = finishes(sampled, batch.constrained, self.guides) if ends else {}
        logprobs = sampled_logprobs(batch, results.scores, sampled) if batch.scored else {}
        drafts, cost = {}, {}
        if (drafting := self.drafting) is not None:
            self.stream.call(lambda: drafts.update(drafting.propose(step.plan, batch, sampled, finished)))
            cost = drafting.cost
        found = {"logprobs": logprobs, "finishes": finished, "drafts": drafts, **cost}
        if self.stages is not None:
            found["ranks"], found["hidden"] = self.stages.reports(task)
            for request_id in self.stages.collected():
                self.sampler.forget(request_id)
        return outcome(batch, task, sampled, wait_began_ns, time.monotonic_ns(), **found)

    @property
    def stores_beside_steps(self) -> bool:
        return self.device.type == "cpu"  # a GPU would gather the blocks behind the step that is under way

    def transfer(self, transfers: Transfers) -> tuple[int, int]:
        if self.ranks is not None:
            self.ranks.send(Move(transfers.stores, transfers.loads))
        return self.host_slots.move(transfers)

    def _prepare(self, plan: StepPlan) -> Batch:
        items = sorted(plan.scheduled, key=batch_order)
        sampling = [item.request for item in items if item.samples]
        positions = [item.past_tokens + item.new_tokens for item in items if item.samples]
        has_drafts, drafts = any(item.drafts for item in items), None
        if has_drafts or any(keeps_rows(each.sampling) and not self.sampler.knows(each.id) for each in sampling):
            self.stream.drain()  # rows are written now, and the tables may grow
        drafted = [item.drafts for item in items if item.samples]
        if has_drafts:
            sampling, positions, drafts = rows_with_drafts(sampling, positions, drafted)
        batch = Batch(
            pack(items, self.rows, self.block_size, plan.copies),
            [item.new_tokens for item in items],
            [item.past_tokens + item.new_tokens for item in items],
            self.sampler.prepare(sampling, positions, drafts),
            [request.id for request in sampling],
            items,
            has_drafts,
            prompts=prompt_rows(items),
            transfers=plan.parts.get("tiers"),
        )
        if sampling and self.entropy_probe is not None:
            batch.entropy_sample = self.entropy_probe.sample_row(sampling, self.sampler.edits, drafts)
        if batch.sampling.edits is not None:
            owners = [item.request for item in items if item.samples] if has_drafts else sampling
            if (filling := self.guides.fill(owners, drafted)) is not None:
                batch.constrained, batch.masks = filling
        for row, request in enumerate(sampling):
            if (top := request.sampling.logprobs) is not None:
                batch.scored.append(row)
                batch.scored_tops.append(top)
        if self.adapters is not None:
            batch.tiles = self.adapters.tiles(items)
            batch.adapter_loads = [
                (slot, self.adapters.packed(adapter)) for slot, adapter in plan.parts.get("lora", ())
            ]
        batch.graph_size = None if self.graphs is None else self.graphs.size_for(batch)
        return batch

    def _submit(self, work: Callable[[Task, Batch], None], batch: Batch) -> Task:
        if self.stages is None:
            return self.stream.submit(lambda task: work(task, batch))
        return self.stream.submit(self.stages.counted(work, batch))

    @torch.inference_mode()
    def _execute(self, task: Task, batch: Batch) -> None:
        """The device's work of a step, in its order."""
        if self.threads is not None:
            self.threads.take(len(batch.step.known_ids), sum(batch.context_lens))
        results, ids = batch.results, None
        for slot, packed in batch.adapter_loads:
            self.adapters.backend.install(slot, packed)
        if batch.graph_size is None:
            step = self.inputs(task, batch)
            results.rows = step.sample_rows
            if (forward := self._forward(batch, step)) is None:  # the next stage of a group has it: see `_conclude`
                self.stages.expect_rows(batch)
                return
            logits, overflowed = forward
            streams = [] if self.drafting is None or self.drafting.taps is None else self.drafting.taps.streams
        else:
            decoded = self.replayed(task, batch)
            logits, overflowed = decoded.logits, decoded.overflowed
            results.hidden, streams = decoded.hidden, decoded.streams
            ids = decoded.ids if batch.sampling.graph_can_sample else None
        results.layer_outputs = list(streams)
        self._finish(task, batch, logits, overflowed, ids)

    def _conclude(self, task: Task, batch: Batch) -> None:
        """The rest of a step whose layers other stages have computed, too."""
        self._finish(task, batch, *self.logits(batch, *self.stages.returned_rows(batch)))

    def _concluded(self, begun: Task, batch: Batch) -> Task:
        self.ranks.conclude()
        task = self._submit(self._conclude, batch)
        self.stream.wait(task)
        return self.stages.concluded(begun, task)

    def _forward(self, batch: Batch, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Of the sampling rows what `logits` gives; None where another stage has the last layers."""
        if self.adapters is not None:
            self.adapters.backend.begin(batch.tiles)
        self.experts.begin(batch.results.expert_tokens)
        hidden = self.hidden(step, batch.query_lens, batch.context_lens)
        if self.adapters is not None:
            self.adapters.backend.begin(())  # whatever else the model computes has other tokens
        if self.drafting is not None and self.drafting.proposer.reads_hidden:
            batch.results.hidden = hidden
        return None if hidden is None else self.logits(batch, *self.chosen(batch, step, hidden))

    def replayed(self, task: Task, batch: Batch) -> Decoded:
        """A step of decodes by its graph."""
        if self.stages is not None:
            self.stages.share_sampled_ids(batch.step, self.tables)
        batch.results.rows, blocks_to_zero, copies = self.tables.update(batch.step)
        self._move_and_zero_blocks(task, batch, copies, blocks_to_zero)
        if self.adapters is not None:
            self.adapters.backend.set_decodes(decode_slots(batch.tiles, len(batch.query_lens)), batch.graph_size)
        return self.graphs.replay(batch.graph_size, batch)

    def inputs(self, task: Task, batch: Batch) -> StepTensors:
        """The step's tensors, once the tables and the blocks are as it needs them."""
        if self.stages is not None:
            self.stages.share_sampled_ids(batch.step, self.tables)
        step = self.tables.inputs(batch.step, -(-max(batch.context_lens) // self.block_size))
        self._move_and_zero_blocks(task, batch, step.copies, step.blocks_to_zero)
        return step

    def chosen(self, batch: Batch, step: StepTensors, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `hidden` [num_tokens, hidden_size] the rows behind which tokens are sampled, and scored."""
        scored = hidden[:0] if batch.prompts is None else hidden[sent(batch.prompts.rows, self.device)]
        return hidden if batch.all_sampled else hidden.index_select(0, step.sample_tokens), scored

    def logits(
        self, batch: Batch, sampled: torch.Tensor, scored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [num_sampling, vocab_size] of the sampling rows, and which are no numbers, unless the sampler finds
        that; scores prompt tokens."""
        if batch.prompts is not None:
            batch.results.prompt_scores = prompt_scores(batch.prompts, scored, self.model.logits, self.shape.vocab_size)
        return self.model.logits(sampled, dtype=self.logit_dtype), self.overflowed(sampled)

    def overflowed(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return hidden.isnan().any(dim=-1) if self.sampler.fused is None else None

    def hidden(self, step: StepTensors, query_lens: list[int], context_lens: list[int]) -> torch.Tensor | None:
        """[num_tokens, hidden_size] behind all layers; None where another stage of the group has the last of them."""
        inputs = AttentionInputs(
            query_lens, context_lens, query_lens.count(1), step.slots, step.block_tables, self.block_size,
            step.query_start, step.contexts, step.table_rows,
        )  # fmt: skip
        self.attention.begin(inputs)
        if self.stages is not None:
            return self.stages.hidden(step, self.operations, self.attention, self.kv_cache)
        taps = None if self.drafting is None else self.drafting.taps
        return self.model(step.ids, step.positions, step.slots, self.operations, self.attention, self.kv_cache, taps)

    def _finish(
        self, task: Task, batch: Batch, logits: torch.Tensor, overflowed: torch.Tensor | None,
        ids: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """From the logits of the sampling rows to what the host reads. Without `ids` of a graph they are sampled now,
        and the tables remember them."""
        task.forward_done()
        if ids is None:
            rows, masks = batch.results.rows, None
            if batch.masks is not None:
                masks = to_device(self.guides.masks(batch.masks), self.device)
            if overflowed is None:
                ids = self.sampler.sample(logits, batch.sampling, masks, (rows, self.tables.last_ids))
            else:
                ids = self.sampler.sample(logits, batch.sampling, masks).masked_fill(overflowed, OVERFLOWED)
                self.tables.remember(rows, ids)
        keep_scores(batch, logits, ids)

    def _move_and_zero_blocks(self, task: Task, batch: Batch, copies: torch.Tensor, blocks_to_zero: torch.Tensor):
        task.load_ns, task.store_ns = move_blocks(self.kv_cache, self.host_slots, batch.transfers, copies)
        if blocks_to_zero.numel() and self.attention.reads_behind_contexts:
            # The slots behind a sequence are masked, but still multiplied: a NaN of the block's last owner would make
            # this one's numbers NaN, too.
            clear_blocks(self.kv_cache, blocks_to_zero.long())

    def allocate(self, num_blocks: int) -> KVCache:
        layout, layers = self.model.kv_layout, len(self.model.layers)
        return allocated(layout, layers, num_blocks, self.block_size, self.kv_dtype, self.device)

    @torch.inference_mode()
    def capture(self, config: EngineConfig, sizes: list[int]) -> DecodeGraphs | None:
        # All graphs leave their logits in one place: beside each other they would take gigabytes.
        room = torch.empty((max(sizes, default=0), self.shape.vocab_size), dtype=self.logit_dtype, device=self.device)
        return captured(config, sizes, self.tables.static, partial(decode, self, room=room), self.device)
