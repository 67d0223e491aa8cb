"""The memory of a GPU as a loaded model needs it: measured before the KV pool is allocated."""

from typing import Any

import torch

from sojourn.engine.request.plan import StepPlan
from sojourn.engine.runner.build import allocated, trial_plans, work_and_free_bytes
from sojourn.engine.runner.graphs import graph_bytes
from sojourn.engine.runner.memory_plan import MeasuredBytes, measured_plan
from sojourn.metrics.memory.plan import MemoryPlan


def measured_memory(runner: Any) -> MemoryPlan:
    """The plan of a ModelRunner's GPU, after its largest steps were computed and its graphs captured. They compile and
    load what the first requests would wait for. Raises ModelError if they do not fit."""
    config, placed, eager = runner.config, runner.placed, runner.eager
    eager.kv_cache = allocated(placed, -(-placed.max_model_len // config.block_size), config.block_size)

    def run(plan: StepPlan) -> None:
        runner.collect(runner.launch(plan))
        for item in plan.scheduled:
            runner.forget(item.request.id)

    if eager.sampler.fused is not None:
        logits = torch.zeros((1, runner.shape.vocab_size), dtype=eager.logit_dtype, device=placed.device)
        eager.sampler.fused.warm_up(logits, eager.tables.last_ids)
    plans = trial_plans(config, placed)
    work, free = work_and_free_bytes(placed.device, run, plans, runner.renew_sampler)
    graphs = graph_bytes(placed.device, runner.forward.sizes, lambda sizes: runner.forward.captured(sizes))
    free += eager.kv_cache.nbytes
    eager.kv_cache = None
    return measured_plan(config, runner.memory, placed, MeasuredBytes(work, graphs, free), runner.techniques)
