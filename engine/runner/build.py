"""What a runner is built of: the device, its number formats, and the memory that its largest steps leave free.

That is measured before anything is served: a guess could run out of memory later."""

from collections.abc import Callable

import torch

from sojourn.engine.compute.kv_cache import KVCache, KVLayout, allocate
from sojourn.engine.compute.kv_formats import KV_INT4, QUANTISED
from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import ScheduledTokens, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.runner.placed_model import PlacedModel
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.errors import ModelError

_COSTLY = SamplingParams(max_tokens=1, top_p=0.5, frequency_penalty=1.0, logit_bias={0: 1.0})


def chosen_device(config: EngineConfig) -> torch.device:
    """Raises ModelError for cuda where there is none."""
    cuda = torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise ModelError("device cuda was asked for, but torch finds none; use --device cpu")
    return torch.device("cuda" if cuda and config.device != "cpu" else "cpu")


def chosen_dtypes(config: EngineConfig, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """Of the weights and activations, and of the KV cache."""
    by_default = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, by_default if config.dtype == "auto" else config.dtype)
    return dtype, QUANTISED.get(config.kv_cache_dtype, dtype)


def allocated(placed: PlacedModel, num_blocks: int, block_size: int) -> KVCache:
    """A pool of KV blocks. Raises ModelError if the memory does not hold it."""
    layout, num_layers = placed.model.kv_layout, len(placed.model.layers)
    try:
        return allocate(layout, num_layers, num_blocks, block_size, placed.kv_dtype, placed.device)
    except RuntimeError as error:
        raise ModelError(
            f"a KV cache of {num_blocks} blocks does not fit; lower num_kv_blocks or max_model_len ({error})"
        ) from None


def check_kv_format(layout: KVLayout, kv_dtype: torch.dtype, device: torch.device) -> None:
    """Raises ModelError where the model's vectors have no such format on this device."""
    if kv_dtype != KV_INT4:
        return
    if layout.head_dim % 2:
        raise ModelError(f"kv_cache_dtype=int4 needs heads of an even size, and these have {layout.head_dim}; use int8")
    if layout.planes == 1 and device.type == "cuda":
        raise ModelError("kv_cache_dtype=int4 has no kernel for latent attention on CUDA; use int8 or fp8")


def trial_plans(config: EngineConfig, placed: PlacedModel) -> list[StepPlan]:
    """The steps that a GPU computes before its memory is shared out: the costliest, and a prompt of each size."""
    sizes, expansion = (config, placed.max_tokens, placed.max_model_len), placed.model.expansion
    plans = costliest_plans(*sizes, None if expansion is None else expansion.most_context)
    return plans + warm_up_plans(*sizes, expands=expansion is not None)


def costliest_plans(
    config: EngineConfig, most_tokens: int, max_model_len: int, most_expanded: int | None = None
) -> list[StepPlan]:
    """The two largest steps: a chunk of `most_tokens` that ends at max_model_len, and all sequences that sample
    there; and a chunk that ends at `most_expanded`, the longest context whose latents are expanded. All read the blocks
    of one sequence, and sample in the costliest way."""
    blocks = list(range(-(-max_model_len // config.block_size)))
    chunk = min(most_tokens, max_model_len)
    rows = min(config.most_rows, chunk)
    decodes = min(config.max_num_seqs, most_tokens // rows)
    plans = []
    sizes = [(1, chunk, max_model_len), (decodes, rows, max_model_len)]
    if most_expanded is not None and most_expanded < max_model_len:
        sizes.append((1, min(chunk, most_expanded), most_expanded))
    for sequences, new, context in sizes:
        plan = StepPlan(0, 0)
        for index in range(sequences):
            drafts = (0,) * (rows - 1) if sequences > 1 else ()
            known = max_model_len - len(drafts)
            request = Request(index, f"probe {index}", known, [0] * known, _COSTLY, blocks=list(blocks))
            plan.add(ScheduledTokens(request, new, context - new, "prefill", True, drafts))
        plans.append(plan)
    return plans


def warm_up_plans(
    config: EngineConfig, most_tokens: int, max_model_len: int, *, expands: bool = False
) -> list[StepPlan]:
    """A prompt of 1, 2, 4 … tokens each. Which kernels a step needs, and cut how, follows from its number of tokens up
    to a factor of two: what none of these compiles would be compiled while requests wait. A model that `expands` the
    latents of whole prompts gets each as a chunk behind a long context, too."""
    plans, params = [], SamplingParams(max_tokens=1)
    most = min(most_tokens, max_model_len)
    sizes = [1 << exponent for exponent in range(most.bit_length())]
    chunks = [(new, 0) for new in sizes] + [(new, max_model_len - new) for new in sizes if expands]
    for index, (new, past) in enumerate(chunks):
        blocks = list(range(-(-(new + past) // config.block_size)))
        request = Request(index, f"warm-up {index}", new + past, [0] * (new + past), params, blocks=blocks)
        plan = StepPlan(0, 0)
        plan.add(ScheduledTokens(request, new, past, "prefill", samples=True))
        plans.append(plan)
    return plans


def work_and_free_bytes(
    device: torch.device, run: Callable[[StepPlan], None], plans: list[StepPlan], forget: Callable[[], None]
) -> tuple[int, int]:
    """The highest peak of `plans`, and the free memory of the device without it. `run` computes a plan and
    forgets its requests, `forget` frees their tables.

    Raises ModelError if they do not fit.
    """
    before, peaks = torch.cuda.memory_allocated(device), []
    try:
        for plan in plans:
            torch.cuda.reset_peak_memory_stats(device)
            run(plan)
            torch.cuda.synchronize(device)
            peaks.append(torch.cuda.max_memory_allocated(device) - before)
    except torch.cuda.OutOfMemoryError as error:
        raise ModelError(
            "the device has too little memory for one step of the largest size; lower max_num_batched_tokens, "
            f"max_num_seqs or max_model_len ({str(error).splitlines()[0]})"
        ) from None
    forget()
    torch.cuda.empty_cache()
    return max(peaks), torch.cuda.mem_get_info(device)[0]
