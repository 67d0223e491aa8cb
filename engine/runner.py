"""StepPlan → tensors → model → sampled ids: the only place that knows both requests and tensors."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from engine.compute.attention import AttentionInputs, KVCache, attention_inputs
from engine.compute.attention_torch import GATHERED_TOKENS
from engine.compute.backends import BackendError, make_attention, make_operations
from engine.compute.kv_cache import allocate, clear_blocks, copy_blocks
from engine.compute.kv_fp8 import KV_FP8
from engine.config import EngineConfig
from engine.request.plan import ScheduledTokens, StepOutcome, StepPlan
from engine.request.request import Request
from engine.sampling import SamplingParams, TokenLogprobs, unfit
from engine.token.checkpoint import ModelError
from engine.token.guides import Guides, Preparation, refused
from engine.token.logprobs import Scores, pieces, score
from engine.token.masks import MaskFill
from engine.token.models.decoder import Decoder
from engine.token.models.registry import load_model
from engine.token.sampler import Sampler, SamplingInputs

OVERFLOWED = -2  # drawn by a row that the model computed no numbers for
OVERFLOW = (
    "the model computed values that are no numbers for this request: its weights or its dtype's range are at fault; "
    "with dtype float16, serve it in bfloat16 or float32"
)
NOTHING_LEFT = (
    "the sampling controls of this request leave no token to draw; look at allowed_token_ids, bad_words, min_tokens "
    "and the grammar together"
)


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Positions whose successor is a prompt token that is told its log-probability."""

    rows: torch.Tensor  # [num_scored] int64: of the step's tokens
    token_ids: torch.Tensor  # [num_scored] int64: the successors
    tops: list[int]  # how many of the most probable tokens each wants
    spans: list[tuple[str, int]]  # request id and number of rows, in order


@dataclass(slots=True)
class Batch:
    """One step as tensors."""

    ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    attention: AttentionInputs
    sample_rows: torch.Tensor  # [num_sampling] int64: the last token of each request that draws
    sampling: SamplingInputs
    request_ids: list[str]  # of the rows that draw
    told: list[int] = field(default_factory=list)  # which of them are told the log-probability of what they draw
    told_tops: list[int] = field(default_factory=list)  # ... and of how many other tokens
    begun_blocks: list[int] = field(default_factory=list)  # whose first slots this step fills, and not the last
    prompts: PromptRows | None = None  # prompt tokens that are told theirs
    constrained: list[Request] = field(default_factory=list)  # that draw and have a grammar
    masks: MaskFill | None = None  # theirs, being filled


@dataclass(slots=True)
class Handle:
    """A step under way."""

    batch: Batch
    prepared_ns: int
    launched_ns: int
    overflowed: torch.Tensor | None = None  # [num_sampling] bool
    ids: torch.Tensor | None = None  # CUDA: where the drawn ids will be
    drawn_scores: Scores | None = None
    prompt_scores: list[Scores] = field(default_factory=list)
    events: tuple | None = None  # CUDA: begin, forward done, sampled


_COSTLY = SamplingParams(max_tokens=1, top_p=0.5, frequency_penalty=1.0, logit_bias={0: 1.0})


@dataclass(frozen=True, slots=True)
class _Probe:
    """A request that draws in the costliest way, to find out what that takes."""

    id: str
    sampling: SamplingParams = _COSTLY
    token_ids: tuple[int, ...] = (0,)
    prompt_tokens: int = 1


class ModelRunner:
    """Owns the device: the weights and the KV cache.

    On CUDA `launch` queues the forward pass and the sampler. A CPU has nothing to queue to: the work is done in
    `collect`, and its time is the stage `wait`, because that is when the host waits for the computation.
    """

    def __init__(self, config: EngineConfig, folder: Path):
        cuda = torch.cuda.is_available()
        if config.device == "cuda" and not cuda:
            raise ModelError("device cuda was asked for, but torch finds none; use --device cpu")
        self.device = torch.device("cuda" if cuda and config.device != "cpu" else "cpu")
        wanted = config.dtype if config.dtype != "auto" else ("bfloat16" if self.device.type == "cuda" else "float32")
        self.dtype = getattr(torch, wanted)
        self.kv_dtype = KV_FP8 if config.kv_cache_dtype == "fp8" else self.dtype
        self.block_size = config.block_size
        try:
            self.attention = make_attention(config.attention_backend, self.device, self.dtype, self.kv_dtype)
        except BackendError as error:
            raise ModelError(str(error)) from None
        self.operations = make_operations(config.fused_operations, self.device, self.dtype, self.kv_dtype)
        self.model: Decoder = load_model(
            folder, self.dtype, self.device, config.max_model_len,
            dummy=config.load_format == "dummy", weights=config.weights,
        )  # fmt: skip
        self.max_model_len = config.max_model_len or self.model.config.max_model_len
        self.shape = self.model.shape(self.kv_dtype)
        self.sampler = Sampler(self.shape.vocab_size, self.device)
        self.guides = Guides(folder, self.shape.vocab_size)
        self.num_blocks = config.num_kv_blocks or self._blocks_that_fit(config)
        self.kv_cache = self._allocate(self.num_blocks)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Handle:
        if plan.copies:
            self._copy_blocks(plan.copies)
        for request in plan.preempted:
            self.sampler.forget(request.id)
        batch = self._prepare(plan.scheduled)
        handle = Handle(batch, prepared_ns=time.monotonic_ns(), launched_ns=0)
        if self.device.type == "cuda":
            handle.events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))
            handle.events[0].record()
            logits = self._forward(handle)
            handle.events[1].record()
            self._sample(handle, logits)
            handle.events[2].record()
        handle.launched_ns = time.monotonic_ns()
        return handle

    def begin(self, request: Request) -> Preparation | None:
        # A tokenizer may know more ids than its model, and one of them on the device would end the process.
        sentence = unfit(request.sampling, request.token_ids, self.shape.vocab_size)
        return self.guides.begin(request) if sentence is None else refused(sentence)

    def forget(self, request_id: str) -> None:
        self.sampler.forget(request_id)
        self.guides.forget(request_id)

    @torch.inference_mode()
    def collect(self, handle: Handle) -> StepOutcome:
        batch = handle.batch
        if handle.events is None:
            begin_ns = time.monotonic_ns()
            logits = self._forward(handle)
            waited_ns = time.monotonic_ns()
            self._sample(handle, logits)
            ids = handle.ids.tolist()
            sampled_ns = time.monotonic_ns()
            sampling_ns = sampled_ns - waited_ns
        else:
            begin, forward, end = handle.events
            ids = handle.ids.tolist()  # waits for the device
            sampled_ns = time.monotonic_ns()
            begin_ns = max(handle.prepared_ns, sampled_ns - round(begin.elapsed_time(end) * 1e6))
            sampling_ns = min(round(forward.elapsed_time(end) * 1e6), sampled_ns - begin_ns)
            waited_ns = max(handle.launched_ns, sampled_ns - sampling_ns)
        sampled = dict(zip(batch.request_ids, ids, strict=True))
        ended = self._ended(batch, sampled) if batch.sampling.edits is not None or min(ids, default=0) < 0 else {}
        return StepOutcome(
            sampled,
            waited_ns,
            sampled_ns,
            begin_ns,
            sampled_ns,
            sampling_ns,
            logprobs=_told_draws(handle) if batch.told else {},
            prompt_logprobs=_told_prompts(handle) if batch.prompts else {},
            ended=ended,
        )

    def _forward(self, handle: Handle) -> torch.Tensor:
        """Logits [num_sampling, vocab_size] of the rows that draw; scores prompt tokens on the way."""
        batch = handle.batch
        if batch.begun_blocks:
            # The slots behind a sequence are masked, but still multiplied: what overflowed for the last owner of the
            # block would make this one's numbers NaN, too.
            clear_blocks(self.kv_cache, self._tensor(batch.begun_blocks), self.block_size)
        self.attention.begin(batch.attention)
        hidden = self.model(
            batch.ids, batch.positions, batch.attention.slots, self.operations, self.attention, self.kv_cache
        )
        if (scored := batch.prompts) is not None:
            handle.prompt_scores = [
                score(self.model.logits(hidden[scored.rows[part]]), scored.token_ids[part], max(scored.tops[part]))
                for part in pieces(len(scored.tops), self.shape.vocab_size)
            ]
        drawn_from = hidden[batch.sample_rows]
        handle.overflowed = drawn_from.isnan().any(dim=-1)
        return self.model.logits(drawn_from)

    def _sample(self, handle: Handle, logits: torch.Tensor) -> None:
        batch = handle.batch
        masks = None
        if batch.masks is not None:
            masks = self.guides.masks(batch.masks)
            if self.device.type == "cuda":  # from pinned memory, or the host would wait for the forward pass
                masks = masks.pin_memory().to(self.device, non_blocking=True)
        handle.ids = ids = self.sampler.draw(logits, batch.sampling, masks)
        if batch.told:
            if len(batch.told) < len(ids):
                logits, ids = logits[batch.told], ids[batch.told]
            handle.drawn_scores = score(logits, ids, max(batch.told_tops))
        handle.ids = handle.ids.masked_fill(handle.overflowed, OVERFLOWED)

    def _ended(self, batch: Batch, sampled: dict[str, int]) -> dict[str, tuple[str, str | None]]:
        """Requests that this step ends, and how; takes out of `sampled` what is no token of theirs."""
        ended = {}
        for request_id in [request_id for request_id, token in sampled.items() if token < 0]:
            if sampled.pop(request_id) == OVERFLOWED:
                ended[request_id] = ("error", OVERFLOW)
                continue
            # Where only the end is left, and the request has no token for it, or none that it may draw.
            ended[request_id] = ("stop", None) if self.guides.may_end(request_id) else ("error", NOTHING_LEFT)
        for request in batch.constrained:
            if ended.get(request.id) == ("error", OVERFLOW):
                continue
            end = self.guides.advance(request, sampled.get(request.id))
            if end is not None:
                ended[request.id] = end
                if end[0] == "error":
                    sampled.pop(request.id, None)
        return ended

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        sources, targets = self._tensor(copies).T
        copy_blocks(self.kv_cache, sources, targets, self.block_size)

    def _prepare(self, scheduled: list[ScheduledTokens]) -> Batch:
        # Single tokens first, and neighbours of like context: they share a padded gather.
        rows = sorted(scheduled, key=lambda item: (item.new_tokens > 1, item.past_tokens))
        ids, positions, slots, sample_rows, drawing, scored, begun = [], [], [], [], [], [], []
        size = self.block_size
        for item in rows:
            request, begin = item.request, item.past_tokens
            end = begin + item.new_tokens
            if request.sampling.prompt_logprobs is not None and begin < request.prompt_tokens - 1:
                scored.append((item, len(ids)))
            ids += request.token_ids[begin:end]
            positions += range(begin, end)
            slots += [request.blocks[p // size] * size + p % size for p in range(begin, end)]
            if end % size and end - end % size >= begin:
                begun.append(request.blocks[end // size])
            if item.samples:
                sample_rows.append(len(ids) - 1)
                drawing.append(request)
        contexts = [item.past_tokens + item.new_tokens for item in rows]
        width = max(-(-context // size) for context in contexts)
        tables = [
            item.request.blocks[:width] + item.request.blocks[:1] * (width - len(item.request.blocks)) for item in rows
        ]
        attention = attention_inputs(
            [item.new_tokens for item in rows], contexts, self._tensor(slots), self._tensor(tables, torch.int32), size
        )
        batch = Batch(
            self._tensor(ids),
            self._tensor(positions),
            attention,
            self._tensor(sample_rows),
            self.sampler.prepare(drawing, [request.num_computed_tokens for request in drawing]),
            [request.id for request in drawing],
            begun_blocks=begun,
            prompts=self._prompt_rows(scored) if scored else None,
        )
        if batch.sampling.edits is not None and (filling := self.guides.fill(drawing)) is not None:
            batch.constrained, batch.masks = filling
        for row, request in enumerate(drawing):
            if (top := request.sampling.logprobs) is not None:
                batch.told.append(row)
                batch.told_tops.append(top)
        return batch

    def _prompt_rows(self, scored: list[tuple[ScheduledTokens, int]]) -> PromptRows | None:
        """Of items and the places of their first tokens in the step: the positions that were not scored before."""
        rows, token_ids, tops, spans = [], [], [], []
        for item, offset in scored:
            request, known = item.request, len(item.request.prompt_logprobs)
            assert known >= item.past_tokens, "a prompt that is scored skips no position"
            begin, end = known, min(item.past_tokens + item.new_tokens, request.prompt_tokens - 1)
            if begin < end:  # else a preempted request computes again what was scored
                rows += range(offset + begin - item.past_tokens, offset + end - item.past_tokens)
                token_ids += request.token_ids[begin + 1 : end + 1]
                tops += [request.sampling.prompt_logprobs] * (end - begin)
                spans.append((request.id, end - begin))
        return PromptRows(self._tensor(rows), self._tensor(token_ids), tops, spans) if rows else None

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _allocate(self, num_blocks: int) -> KVCache:
        slots = num_blocks * self.block_size
        try:
            return allocate(self.model.kv_layout, len(self.model.layers), slots, self.kv_dtype, self.device)
        except RuntimeError as error:
            raise ModelError(
                f"a KV cache of {num_blocks} blocks does not fit; lower num_kv_blocks or max_model_len ({error})"
            ) from None

    def _blocks_that_fit(self, config: EngineConfig) -> int:
        """As many blocks as all sequences can use, within `memory_fraction` of what is free after weights and work."""
        useful = config.max_num_seqs * -(-self.max_model_len // self.block_size)
        free = psutil.virtual_memory().available if self.device.type == "cpu" else self._free_cuda_bytes(config)
        fitting = int(free * config.memory_fraction) // (self.shape.kv_bytes_per_token * self.block_size)
        least = -(-self.max_model_len // self.block_size)
        if fitting < least:
            raise ModelError(
                f"memory has room for {fitting} KV blocks, but one request of max_model_len {self.max_model_len} needs "
                f"{least}; lower max_model_len or raise memory_fraction (now {config.memory_fraction})"
            )
        return min(useful, fitting)

    @torch.inference_mode()
    def _free_cuda_bytes(self, config: EngineConfig) -> int:
        """What is free on the device beyond the peaks of the two largest steps: a chunk that ends at max_model_len, and
        as many decodes as one gather holds. Both use a cache of one sequence, which is given back."""
        length, size = self.max_model_len, self.block_size
        blocks = list(range(-(-length // size)))
        chunk = min(config.max_num_batched_tokens, length)
        decodes = max(1, min(config.max_num_seqs, GATHERED_TOKENS // length))
        self.kv_cache = self._allocate(len(blocks))
        before, peaks = torch.cuda.memory_allocated(self.device), []
        for sequences, new in ((1, chunk), (decodes, 1)):
            torch.cuda.reset_peak_memory_stats(self.device)
            positions = list(range(length - new, length)) * sequences
            attention = attention_inputs(
                [new] * sequences, [length] * sequences, self._tensor(positions),
                self._tensor([blocks] * sequences, torch.int32), size,
            )  # fmt: skip
            drawing = min(config.max_num_seqs, len(positions))
            sampling = self.sampler.prepare([_Probe(str(row)) for row in range(drawing)])
            rows = self._tensor(list(range(drawing)))
            ids = self._tensor([0] * len(positions))
            batch = Batch(ids, self._tensor(positions), attention, rows, sampling, [])
            self.sampler.draw(self._forward(Handle(batch, 0, 0)), sampling)
            peaks.append(torch.cuda.max_memory_allocated(self.device) - before)
        del self.kv_cache, batch, sampling
        self.sampler = Sampler(self.shape.vocab_size, self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0] - max(peaks)


def _told_draws(handle: Handle) -> dict[str, TokenLogprobs]:
    batch = handle.batch
    owners = [batch.request_ids[row] for row in batch.told]
    return dict(zip(owners, handle.drawn_scores.told(batch.told_tops), strict=True))


def _told_prompts(handle: Handle) -> dict[str, list[TokenLogprobs]]:
    prompts, told, begin = handle.batch.prompts, [], 0
    for scores in handle.prompt_scores:
        told += scores.told(prompts.tops[len(told) : len(told) + len(scores.token_ids)])
    owned = {}
    for request_id, count in prompts.spans:
        owned[request_id] = told[begin : begin + count]
        begin += count
    return owned
