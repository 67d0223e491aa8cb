"""Shares of communication and bubbles on two ranks: what the cost model predicts, and what was measured.

    python -m bench.parallel_shares
    python -m bench.parallel_shares --links FILE --rounds 5

The exchanges are first measured (`sojourn calibrate-device`), unless `--links` names a file with ceilings. Then the
model decodes the same prompts as one process with one thread, with tensor parallelism of 2 and with 2 stages, in turns.
One process gives the time of a step without exchanges: with the links follows the share of exchanges. The bubbles
follow from what each stage computes, as measured, and from the host's time between two steps of one process.
Shares are medians of steps: what else runs on the machine is in few of them.
"""

import argparse
import random
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from engine import LLM, SamplingParams
from metrics.compute.communication import bubbles, group_shape, predicted
from metrics.compute.cost_model import ModelShape
from metrics.compute.link import Link
from metrics.compute.roofline import load_ceilings
from metrics.records import StepRecord

BATCHES = (2, 8, 16)
PROMPT_TOKENS, OUTPUT_TOKENS = 40, 80
LAYOUTS = {"one process": {}, "tensor 2": {"tensor_parallel": 2}, "pipeline 2": {"pipeline_parallel": 2}}


class Run(NamedTuple):
    shape: ModelShape
    dtype: str
    steps: list[StepRecord]  # of decodes alone


def run(model: str, batch: int, settings: dict[str, Any]) -> Run:
    dice, steps = random.Random(batch), []
    prompts = [[dice.randrange(3, 2000) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    sizes = {"num_kv_blocks": 512, "max_model_len": 512, "threads": 1, "prefix_caching": False}
    with LLM(model, on_steps=steps.extend, **sizes, **settings) as llm:
        llm.generate(prompts, sampling)  # memory is faulted in
        steps.clear()
        llm.generate(prompts, sampling)
        shape, dtype = llm.ready.shape, llm.ready.dtype
    stages = settings.get("pipeline_parallel", 1)
    full = [step for step in steps if set(step.kinds) == {"decode"} and len(step.kinds) == -(-batch // stages)]
    return Run(shape, dtype, full)


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


def pipeline_shares(half: Run, two: Run, links: list[Link]) -> list[tuple[float, float]]:
    """Share of bubbles of each stage: predicted, measured. `half`: one process with as many decodes as a step has.

    What each stage computes is measured; the pace and the waits are predicted.
    """
    tokens = len(two.steps[0].kinds)
    group = group_shape(two.shape, {"pipeline_parallel": 2}, two.dtype)
    link = next(each for each in links if each.collective == "send")
    host = median(step.end_ns - step.begin_ns - step.device_ns for step in half.steps)
    both = [step for step in two.steps if len(step.rank_busy_ns) == 2]
    busy, sent, waits = (np.array([getattr(step, f"rank_{name}_ns") for step in both])
                         for name in ("busy", "communication", "bubble"))  # fmt: skip
    transfer = float(link.exchange_ns(1, group.exchanges(tokens, tokens)["send"].bytes))
    shares = bubbles(np.median(busy + sent, axis=0).tolist(), max(0.0, host), transfer, under_way=2).shares
    measured = np.median(waits / (busy + sent + waits), axis=0)
    return list(zip(shares, measured.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-model")
    parser.add_argument("--links", type=Path, help="ceilings that sojourn calibrate-device --out wrote")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.links is None:
        import torch

        from engine.compute.link_ceilings import links as measured_links

        links = measured_links(torch.device("cpu"), 1)
    else:
        links = load_ceilings(path=args.links).links
    for link in links:
        print(f"{link.collective:<11} {link.latency_ns / 1e3:7.0f} µs + bytes / {link.bytes_per_s / 1e9:.2f} GB/s, "
              f"wait {link.wait_share:.1%}")  # fmt: skip
    print(f"{'decodes':>7}  {'':<24} predicted  measured  error")
    for batch in BATCHES:
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(args.rounds):
            alone, tensor, pipeline = (run(args.model, batch, settings) for settings in LAYOUTS.values())
            half = run(args.model, -(-batch // 2), {})
            found.setdefault("communication, tensor 2", []).append(tensor_shares(alone, tensor, links))
            for stage, shares in enumerate(pipeline_shares(half, pipeline, links)):
                found.setdefault(f"bubble, stage {stage} of 2", []).append(shares)
        for name, rounds in found.items():
            expected, measured = (median(each[side] for each in rounds) for side in (0, 1))
            print(f"{batch:>7}  {name:<24} {expected:9.1%} {measured:9.1%} {expected / max(measured, 1e-9) - 1:6.0%}")


if __name__ == "__main__":
    main()
