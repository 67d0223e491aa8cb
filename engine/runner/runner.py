"""StepPlan → tensors → model → sampled ids: the only place that knows both requests and tensors."""

import time
from functools import partial
from pathlib import Path

import torch

from engine.adapter import AdapterReference
from engine.compute.attention.backend import AttentionInputs
from engine.compute.backends import make_attention, make_operations
from engine.compute.buffers import to_device, to_host
from engine.compute.kv_cache import KVCache, allocate, clear_blocks
from engine.compute.lora.backend import decode_slots
from engine.config import EngineConfig, largest_step_tokens
from engine.memory.tiers.tiers import Transfers
from engine.request.plan import LaunchedStep, Preparation, StepOutcome, StepPlan
from engine.request.request import Request
from engine.runner.adapters import Adapters, both, make_adapters
from engine.runner.batch import (
    OVERFLOWED,
    Batch,
    batch_order,
    finishes,
    prompt_logprobs,
    prompt_rows,
    rows_with_drafts,
    sampled_logprobs,
    sampled_tokens,
)
from engine.runner.build import chosen_device, chosen_dtypes, trial_plans, work_and_free_bytes
from engine.runner.drafting import Drafting
from engine.runner.graphs import Decoded, DecodeGraphs, captured, graph_bytes, graph_sizes, wants_graphs
from engine.runner.kv_transfer import HostSlots, move_blocks
from engine.runner.memory_plan import MeasuredBytes, measured_plan, planned, window_of
from engine.runner.rows import StableRows, pack
from engine.runner.stream import Task, make_stream, step_threads
from engine.runner.tables import DeviceTables, HostTables, StepTensors
from engine.runner.weight_reference import reference_predictions
from engine.sampling import keeps_rows, unfit
from engine.settings.speculation import PROPOSING
from engine.token.grammar.guides import Guides, refused
from engine.token.models.registry import load_model
from engine.token.sampling.entropy import EntropyProbe, entropy_and_mass, recorded_entropy
from engine.token.sampling.logprobs import chunks, score
from engine.token.sampling.sampler import Sampler
from engine.token.speculation.drafters import Target
from engine.token.speculation.proposers import make_proposer
from metrics.compute.startup import StartupClock
from metrics.errors import ModelError
from metrics.memory.plan import MemoryPlan


class ModelRunner:
    """Owns the device: the weights, the KV cache and the tables.

    On CUDA `launch` queues the forward pass and the sampler. A CPU computes in a thread of its own if steps overlap;
    else in `collect`, and its time is the stage `wait`, because that is when the host waits for the computation.
    """

    def __init__(self, config: EngineConfig, folder: Path, startup: StartupClock | None = None):
        startup = startup or StartupClock()
        startup.enter("kernels")
        self.config, self.device = config, chosen_device(config)
        on_cuda = self.device.type == "cuda"
        self.overlap = on_cuda if config.overlap == "auto" else config.overlap == "on"
        self.dtype, self.kv_dtype = chosen_dtypes(config, self.device)
        self.block_size = config.block_size
        self.attention = make_attention(config.attention_backend, self.device, self.dtype, self.kv_dtype)
        self.operations = make_operations(config.fused_operations, self.device, self.dtype, self.kv_dtype)
        startup.enter("memory_plan")
        self.memory = planned(config, folder)
        self.adapters: Adapters | None = None
        startup.enter("reference")
        reference = reference_predictions(config, folder, self.dtype, self.device)
        startup.enter("conversion")
        self.model = load_model(
            folder, self.dtype, self.device, config.max_model_len, load_format=config.load_format,
            weights=config.weights, window=config.window_and_sinks, startup=startup,
        )  # fmt: skip
        startup.enter("setup")
        self.weight_error = None if reference is None else reference.error_of(self.model)
        del reference
        self.max_model_len = config.max_model_len or self.model.config.max_model_len
        self.shape = self.model.shape(self.kv_dtype)
        self.sampler = Sampler(self.shape.vocab_size, self.device, max_rows=config.max_num_seqs)
        self.logit_dtype = torch.float32 if self.sampler.fused is None else self.dtype
        records = config.telemetry == "full"
        self.entropy_probe = EntropyProbe(self.shape.vocab_size, self.device) if records else None
        self.guides = Guides(folder, self.shape.vocab_size)
        self.stream = make_stream(self.device, self.overlap)
        self.drafting: Drafting | None = None  # while the memory is measured
        self.host_slots: HostSlots | None = None  # of KV tiers
        self.rows = StableRows(config.max_num_seqs)
        size = (config.max_num_seqs, -(-self.max_model_len // self.block_size), self.block_size)
        self.tables = (
            DeviceTables(*size, self.device, gathers=not self.attention.indexes_tables)
            if on_cuda
            else HostTables(*size)
        )
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
        self.threads = step_threads(self.model, self.shape) if packed and not on_cuda else None
        if config.has_loras:
            self.adapters = make_adapters(config, self.model, self.dtype, self.device)
        if on_cuda:
            with startup.phase("memory_probe"):
                self.memory = self._measured(config)
        self.num_blocks = self.memory.num_kv_blocks
        self.kv_cache = self._allocate(self.num_blocks)
        self.drafting = self._drafting(config)
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
        prepared_ns = time.monotonic_ns()
        task = self.stream.submit(lambda task: self._execute(task, batch))
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
        self.sampler.forget(request_id)
        if self.drafting is not None:
            self.drafting.proposer.forget(request_id)
        self.guides.forget(request_id)
        self.rows.release(request_id)

    def collect(self, step: LaunchedStep) -> StepOutcome:
        batch, task = step.state
        results, wait_began_ns = batch.results, time.monotonic_ns()
        self.stream.wait(task)
        if batch.transfers is not None:
            self.host_slots.finish_stores()
        ids = results.ids.tolist()
        sampled = sampled_tokens(batch, ids)
        finished = {}
        if batch.constrained or min(ids, default=0) < 0:
            finished = finishes(sampled, batch.constrained, self.guides)
        logprobs = sampled_logprobs(batch, results.scores, sampled) if batch.scored else {}
        drafts, cost = {}, {}
        if (drafting := self.drafting) is not None:
            self.stream.call(lambda: drafts.update(drafting.propose(step.plan, batch, sampled, finished)))
            cost = {"draft_ns": drafting.end_ns - drafting.begin_ns, "draft_flops": drafting.flops,
                    "draft_bytes": drafting.moved_bytes}  # fmt: skip
        sampled_ns = time.monotonic_ns()
        size = batch.graph_size
        entropy, mass = recorded_entropy(results.entropy)
        return StepOutcome(
            sampled,
            waited_ns=min(max(wait_began_ns, task.forward_ns), sampled_ns),
            sampled_ns=sampled_ns,
            device_begin_ns=task.begin_ns,
            device_end_ns=task.end_ns,
            sampling_ns=task.end_ns - task.forward_ns,
            padding_tokens=0 if size is None else size - len(batch.query_lens),
            graph="eager" if size is None else f"decode-{size}",
            load_ns=task.load_ns,
            store_ns=task.store_ns,
            logit_rows=batch.logit_rows,
            entropy_millinats=entropy,
            nucleus_mass_ppm=mass,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs(batch.prompts, results.prompt_scores) if batch.prompts else {},
            finishes=finished,
            drafts=drafts,
            **cost,
        )

    def transfer(self, transfers: Transfers) -> tuple[int, int]:
        store_ns, load_ns = self.host_slots.store(transfers.stores), self.host_slots.load(transfers.loads)
        self.host_slots.finish_stores()
        return load_ns, store_ns

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
            transfers=plan.transfers,
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
            batch.adapter_loads = [(slot, self.adapters.packed(adapter)) for slot, adapter in plan.adapter_loads]
        batch.graph_size = None if self.graphs is None else self.graphs.size_for(batch)
        return batch

    @torch.inference_mode()
    def _execute(self, task: Task, batch: Batch) -> None:
        """The device's work of a step, in its order."""
        if self.threads is not None:
            self.threads.take(len(batch.step.known_ids), sum(batch.context_lens))
        results, ids = batch.results, None
        for slot, packed in batch.adapter_loads:
            self.adapters.backend.install(slot, packed)
        if batch.graph_size is None:
            width = -(-max(batch.context_lens) // self.block_size)
            step = self.tables.inputs(batch.step, width)
            rows = step.sample_rows
            self._move_and_zero_blocks(task, batch, step.copies, step.blocks_to_zero)
            logits, overflowed = self._forward(batch, step)
            streams = [] if self.drafting is None or self.drafting.taps is None else self.drafting.taps.streams
        else:
            rows, blocks_to_zero, copies = self.tables.update(batch.step)
            self._move_and_zero_blocks(task, batch, copies, blocks_to_zero)
            if self.adapters is not None:
                self.adapters.backend.set_decodes(decode_slots(batch.tiles, len(batch.query_lens)), batch.graph_size)
            decoded = self.graphs.replay(batch.graph_size, batch)
            logits, overflowed = decoded.logits, decoded.overflowed
            results.hidden, streams = decoded.hidden, decoded.streams
            ids = decoded.ids if batch.sampling.graph_can_sample else None
        results.layer_outputs = list(streams)
        task.forward_done()
        if ids is None:
            ids = self._sample(batch, logits, overflowed, rows)
        if batch.scored:
            rows = slice(None) if len(batch.scored) == len(ids) else self._sent(batch.scored)
            results.scores = score(logits[rows].float(), ids[rows], max(batch.scored_tops)).to_host()
        if batch.entropy_sample is not None:
            results.entropy = to_host(entropy_and_mass(logits, batch.entropy_sample))
        results.ids = to_host(ids)

    def _forward(self, batch: Batch, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [num_sampling, vocab_size] of the sampling rows, and which are no numbers, unless the sampler finds
        that; scores prompt tokens."""
        if self.adapters is not None:
            self.adapters.backend.begin(batch.tiles)
        hidden = self._hidden(step, batch.query_lens, batch.context_lens)
        if self.drafting is not None and self.drafting.proposer.reads_hidden:
            batch.results.hidden = hidden
        if (prompts := batch.prompts) is not None:
            rows, ids = self._sent(prompts.rows), self._sent(prompts.token_ids)
            batch.results.prompt_scores = [
                score(self.model.logits(hidden[rows[part]]), ids[part], max(prompts.tops[part])).to_host()
                for part in chunks(len(prompts.tops), self.shape.vocab_size)
            ]
        sampled_from = hidden if batch.all_sampled else hidden.index_select(0, step.sample_tokens)
        return self.model.logits(sampled_from, dtype=self.logit_dtype), self._overflowed(sampled_from)

    def _overflowed(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return hidden.isnan().any(dim=-1) if self.sampler.fused is None else None

    def _hidden(self, step: StepTensors, query_lens: list[int], context_lens: list[int]) -> torch.Tensor:
        inputs = AttentionInputs(
            query_lens, context_lens, query_lens.count(1), step.slots, step.block_tables, self.block_size,
            step.query_start, step.contexts, step.table_rows,
        )  # fmt: skip
        self.attention.begin(inputs)
        taps = None if self.drafting is None else self.drafting.taps
        hidden = self.model(step.ids, step.positions, step.slots, self.operations, self.attention, self.kv_cache, taps)
        if self.adapters is not None:
            self.adapters.backend.begin(())  # whatever else the model computes has other tokens
        return hidden

    def _decode(self, step: StepTensors, draw_rows: torch.Tensor, room: torch.Tensor | None = None) -> Decoded:
        """The work of a graph: a step of single tokens, whose lengths only the device knows, and their sampling. The
        logits go to `room` [size at least, vocab_size]."""
        size = len(step.ids)
        if self.adapters is not None:
            self.adapters.backend.begin_decodes(size)
        hidden = self._hidden(step, [1] * size, [1] * size)
        given = {}
        if self.drafting is not None:
            taps, reads_hidden = self.drafting.taps, self.drafting.proposer.reads_hidden
            given = {"hidden": hidden if reads_hidden else None, "streams": [] if taps is None else list(taps.streams)}
        logits = self.model.logits(hidden, None if room is None else room[:size], self.logit_dtype)
        if (fused := self.sampler.fused) is not None:
            remember = (step.sample_rows, self.tables.last_ids)
            return Decoded(logits, None, fused.draw_rows(logits, draw_rows, step.contexts, remember), **given)
        overflowed = self._overflowed(hidden)
        ids = logits.argmax(dim=-1).masked_fill(overflowed, OVERFLOWED)
        self.tables.remember(step.sample_rows, ids)
        return Decoded(logits, overflowed, ids, **given)

    def _sample(
        self, batch: Batch, logits: torch.Tensor, overflowed: torch.Tensor | None, rows: torch.Tensor
    ) -> torch.Tensor:
        """Ids of the sampling rows; `rows` of the tables remember them."""
        masks = None if batch.masks is None else to_device(self.guides.masks(batch.masks), self.device)
        if overflowed is None:
            return self.sampler.sample(logits, batch.sampling, masks, (rows, self.tables.last_ids))
        ids = self.sampler.sample(logits, batch.sampling, masks).masked_fill(overflowed, OVERFLOWED)
        self.tables.remember(rows, ids)
        return ids

    def _move_and_zero_blocks(
        self, task: Task, batch: Batch, copies: torch.Tensor, blocks_to_zero: torch.Tensor
    ) -> None:
        task.load_ns, task.store_ns = move_blocks(self.kv_cache, self.host_slots, batch.transfers, copies)
        if blocks_to_zero.numel() and self.attention.reads_behind_contexts:
            # The slots behind a sequence are masked, but still multiplied: a NaN of the block's last owner would make
            # this one's numbers NaN, too.
            clear_blocks(self.kv_cache, blocks_to_zero.long())

    def _allocate(self, num_blocks: int) -> KVCache:
        """Raises ModelError if the memory does not hold it."""
        layout, layers = self.model.kv_layout, len(self.model.layers)
        try:
            return allocate(layout, layers, num_blocks, self.block_size, self.kv_dtype, self.device)
        except RuntimeError as error:
            raise ModelError(
                f"a KV cache of {num_blocks} blocks does not fit; lower num_kv_blocks or max_model_len ({error})"
            ) from None

    def _measured(self, config: EngineConfig) -> MemoryPlan:
        """The plan of a GPU, after its largest steps were computed and its graphs captured. They compile and load what
        the first requests would wait for. Raises ModelError if they do not fit."""
        self.kv_cache = self._allocate(-(-self.max_model_len // self.block_size))

        def run(plan: StepPlan) -> None:
            self.collect(self.launch(plan))
            for item in plan.scheduled:
                self.forget(item.request.id)

        def forget() -> None:
            self.sampler = Sampler(self.shape.vocab_size, self.device, max_rows=config.max_num_seqs)

        if self.sampler.fused is not None:
            logits = torch.zeros((1, self.shape.vocab_size), dtype=self.logit_dtype, device=self.device)
            self.sampler.fused.warm_up(logits, self.tables.last_ids)
        work, free = work_and_free_bytes(self.device, run, trial_plans(config, self.target), forget)
        graphs = graph_bytes(self.device, self.graph_sizes, lambda sizes: self.capture(config, sizes))
        free += self.kv_cache.nbytes
        del self.kv_cache
        return measured_plan(config, self.memory, self.target, MeasuredBytes(work, graphs, free))

    @torch.inference_mode()
    def capture(self, config: EngineConfig, sizes: list[int]) -> DecodeGraphs | None:
        # All graphs leave their logits in one place: beside each other they would take gigabytes.
        room = torch.empty((max(sizes, default=0), self.shape.vocab_size), dtype=self.logit_dtype, device=self.device)
        return captured(config, sizes, self.tables.static, partial(self._decode, room=room), self.device)

    def _drafting(self, config: EngineConfig) -> Drafting | None:
        """None without speculation. Raises ModelError where the model cannot have the proposer."""
        if config.speculation == "none":
            return None
        proposer = make_proposer(config, self.target, self.kv_cache, self.attention, self.operations)
        follows_steps = PROPOSING[config.speculation].follows_steps
        return Drafting(proposer, self.guides, self.shape.vocab_size, follows_steps=follows_steps)

    def _sent(self, values: list[int]) -> torch.Tensor:
        """[n] int64 on the device."""
        return to_device(torch.tensor(values), self.device)
