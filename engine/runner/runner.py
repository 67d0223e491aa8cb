"""StepPlan → tensors → model → sampled ids: the only place that knows both requests and tensors."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from engine.compute.attention import AttentionInputs, KVCache
from engine.compute.backends import make_attention, make_operations
from engine.compute.kv_cache import clear_blocks, copy_blocks
from engine.compute.kv_fp8 import KV_FP8
from engine.compute.linear import Linear
from engine.config import EngineConfig
from engine.request.plan import ScheduledTokens, StepOutcome, StepPlan
from engine.request.request import Request
from engine.runner.batch import Batch, Drawn, PromptRows, prompt_rows, told_draws, told_prompts
from engine.runner.capture import captured, graph_bytes, wants_graphs
from engine.runner.endings import OVERFLOWED, endings
from engine.runner.graphs import Decoded, DecodeGraphs, graph_sizes
from engine.runner.rows import StableRows, pack
from engine.runner.sizing import (
    allocate,
    blocks_that_fit,
    costliest_plans,
    free_cuda_bytes,
    free_host_bytes,
)
from engine.runner.stream import Task, make_stream
from engine.runner.tables import DeviceTables, HostTables, StepTensors
from engine.runner.threads import KV_SHARE, TRIED_BYTES, StepThreads, measured_threads
from engine.sampling import keeps_rows, unfit
from engine.token.grammar.guides import Guides, Preparation, refused
from engine.token.models.decoder import Decoder
from engine.token.models.registry import load_model
from engine.token.sampling.entropy import EntropyProbe, entropy_and_mass, recorded_entropy
from engine.token.sampling.logprobs import Scores, pieces, score
from engine.token.sampling.sampler import Sampler
from metrics.errors import ModelError


@dataclass(slots=True)
class Handle:
    """A step under way."""

    batch: Batch
    drawn: Drawn
    prepared_ns: int
    launched_ns: int
    task: Task
    graph_size: int | None


class ModelRunner:
    """Owns the device: the weights, the KV cache and the tables.

    On CUDA `launch` queues the forward pass and the sampler. A CPU computes in a thread of its own if steps overlap;
    else in `collect`, and its time is the stage `wait`, because that is when the host waits for the computation.
    """

    def __init__(self, config: EngineConfig, folder: Path):
        cuda = torch.cuda.is_available()
        if config.device == "cuda" and not cuda:
            raise ModelError("device cuda was asked for, but torch finds none; use --device cpu")
        self.device = torch.device("cuda" if cuda and config.device != "cpu" else "cpu")
        on_cuda = self.device.type == "cuda"
        self.overlap = on_cuda if config.overlap == "auto" else config.overlap == "on"
        wanted = config.dtype if config.dtype != "auto" else ("bfloat16" if on_cuda else "float32")
        self.dtype = getattr(torch, wanted)
        self.kv_dtype = KV_FP8 if config.kv_cache_dtype == "fp8" else self.dtype
        self.block_size = config.block_size
        self.attention = make_attention(config.attention_backend, self.device, self.dtype, self.kv_dtype)
        self.operations = make_operations(config.fused_operations, self.device, self.dtype, self.kv_dtype)
        self.model: Decoder = load_model(
            folder, self.dtype, self.device, config.max_model_len,
            dummy=config.load_format == "dummy", weights=config.weights,
        )  # fmt: skip
        self.max_model_len = config.max_model_len or self.model.config.max_model_len
        self.shape = self.model.shape(self.kv_dtype)
        self.sampler = Sampler(self.shape.vocab_size, self.device, max_rows=config.max_num_seqs)
        told = config.telemetry == "full"
        self.entropy_probe = EntropyProbe(self.shape.vocab_size, self.device) if told else None
        self.guides = Guides(folder, self.shape.vocab_size)
        self.stream = make_stream(self.device, self.overlap)
        self.rows = StableRows(config.max_num_seqs)
        size = (config.max_num_seqs, -(-self.max_model_len // self.block_size), self.block_size)
        self.tables = DeviceTables(*size, self.device) if on_cuda else HostTables(*size)
        self.graphs: DecodeGraphs | None = None
        has_graphs = wants_graphs(config, self.device, self.attention, self.operations)
        self.graph_sizes = graph_sizes(config.max_num_seqs) if has_graphs else []
        self.attention.reserve(config.max_num_seqs, config.max_num_batched_tokens)
        packed = self.model.held_as is not None  # on a CPU, whatever computes it there
        self.threads = self._step_threads(torch.get_num_threads()) if packed else None
        self.num_blocks = config.num_kv_blocks or blocks_that_fit(
            config, self.max_model_len, self.shape, self._free_bytes(config)
        )
        self.kv_cache = self._allocate(self.num_blocks)
        self.graphs = self._capture(config, self.graph_sizes)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        for preemption in plan.preempted:
            self.sampler.forget(preemption.request.id)
            self.rows.release(preemption.request.id)
        batch = self._prepare(plan)
        graph_size = None if self.graphs is None else self.graphs.size_for(batch)
        drawn, prepared_ns = Drawn(), time.monotonic_ns()
        task = self.stream.submit(lambda task: self._execute(task, batch, drawn, graph_size))
        return Handle(batch, drawn, prepared_ns, time.monotonic_ns(), task, graph_size)

    def begin(self, request: Request) -> Preparation | None:
        # A tokenizer may know more ids than its model, and one of them on the device would end the process.
        sentence = unfit(request.sampling, request.token_ids, self.shape.vocab_size)
        return self.guides.begin(request) if sentence is None else refused(sentence)

    def forget(self, request_id: str) -> None:
        self.sampler.forget(request_id)
        self.guides.forget(request_id)
        self.rows.release(request_id)

    def collect(self, handle: Handle) -> StepOutcome:
        batch, drawn, task = handle.batch, handle.drawn, handle.task
        began_ns = time.monotonic_ns()
        self.stream.wait(task)
        ids = drawn.ids.tolist()
        sampled = dict(zip(batch.request_ids, ids, strict=True))
        ended = {}
        if batch.constrained or min(ids, default=0) < 0:
            ended = endings(sampled, batch.constrained, self.guides)
        sampled_ns = time.monotonic_ns()
        replayed = handle.graph_size is not None
        entropy, kept_mass = recorded_entropy(drawn.entropy)
        return StepOutcome(
            sampled,
            waited_ns=min(max(began_ns, task.forward_ns), sampled_ns),
            sampled_ns=sampled_ns,
            device_begin_ns=task.begin_ns,
            device_end_ns=task.end_ns,
            sampling_ns=task.end_ns - task.forward_ns,
            padding_tokens=handle.graph_size - len(batch.query_lens) if replayed else 0,
            graph=f"decode-{handle.graph_size}" if replayed else "eager",
            logit_rows=batch.logit_rows,
            entropy_millinats=entropy,
            kept_mass_ppm=kept_mass,
            logprobs=told_draws(batch, drawn.scores) if batch.told else {},
            prompt_logprobs=told_prompts(batch.prompts, drawn.prompt_scores) if batch.prompts else {},
            ended=ended,
        )

    def _prepare(self, plan: StepPlan) -> Batch:
        # Single tokens first, and neighbours of like context: they share a padded gather.
        items = sorted(plan.scheduled, key=lambda item: (item.new_tokens > 1, item.past_tokens))
        drawing = [item.request for item in items if item.samples]
        if any(keeps_rows(request.sampling) and not self.sampler.knows(request.id) for request in drawing):
            self.stream.drain()  # its rows are written now, and the tables may grow
        sampling = self.sampler.prepare(drawing, [item.past_tokens + item.new_tokens for item in items if item.samples])
        batch = Batch(
            pack(items, self.rows, self.block_size, plan.copies),
            [item.new_tokens for item in items],
            [item.past_tokens + item.new_tokens for item in items],
            sampling,
            [request.id for request in drawing],
            prompts=self._scored(items),
        )
        if drawing and self.entropy_probe is not None:
            batch.entropy_sample = self.entropy_probe.sample_row(drawing, self.sampler.edits)
        if sampling.edits is not None and (filling := self.guides.fill(drawing)) is not None:
            batch.constrained, batch.masks = filling
        for row, request in enumerate(drawing):
            if (top := request.sampling.logprobs) is not None:
                batch.told.append(row)
                batch.told_tops.append(top)
        return batch

    @staticmethod
    def _scored(items: list[ScheduledTokens]) -> PromptRows | None:
        scored, offset = [], 0
        for item in items:
            request = item.request
            if request.sampling.prompt_logprobs is not None and item.past_tokens < request.prompt_tokens - 1:
                scored.append((item, offset))
            offset += item.new_tokens
        return prompt_rows(scored) if scored else None

    @torch.inference_mode()
    def _execute(self, task: Task, batch: Batch, drawn: Drawn, graph_size: int | None) -> None:
        """The device's work of a step, in its order."""
        if self.threads is not None:
            self.threads.take(len(batch.step.known_ids), sum(batch.context_lens))
        if graph_size is None:
            width = -(-max(batch.context_lens) // self.block_size)
            step = self.tables.inputs(batch.step, width)
            rows = step.sample_rows
            self._renew_blocks(step.begun, step.copies)
            logits, overflowed = self._forward(batch, drawn, step)
            task.forward_done()
            ids = None
        else:
            rows, begun, copies = self.tables.update(batch.step)
            self._renew_blocks(begun, copies)
            decoded = self.graphs.replay(graph_size, batch)
            logits, overflowed, ids = decoded.logits, decoded.overflowed, decoded.ids
            task.forward_done()
        if ids is None or not self._graph_draws(batch):
            ids = self._sample(batch, drawn, logits).masked_fill(overflowed, OVERFLOWED)
            self.tables.remember(rows, ids)
        if batch.told:
            drawn.scores = self._told(batch, logits, ids)
        if batch.entropy_sample is not None:
            drawn.entropy = self._to_host(entropy_and_mass(logits, batch.entropy_sample))
        drawn.ids = self._to_host(ids)

    def _forward(self, batch: Batch, drawn: Drawn, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [num_sampling, vocab_size] of the rows that draw, and which of them are no numbers; scores prompt
        tokens on the way."""
        hidden = self._hidden(step, batch.query_lens, batch.context_lens)
        if (scored := batch.prompts) is not None:
            rows, ids = self._sent(scored.rows), self._sent(scored.token_ids)
            drawn.prompt_scores = [
                self._scores_to_host(score(self.model.logits(hidden[rows[part]]), ids[part], max(scored.tops[part])))
                for part in pieces(len(scored.tops), self.shape.vocab_size)
            ]
        drawn_from = hidden if batch.all_draw else hidden[step.sample_tokens]
        return self.model.logits(drawn_from), drawn_from.isnan().any(dim=-1)

    def _hidden(self, step: StepTensors, query_lens: list[int], context_lens: list[int]) -> torch.Tensor:
        inputs = AttentionInputs(
            query_lens, context_lens, query_lens.count(1), step.slots, step.block_tables, self.block_size,
            step.query_start, step.contexts,
        )  # fmt: skip
        self.attention.begin(inputs)
        return self.model(step.ids, step.positions, step.slots, self.operations, self.attention, self.kv_cache)

    def _decode(self, step: StepTensors, draw_rows: torch.Tensor, room: torch.Tensor | None = None) -> Decoded:
        """What a graph holds: a step of single tokens whose lengths only the device knows, and their draws. `room`
        [size at least, vocab_size] float32 takes the logits."""
        size = len(step.ids)
        hidden = self._hidden(step, [1] * size, [1] * size)
        logits = self.model.logits(hidden, None if room is None else room[:size])
        overflowed = hidden.isnan().any(dim=-1)
        if self.sampler.fused is None:
            ids = logits.argmax(dim=-1)
        else:
            ids = self.sampler.fused.draw_rows(logits, draw_rows, step.contexts.long())
        ids = ids.masked_fill(overflowed, OVERFLOWED)
        self.tables.remember(step.sample_rows, ids)
        return Decoded(logits, overflowed, ids)

    @staticmethod
    def _graph_draws(batch: Batch) -> bool:
        """Whether what a graph drew is what the step's requests draw: those with edits need more."""
        sampling = batch.sampling
        fused = sampling.fused is not None or (sampling.direct is None and sampling.sorted is None)
        return fused and sampling.edits is None

    def _sample(self, batch: Batch, drawn: Drawn, logits: torch.Tensor) -> torch.Tensor:
        masks = None
        if batch.masks is not None:
            masks = self.guides.masks(batch.masks)
            if self.device.type == "cuda":  # from pinned memory, or the host would wait for the forward pass
                masks = masks.pin_memory().to(self.device, non_blocking=True)
        return self.sampler.sample(logits, batch.sampling, masks)

    def _told(self, batch: Batch, logits: torch.Tensor, ids: torch.Tensor) -> Scores:
        if len(batch.told) < len(ids):
            rows = self._sent(batch.told)
            logits, ids = logits[rows], ids[rows]
        return self._scores_to_host(score(logits, ids, max(batch.told_tops)))

    def _renew_blocks(self, begun: torch.Tensor, copies: torch.Tensor) -> None:
        if copies.numel():
            copy_blocks(self.kv_cache, copies[0], copies[1], self.block_size)
        if begun.numel():
            # The slots behind a sequence are masked, but still multiplied: what overflowed for the last owner of the
            # block would make this one's numbers NaN, too.
            clear_blocks(self.kv_cache, begun, self.block_size)

    def _allocate(self, num_blocks: int) -> KVCache:
        layers = len(self.model.layers)
        return allocate(self.model.kv_layout, layers, num_blocks, self.block_size, self.kv_dtype, self.device)

    def _step_threads(self, most: int) -> StepThreads:
        """By the matrices of the first layers: as many as no cache holds, and no more, for the start waits for it."""
        linears, tried = [], 0
        for module in self.model.modules():
            if isinstance(module, Linear) and tried < TRIED_BYTES:
                linears.append(module)
                tried += module.packed_bytes
        kv_tokens = int(KV_SHARE * self.shape.weight_bytes / self.shape.kv_bytes_per_token)
        return measured_threads(linears, [linear.in_features for linear in linears], kv_tokens, most)

    def _free_bytes(self, config: EngineConfig) -> int:
        """What KV blocks may take of the device's memory, before `memory_fraction`."""
        if self.device.type == "cpu":
            return free_host_bytes(config.max_num_seqs, self.shape.vocab_size)
        plans = costliest_plans(config, self.max_model_len)
        probes = [item.request.id for item in plans[-1].scheduled]
        self.kv_cache = self._allocate(-(-self.max_model_len // self.block_size))

        def forget() -> None:
            for probe in probes:
                self.forget(probe)
            self.sampler = Sampler(self.shape.vocab_size, self.device, max_rows=config.max_num_seqs)

        free = free_cuda_bytes(self.device, lambda plan: self.collect(self.launch(plan)), plans, forget)
        free -= graph_bytes(self.device, self.graph_sizes, lambda sizes: self._capture(config, sizes))
        given_back = self.kv_cache.nbytes
        del self.kv_cache
        return free + given_back

    @torch.inference_mode()
    def _capture(self, config: EngineConfig, sizes: list[int]) -> DecodeGraphs | None:
        # All graphs leave their logits in one place: beside each other they would take gigabytes.
        room = torch.empty((max(sizes, default=0), self.shape.vocab_size), dtype=torch.float32, device=self.device)
        return captured(config, sizes, self.tables.static, partial(self._decode, room=room), self.device)

    def _sent(self, values: list[int]) -> torch.Tensor:
        """[n] int64 on the device, without waiting for it."""
        if self.device.type == "cpu":
            return torch.tensor(values)
        return torch.tensor(values, pin_memory=True).to(self.device, non_blocking=True)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the host when the task is done."""
        if self.device.type == "cpu":
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

    def _scores_to_host(self, scores: Scores) -> Scores:
        columns = (scores.token_ids, scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
        return Scores(*map(self._to_host, columns))
