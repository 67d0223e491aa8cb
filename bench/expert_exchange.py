"""What two ranks with experts take for a step: with sums over ranks, and with tokens that travel to their experts.

    python -m bench.expert_exchange --rounds 3

The model is `tiny-mixture` with random weights: 4 layers of 8 experts, of which a token has 2. Times are medians of the
steps of rank 0, in turns.
"""

import argparse
import statistics

from bench.parallel_shares import run
from sojourn.metrics.records import StepRecord

EXCHANGES = ("all-reduce", "all-to-all")
SETTINGS = {"load_format": "dummy", "expert_parallel": 2}
# name → kind of the steps, requests, tokens of each prompt
STEPS = {
    "a prompt of 512 tokens": ("prefill", 1, 512),
    "2 decodes": ("decode", 2, 40),
    "16 decodes": ("decode", 16, 40),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"{'step':<24} {'exchange':<12} {'step ms':>8} {'exchange ms':>12}")
    for name, (kind, batch, prompt_tokens) in STEPS.items():
        found: dict[str, list[StepRecord]] = {exchange: [] for exchange in EXCHANGES}
        for _ in range(args.rounds):
            for exchange, steps in found.items():
                settings = SETTINGS | {"expert_exchange": exchange}
                steps += run("tiny-mixture", batch, settings, prompt_tokens=prompt_tokens, kind=kind).steps
        for exchange, steps in found.items():
            device, exchanged = (statistics.median(getattr(step, field) for step in steps) / 1e6
                                 for field in ("device_ns", "communication_ns"))  # fmt: skip
            print(f"{name:<24} {exchange:<12} {device:8.2f} {exchanged:12.2f}", flush=True)


if __name__ == "__main__":
    main()
