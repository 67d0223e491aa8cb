"""The memory of a GPU as a loaded model needs it: measured before the KV pool is allocated."""

from typing import Any

import torch

from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import StepPlan
from sojourn.engine.runner.build import trial_plans, work_and_free_bytes
from sojourn.engine.runner.graphs import graph_bytes
from sojourn.engine.runner.memory_plan import MeasuredBytes, measured_plan
from sojourn.engine.token.sampling.sampler import Sampler
from sojourn.metrics.memory.plan import MemoryPlan


def measured_memory(runner: Any, config: EngineConfig) -> MemoryPlan:
    """The plan of a ModelRunner's GPU, after its largest steps were computed and its graphs captured. They compile and
    load what the first requests would wait for. Raises ModelError if they do not fit."""
    runner.kv_cache = runner.allocate(-(-runner.max_model_len // runner.block_size))

    def run(plan: StepPlan) -> None:
        runner.collect(runner.launch(plan))
        for item in plan.scheduled:
            runner.forget(item.request.id)

    def forget() -> None:
        runner.sampler = Sampler(runner.shape.vocab_size, runner.device, max_rows=config.max_num_seqs)

    if runner.sampler.fused is not None:
        logits = torch.zeros((1, runner.shape.vocab_size), dtype=runner.logit_dtype, device=runner.device)
        runner.sampler.fused.warm_up(logits, runner.tables.last_ids)
    work, free = work_and_free_bytes(runner.device, run, trial_plans(config, runner.target), forget)
    graphs = graph_bytes(runner.device, runner.graph_sizes, lambda sizes: runner.capture(config, sizes))
    free += runner.kv_cache.nbytes
    del runner.kv_cache
    return measured_plan(config, runner.memory, runner.target, MeasuredBytes(work, graphs, free))
