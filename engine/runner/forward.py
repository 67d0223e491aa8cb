"""The forward pass of a step: kernel by kernel, or by the graph that was captured for it. Chosen once, at the start."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from sojourn.engine.compute.attention.backend import AttentionBackend, AttentionInputs
from sojourn.engine.compute.kv_cache import KVCache, clear_blocks, copy_blocks
from sojourn.engine.compute.logits import OVERFLOWED
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.config import EngineConfig
from sojourn.engine.runner.batch import Batch
from sojourn.engine.runner.expert_tokens import ExpertTokens
from sojourn.engine.runner.graphs import Decoded, DecodeGraphs, captured, graph_sizes
from sojourn.engine.runner.outcome import prompt_scores, sent
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.runner.stream import Task
from sojourn.engine.runner.tables import StepTensors, Tables
from sojourn.engine.runner.technique import ComputingTechnique
from sojourn.engine.token.models.taps import Taps
from sojourn.engine.token.sampling.sampler import Sampler


class Computed(NamedTuple):
    """What a forward pass gives of the rows that sample."""

    logits: torch.Tensor  # [num_sampling, vocab_size]
    overflowed: torch.Tensor | None  # [num_sampling] bool: of no numbers; None where the sampler finds that
    ids: torch.Tensor | None = None  # [num_sampling]: a graph has sampled, and the tables know it


class Forward(Protocol):
    """All calls but `size_for` are in the order of the device's work."""

    sizes: Sequence[int]  # of the graphs that it wants

    def size_for(self, batch: Batch) -> int | None:
        """The size of the graph that replays the step; None: kernel by kernel."""

    def __call__(self, task: Task, batch: Batch) -> Computed | None:
        """None where another process has the last layers."""

    def capture(self) -> None:
        """Captures the graphs. Raises ModelError where they must be, and cannot."""

    def drop_graphs(self) -> None: ...


class EagerForward:
    """Launches the kernels one by one. Owns what a step computes with."""

    sizes: Sequence[int] = ()

    def __init__(
        self, placed: PlacedModel, attention: AttentionBackend, operations: Operations, tables: Tables,
        sampler: Sampler, techniques: Sequence[ComputingTechnique], *, block_size: int, counts_experts: bool,
    ):  # fmt: skip
        self.model, self.device = placed.model, placed.device
        self.attention, self.operations, self.tables, self.sampler = attention, operations, tables, sampler
        self.techniques, self.block_size = techniques, block_size
        self.logit_dtype = torch.float32 if sampler.fused is None else placed.dtype
        self.experts = ExpertTokens(placed.model if counts_experts else None)
        self.kv_cache: KVCache | None = None  # until it is allocated
        self.taps: Taps | None = None
        self.layers = self.all_layers  # of a stage, where several processes share them

    def size_for(self, batch: Batch) -> None:
        return None

    def __call__(self, task: Task, batch: Batch) -> Computed | None:
        step = self.inputs(task, batch)
        batch.results.rows = step.sample_rows
        return self.forward(batch, step)

    def capture(self) -> None:
        """There are no graphs."""

    drop_graphs = capture

    def inputs(self, task: Task, batch: Batch) -> StepTensors:
        """The step's tensors, once the tables and the blocks are as it needs them."""
        step = self.tables.inputs(batch.step, -(-max(batch.context_lens) // self.block_size))
        self.move_blocks(task, batch, step.copies, step.blocks_to_zero)
        return step

    def move_blocks(self, task: Task, batch: Batch, copies: torch.Tensor, blocks_to_zero: torch.Tensor) -> None:
        for technique in self.techniques:
            technique.before_copies(task, batch)
        if copies.numel():
            copy_blocks(self.kv_cache, *copies.long())
        for technique in self.techniques:
            technique.behind_copies(task, batch)
        if blocks_to_zero.numel() and self.attention.reads_behind_contexts:
            # The slots behind a sequence are masked, but still multiplied: a NaN of the block's last owner would make
            # this one's numbers NaN, too.
            clear_blocks(self.kv_cache, blocks_to_zero.long())

    def forward(self, batch: Batch, step: StepTensors) -> Computed | None:
        self.experts.begin(batch.results.expert_tokens)
        hidden = self.compute(batch, step)
        return None if hidden is None else self.logits(batch, *self.chosen(batch, step, hidden))

    def compute(self, batch: Batch, step: StepTensors) -> torch.Tensor | None:
        """[num_tokens, hidden_size] behind all layers; None where another process has the last of them."""
        for technique in self.techniques:
            technique.before_forward(batch)
        hidden = self.hidden(step, batch.query_lens, batch.context_lens)
        for technique in self.techniques:
            technique.behind_forward(batch.results, hidden)
        return hidden

    def hidden(self, step: StepTensors, query_lens: list[int], context_lens: list[int]) -> torch.Tensor | None:
        inputs = AttentionInputs(
            query_lens, context_lens, query_lens.count(1), step.slots, step.block_tables, self.block_size,
            step.query_start, step.contexts, step.table_rows,
        )  # fmt: skip
        self.attention.begin(inputs)
        return self.layers(step)

    def all_layers(self, step: StepTensors) -> torch.Tensor:
        return self.model(
            step.ids, step.positions, step.slots, self.operations, self.attention, self.kv_cache, self.taps
        )

    def chosen(self, batch: Batch, step: StepTensors, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `hidden` [num_tokens, hidden_size] the rows behind which tokens are sampled, and scored."""
        scored = hidden[:0] if batch.prompts is None else hidden[sent(batch.prompts.rows, self.device)]
        return hidden if batch.all_sampled else hidden.index_select(0, step.sample_tokens), scored

    def logits(self, batch: Batch, sampled: torch.Tensor, scored: torch.Tensor) -> Computed:
        """Of the sampling rows; scores prompt tokens."""
        if batch.prompts is not None:
            vocab_size = self.sampler.vocab_size
            batch.results.prompt_scores = prompt_scores(batch.prompts, scored, self.model.logits, vocab_size)
        return Computed(self.model.logits(sampled, dtype=self.logit_dtype), self.overflowed(sampled))

    def overflowed(self, hidden: torch.Tensor) -> torch.Tensor | None:
        return hidden.isnan().any(dim=-1) if self.sampler.fused is None else None


class GraphForward:
    """Replays decode steps that fit a graph; all others are launched kernel by kernel."""

    def __init__(self, eager: EagerForward, config: EngineConfig, *, draws: bool):
        """`draws`: this process samples, and so do its graphs."""
        self._eager, self._config, self._draws = eager, config, draws
        self.sizes = graph_sizes(config.max_num_seqs)
        self.graphs: DecodeGraphs | None = None

    def size_for(self, batch: Batch) -> int | None:
        return None if self.graphs is None else self.graphs.size_for(batch)

    def __call__(self, task: Task, batch: Batch) -> Computed | None:
        if batch.graph_size is None:
            return self._eager(task, batch)
        decoded = self.replay(task, batch)
        results = batch.results
        results.hidden, results.layer_outputs = decoded.hidden, decoded.layer_outputs
        ids = decoded.ids if batch.sampling.graph_can_sample else None
        return Computed(decoded.logits, decoded.overflowed, ids)

    def replay(self, task: Task, batch: Batch) -> Decoded:
        eager = self._eager
        batch.results.rows, blocks_to_zero, copies = eager.tables.update(batch.step)
        eager.move_blocks(task, batch, copies, blocks_to_zero)
        for technique in eager.techniques:
            technique.before_replay(batch)
        return self.graphs.replay(batch.graph_size, batch)

    def capture(self) -> None:
        self.graphs = self.captured(self.sizes)
        if self.graphs is None:
            self.sizes = []

    def drop_graphs(self) -> None:
        self.graphs = None

    @torch.inference_mode()
    def captured(self, sizes: list[int]) -> DecodeGraphs | None:
        eager = self._eager
        # All graphs leave their logits in one place: beside each other they would take gigabytes.
        shape = (max(sizes, default=0), eager.sampler.vocab_size)
        room = torch.empty(shape, dtype=eager.logit_dtype, device=eager.device)
        return captured(self._config, sizes, eager.tables.static, partial(self.decode, room=room), eager.device)

    def decode(self, step: StepTensors, draw_rows: torch.Tensor, room: torch.Tensor | None = None) -> Decoded:
        """The work of a graph: a step of single tokens, whose lengths only the device knows, and their sampling. The
        logits go to `room` [size at least, vocab_size]."""
        eager, size = self._eager, len(step.ids)
        for technique in eager.techniques:
            technique.before_capture(size)
        hidden = eager.hidden(step, [1] * size, [1] * size)
        logits = eager.model.logits(hidden, None if room is None else room[:size], eager.logit_dtype)
        decoded = Decoded(logits, None, step.sample_rows)
        for technique in eager.techniques:
            technique.behind_forward(decoded, hidden)
        if self._draws:
            self._draw(decoded, step, draw_rows, hidden)
        return decoded

    def _draw(self, decoded: Decoded, step: StepTensors, draw_rows: torch.Tensor, hidden: torch.Tensor) -> None:
        eager = self._eager
        if (fused := eager.sampler.fused) is not None:
            remember = (step.sample_rows, eager.tables.last_ids)
            decoded.ids = fused.draw_rows(decoded.logits, draw_rows, step.contexts, remember)
            return
        decoded.overflowed = eager.overflowed(hidden)
        decoded.ids = decoded.logits.argmax(dim=-1).masked_fill(decoded.overflowed, OVERFLOWED)
        eager.tables.remember(step.sample_rows, decoded.ids)
