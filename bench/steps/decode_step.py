"""Device time of a step of the bundled model: decodes of one and of sixteen sequences, and prompt tokens.

python -m bench.steps.decode_step
"""

import random
import statistics

from tests.engine.harness import drain, hand_over, make_engine, submit

SEQUENCES = 16
REPEATS = 3


def measure() -> dict[str, float]:
    """Medians in milliseconds, over contexts of 50 to 900 tokens."""
    engine, published = make_engine("tiny-model", num_kv_blocks=8192, max_model_len=4096)
    dice = random.Random(0)
    prompts = [[dice.randrange(3, 2000) for _ in range(dice.randrange(50, 900))] for _ in range(SEQUENCES)]
    hand_over(engine, [submit(f"r{i}", prompt, 60) for i, prompt in enumerate(prompts)])
    drain(engine)
    hand_over(engine, [submit("alone", [5] * 300, 60)])
    drain(engine)
    decodes = [step for step in published.records if set(step.kinds) == {"decode"}]
    full = [step for step in published.records if sum(step.new_tokens) > 400]
    return {
        "decode of 1": statistics.median(s.device_ns / 1e6 for s in decodes if len(s.kinds) == 1),
        f"decode of {SEQUENCES}": statistics.median(s.device_ns / 1e6 for s in decodes if len(s.kinds) == SEQUENCES),
        "1,000 prompt tokens": statistics.median(s.device_ns / 1e3 / sum(s.new_tokens) for s in full),
    }


if __name__ == "__main__":
    runs = [measure() for _ in range(REPEATS)]
    for name in runs[0]:
        values = sorted(run[name] for run in runs)
        print(
            f"{name:<22} {statistics.median(values):6.1f} ms  ({values[0]:.1f} to {values[-1]:.1f}, {REPEATS} repeats)"
        )
