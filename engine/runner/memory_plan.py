"""The plan of a core's memory: what a model will take, before it is loaded, and how many KV blocks it gets."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from msgspec.structs import replace

from sojourn.engine.compute.communication.layout import ONE_PROCESS, ParallelLayout
from sojourn.engine.compute.kv_cache import bytes_per_token
from sojourn.engine.config import EngineConfig, keeps_all_blocks, largest_chunk_tokens, largest_step_tokens
from sojourn.engine.memory.window import FreedWindow, freed_window
from sojourn.engine.process import free_memory_bytes
from sojourn.engine.runner.build import check_kv_format, chosen_device, chosen_dtypes
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.runner.technique import ComputingTechnique, Reserved
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.expansion import ROOM_BYTES
from sojourn.engine.token.models.registry import outlined_model
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.errors import ModelError
from sojourn.metrics.memory.plan import GIB, HOST_SHARE, MemoryPlan, shown_bytes

CUDA_SHARE = 0.85  # of the free memory of a GPU that KV takes by default: nobody else uses it
LARGEST_HOST_SHARE = 0.85  # of a host's memory, where a single request of max_model_len needs more than HOST_SHARE
TABLE_BYTES = 4 + 1 + 4  # of one token in a request's rows: counts, whether it is in the prompt, bias
LOGIT_COPIES = 4  # float32 rows of logits that live together: raw, edited, sorted, probabilities


def planned(
    config: EngineConfig,
    folder: Path,
    techniques: Sequence[ComputingTechnique] = (),
    layout: ParallelLayout = ONE_PROCESS,
) -> MemoryPlan:
    """The plan of a model that is not loaded, from its config.json and the headers of its weights. Takes no memory.
    `techniques` are those of the settings, and `layout` names a rank of their parallel group.

    Raises ModelError where the model is damaged, or where the device has too little memory. On CUDA the work space is
    an estimate here, and CUDA graphs are left out; a start measures both.
    """
    device = chosen_device(config)
    dtype, kv_dtype = chosen_dtypes(config, device)
    outline = outlined_model(
        folder, dtype, device, config.max_model_len, dummy=config.load_format == "dummy", weights=config.weights,
        window=config.window_and_sinks, layout=layout,
    )  # fmt: skip
    model, max_model_len = outline.model, outline.max_model_len
    check_kv_format(model.kv_layout, kv_dtype, device)
    on_cpu, free = device.type == "cpu", free_bytes(device)
    if on_cpu:
        free //= layout.size  # ranks share the host's memory
    tokens = largest_step_tokens(config, device.type)
    placed = PlacedModel(model, folder, device, dtype, kv_dtype, max_model_len, tokens)
    extra = reserved(techniques, placed)
    needed = MemoryPlan(
        free_bytes=free,
        process_bytes=psutil.Process().memory_info().rss if on_cpu else 0,
        weight_bytes=outline.weight_bytes + extra.weight_bytes,
        work_bytes=work_bytes(config, placed) + model.rope_bytes(max_model_len) + extra.work_bytes,
        table_bytes=table_bytes(config.max_num_seqs * config.most_rows, model.config.vocab_size),
        adapter_bytes=extra.adapter_bytes,
        kv_bytes=0,
        num_kv_blocks=0,
        kv_tokens=0,
        tier_bytes=extra.tier_bytes,
    )
    check_fits(needed)
    kv_bytes_per_token = bytes_per_token(model.kv_layout, len(model.layers), kv_dtype) + extra.kv_bytes_per_token
    left = free - (needed.total_bytes - needed.process_bytes)
    window = window_of(config, model.shape(kv_dtype), tokens)
    num_blocks = pool_blocks(config, max_model_len, kv_bytes_per_token, left, device, window)
    return with_pool(needed, num_blocks, config.block_size, kv_bytes_per_token)


def reserved(techniques: Sequence[ComputingTechnique], placed: PlacedModel) -> Reserved:
    """What all techniques take together. Raises ModelError where one of them does not fit the model."""
    each = [Reserved(), *(technique.reserve(placed) for technique in techniques)]
    return Reserved(*map(sum, zip(*each, strict=True)))


class MeasuredBytes(NamedTuple):
    """Of a GPU with a loaded model."""

    work_bytes: int  # the highest peak of the largest steps
    graph_bytes: int
    free_bytes: int  # without any KV cache, work space and graphs


def measured_plan(
    config: EngineConfig,
    plan: MemoryPlan,
    placed: PlacedModel,
    measured: MeasuredBytes,
    techniques: Sequence[ComputingTechnique],
) -> MemoryPlan:
    """The plan of a loaded model, whose pool takes what was measured as free. Drafters are loaded behind the pool.

    Raises ModelError where the pool does not fit.
    """
    extra, shape = reserved(techniques, placed), placed.model.shape(placed.kv_dtype)
    taken = replace(
        plan,
        weight_bytes=placed.model.weight_bytes + extra.weight_bytes,
        work_bytes=measured.work_bytes + extra.work_bytes,
        table_bytes=0,
        graph_bytes=measured.graph_bytes,
        kv_bytes=0,
    )
    left = measured.free_bytes - taken.work_bytes - measured.graph_bytes - extra.weight_bytes
    per_token, window = shape.kv_bytes_per_token + extra.kv_bytes_per_token, window_of(config, shape, placed.max_tokens)
    num_blocks = pool_blocks(config, placed.max_model_len, per_token, left, placed.device, window)
    return with_pool(taken, num_blocks, config.block_size, per_token)


def window_of(config: EngineConfig, shape: ModelShape, most_tokens: int) -> FreedWindow | None:
    """The window behind which requests give their blocks back, with steps of `most_tokens`."""
    return freed_window(shape, largest_chunk_tokens(config, most_tokens), keeps_all=keeps_all_blocks(config))


def with_pool(plan: MemoryPlan, num_blocks: int, block_size: int, kv_bytes_per_token: int) -> MemoryPlan:
    """The plan with its KV cache. Raises ModelError where that is more than the memory."""
    kv_tokens = num_blocks * block_size
    whole = replace(plan, kv_bytes=kv_tokens * kv_bytes_per_token, num_kv_blocks=num_blocks, kv_tokens=kv_tokens)
    check_fits(whole)
    return whole


def check_fits(plan: MemoryPlan) -> None:
    """Raises ModelError where the plan needs more than is free. The process itself has its memory already."""
    if plan.total_bytes - plan.process_bytes > plan.free_bytes:
        remedy = "lower num_kv_blocks or kv_cache_gib" if plan.kv_bytes else "use a smaller model, or free memory"
        if plan.tier_bytes:
            remedy = "lower kv_host_gib, num_kv_blocks or kv_cache_gib"
        raise ModelError(f"the model does not fit ({plan.sentence()}); {remedy}")


def pool_blocks(
    config: EngineConfig,
    max_model_len: int,
    kv_bytes_per_token: int,
    free: int,
    device: torch.device,
    window: FreedWindow | None = None,
) -> int:
    """Blocks of the KV pool: as many as were asked for, or as all sequences can use within a share of `free` bytes.
    Behind a `window` a sequence gives blocks back.

    Raises ModelError if not even one sequence fits.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = kv_bytes_per_token * config.block_size
    if config.kv_cache_gib is not None:
        asked = int(config.kv_cache_gib * GIB // block_bytes)
        if not asked:
            raise ModelError(
                f"kv_cache_gib={config.kv_cache_gib} holds no block of {shown_bytes(block_bytes)}; raise it"
            )
        return asked
    least = -(-max_model_len // config.block_size)
    if window is not None:
        least = min(least, window.most_blocks(config.block_size))
    share = config.memory_fraction
    if share is None and device.type == "cpu":
        largest = int(free * LARGEST_HOST_SHARE) // block_bytes
        fitting = max(int(free * HOST_SHARE) // block_bytes, min(least, largest))
    else:
        fitting = int(free * (share or CUDA_SHARE)) // block_bytes
    if fitting < least:
        raise ModelError(
            f"memory has room for {max(0, fitting)} KV blocks, but one request of max_model_len {max_model_len} needs "
            f"{least}; lower max_model_len, or raise memory_fraction (now {share or 'by default'})"
        )
    return min(config.max_num_seqs * least, fitting)


def free_bytes(device: torch.device) -> int:
    return free_memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def table_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Tables of as many requests with penalties and biases as can run. A table grows by doubling, with its old rows
    beside the new ones."""
    rows = 4
    while rows < max_num_seqs:
        rows *= 2
    return rows * 3 // 2 * vocab_size * TABLE_BYTES


def work_bytes(config: EngineConfig, placed: PlacedModel) -> int:
    """Activations and logits of the largest step, estimated: what lies between two layers, and the widest layer."""
    model, tokens = placed.model, placed.max_tokens
    rows = min(config.max_num_seqs * config.most_rows, tokens)
    activations = tokens * (4 * model.config.hidden_size + 2 * model.widest_activation) * placed.activation_bytes
    positions = (config.max_model_len or model.config.max_model_len) + tokens
    return activations + expanded_bytes(model, positions) + LOGIT_COPIES * rows * model.config.vocab_size * 4


def expanded_bytes(model: Decoder, positions: int) -> int:
    """That the expanded latents of so many positions may take: the room, and once more what is copied into it."""
    if model.expansion is None:
        return 0
    most = model.expansion.most_context
    return 2 * ROOM_BYTES * min(positions, most) // most
