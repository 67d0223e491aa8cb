"""What telemetry takes of a real step in the core, with the model between two steps: full books against none.

    python -m bench.telemetry_core tiny-model -c 1 -c 8 -c 32

One process, one model, two loops over it that serve the same requests, in turns of a hundred steps: what else the
machine does meets both alike, and a pair differs in its books, and the rare look at a draw's certainty, not in where a
process happens to lie in memory. After each step the model's weights have driven the books out of the caches, so that
this is several times what `telemetry_step` says; messages go to another process, which reads and drops them. Of each
load p50 is the median over its turns of full less off, and p95 the difference of their 95th percentiles; a figure is
the median over loads, with a 95 % interval of the bootstrap. What the front does is not in it: `overhead` has that.
"""

import argparse
import time

import numpy as np

from bench.overhead import Cost, cost
from bench.twin_core import two_loops
from engine.engine import Engine
from engine.messages import Submit
from engine.sampling import SamplingParams

PROMPT_TOKENS, TURNS = 64, 6  # of each load
# In the first steps of a turn the loop comes from a pause, and the runner has had other requests. With turns of ten
# steps the caches held less of the books than in a loop that works on: they cost half as much again.
TURN_STEPS, WAKING_STEPS = 100, 3
PERCENTILES = (50, 95)


def begin(name: str, engine: Engine, streams: int) -> None:
    """Hands a load over and computes its prompts."""
    sampling = SamplingParams(max_tokens=TURNS * TURN_STEPS + 20, temperature=0.0, ignore_eos=True)
    begin_ns = time.monotonic_ns()
    prompts = [[100 + index] * PROMPT_TOKENS for index in range(streams)]
    asked = [Submit(f"{name}-{index:030x}", prompt, sampling, begin_ns) for index, prompt in enumerate(prompts)]
    engine.receive(asked, begin_ns)
    for _ in range(5):
        engine.receive([], engine.step())


def turn(engine: Engine) -> np.ndarray:
    """Microseconds of each of its steps but the first ones."""
    begin_ns = time.monotonic_ns()
    read_ns = []
    for _ in range(TURN_STEPS):
        engine.receive([], begin_ns)
        begin_ns = engine.step()
        read_ns.append(time.monotonic_ns())
    return np.diff(read_ns[WAKING_STEPS - 1 :]) / 1e3


def one_load(engines: dict[str, Engine], streams: int) -> dict[str, np.ndarray]:
    """Microseconds of each step, by what is booked: [TURNS, steps of a turn]."""
    for name, engine in engines.items():
        begin(name, engine, streams)
    took: dict[str, list[np.ndarray]] = {name: [] for name in engines}
    for number in range(TURNS):
        for name in sorted(engines, reverse=number % 2 == 1):
            took[name].append(turn(engines[name]))
    for engine in engines.values():
        while engine.has_work:
            engine.receive([], engine.step())
    return {name: np.stack(turns) for name, turns in took.items()}


def measure(engines: dict[str, Engine], streams: int, loads: int) -> tuple[dict[str, float], dict[str, Cost]]:
    """Microseconds of a step without books, and what the books add, by figure."""
    one_load(engines, streams)  # warms up
    took = [one_load(engines, streams) for _ in range(loads)]
    apart = {
        "p50": [float(np.median(np.median(each["full"], axis=1) - np.median(each["off"], axis=1))) for each in took],
        "p95": [float(np.percentile(each["full"], 95) - np.percentile(each["off"], 95)) for each in took],
    }
    without = {f"p{q}": float(np.median([np.percentile(each["off"], q) for each in took])) for q in PERCENTILES}
    return without, {name: cost(values) for name, values in apart.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-c", "--streams", type=int, action="append")
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0 is one for each core")
    parser.add_argument("--loads", type=int, default=30)
    options = parser.parse_args()
    with two_loops(options.model, options.threads) as engines:
        print("streams         us a step, off   books, us a step (95 % interval)    books, %")
        for streams in options.streams or [1, 8, 32]:
            without, added = measure(engines, streams, options.loads)
            for name, books in added.items():
                interval = f"{books.value:+.1f} ({books.low:+.1f} to {books.high:+.1f})"
                percent = 100 * books.value / without[name]
                print(f"{streams:7} {name:>6} {without[name]:15.0f} {interval:>34} {percent:+11.2f}")


if __name__ == "__main__":
    main()
