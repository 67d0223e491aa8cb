"""Shares of communication and bubbles on two ranks: what the cost model predicts, and what was measured.

    python -m bench.parallel_shares
    python -m bench.parallel_shares --links FILE --rounds 5

The exchanges are first measured (`sojourn calibrate device`), unless `--links` names a file with ceilings. Then the
model decodes the same prompts as one process with one thread, with tensor parallelism of 2 and with 2 stages, in turns;
and with 2 stages of which one computes `SLOWER_MS` longer (the planted fault `slow_rank`).
One process gives the time of a step without exchanges: with the links follows the share of exchanges. The bubbles
follow from what each stage computes and what the host does between two steps, as measured.
Shares are medians of steps: what else runs on the machine is in few of them.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sojourn.engine.config import EngineConfig
from sojourn.engine.core import build
from sojourn.engine.loop.engine import Engine
from sojourn.engine.messages import Observed, Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.compute.communication import bubbles, group_shape, predicted
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.compute.link import Link
from sojourn.metrics.compute.roofline import load_ceilings
from sojourn.metrics.records import StepRecord

BATCHES = (2, 8, 16)
PROMPT_TOKENS, OUTPUT_TOKENS = 40, 80
SLOWER_MS = 3
SMALL = 0.05  # a share below it has no relative error that says anything
PIPELINE = {"pipeline_parallel": 2}
LAYOUTS = {"one process": {}, "tensor 2": {"tensor_parallel": 2}} | {
    "pipeline 2": PIPELINE,
    **{
        f"pipeline 2, stage {rank} slow": PIPELINE | {"faults": f"slow_rank:rank={rank},ms={SLOWER_MS}"}
        for rank in (0, 1)
    },
}


class Run(NamedTuple):
    shape: ModelShape
    dtype: str
    steps: list[StepRecord]


def run(
    model: str, batch: int, settings: dict[str, Any], *, prompt_tokens: int = PROMPT_TOKENS, kind: str = "decode"
) -> Run:
    """The steps of one kind, with as many requests as they may have."""
    dice = random.Random(batch)
    prompts = [[dice.randrange(3, 2000) for _ in range(prompt_tokens)] for _ in range(batch)]
    sizes = {"num_kv_blocks": 512, "max_model_len": 1024, "threads": 1, "prefix_caching": False}
    steps: list[StepRecord] = []

    def publish(message: object) -> None:
        if isinstance(message, Observed) and message.step is not None:
            steps.append(message.step)

    engine, ready = build(EngineConfig(model=model, **sizes, **settings), 0, publish)
    try:
        generate(engine, "warm", prompts)  # memory is faulted in
        steps.clear()
        generate(engine, "measured", prompts)
    finally:
        engine.close()
    stages = settings.get("pipeline_parallel", 1)
    full = [step for step in steps if set(step.kinds) == {kind} and len(step.kinds) == -(-batch // stages)]
    return Run(ready.shape, ready.dtype, full)


def generate(engine: Engine, name: str, prompts: list[list[int]]) -> None:
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    begin_ns = time.monotonic_ns()
    submits = [Submit(f"{name}{n}", ids, sampling, encoded_ns=begin_ns) for n, ids in enumerate(prompts)]
    engine.receive(submits, begin_ns)
    while engine.has_work:
        engine.receive([], engine.step())


def median(values: Any) -> float:
    return float(statistics.median(values))


def tensor_shares(alone: Run, two: Run, links: list[Link]) -> tuple[float, float]:
    """Share of the device's time in exchanges on rank 0: predicted, measured."""
    group = group_shape(two.shape, {"tensor_parallel": 2}, two.dtype)
    tokens, rows = len(two.steps[0].kinds), two.steps[0].logit_rows
    whole = median(step.device_ns for step in alone.steps)
    # The matrices are divided; the draws, and what the host prepares for each step, are not.
    draws = median(step.sampling_ns or 0 for step in alone.steps)
    busy = draws + (whole - draws) / group.ranks_per_stage
    found = predicted(group, links, np.int64(tokens), np.int64(rows), busy)
    communication = float(found.exchange_ns + found.wait_ns)
    measured = median(step.communication_ns / step.device_ns for step in two.steps)
    return communication / (communication + busy), measured


def pipeline_shares(two: Run, links: list[Link]) -> list[tuple[float, float]]:
    """Share of bubbles of each stage: predicted, measured.

    What each stage and the host compute is measured; the pace and the waits are predicted.
    """
    tokens = len(two.steps[0].kinds)
    group = group_shape(two.shape, PIPELINE, two.dtype)
    link = next(each for each in links if each.collective == "send")
    both = [step for step in two.steps if len(step.rank_busy_ns) == 2]
    busy, sent, waits = (np.array([getattr(step, f"rank_{name}_ns") for step in both])
                         for name in ("busy", "communication", "bubble"))  # fmt: skip
    host = median([step.end_ns - step.begin_ns for step in both] - (busy + sent + waits)[:, 0])
    transfer = float(link.exchange_ns(1, group.exchanges(tokens, tokens)["send"].bytes))
    shares = bubbles(np.median(busy + sent, axis=0).tolist(), max(0.0, host), transfer, under_way=2).shares
    waited, whole = (each[1:] + each[:-1] for each in (waits, busy + sent + waits))  # both micro-batches
    measured = np.median(waited / whole, axis=0)
    return list(zip(shares, measured.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-model")
    parser.add_argument("--links", type=Path, help="ceilings that sojourn calibrate device --output wrote")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.links is None:
        import torch

        from sojourn.engine.techniques.group.link_ceilings import links as measured_links

        links = measured_links(torch.device("cpu"), 1)
    else:
        links = load_ceilings(path=args.links).links
    for link in links:
        print(f"{link.collective:<11} {link.latency_ns / 1e3:7.0f} µs + bytes / {link.bytes_per_s / 1e9:.2f} GB/s, "
              f"wait {link.wait_share:.1%}")  # fmt: skip
    print(f"{'decodes':>7}  {'':<32} predicted  measured  points  relative")
    for batch in BATCHES:
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(args.rounds):
            runs = {name: run(args.model, batch, settings) for name, settings in LAYOUTS.items()}
            alone, tensor = runs.pop("one process"), runs.pop("tensor 2")
            found.setdefault("communication, tensor 2", []).append(tensor_shares(alone, tensor, links))
            for name, two in runs.items():
                for stage, shares in enumerate(pipeline_shares(two, links)):
                    found.setdefault(f"bubble of stage {stage}, {name}", []).append(shares)
        for name, rounds in found.items():
            expected, measured = (median(each[side] for each in rounds) for side in (0, 1))
            relative = f"{expected / measured - 1:9.0%}" if measured >= SMALL else f"{'–':>9}"
            print(
                f"{batch:>7}  {name:<32} {expected:9.1%} {measured:9.1%} {100 * (expected - measured):7.1f}{relative}"
            )


if __name__ == "__main__":
    main()
