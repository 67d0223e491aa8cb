"""What telemetry takes in the core while requests come and go, step by step: full books against none.

    python -m tests.bench.telemetry_traffic tiny-model -c 1 -c 8 -c 32

One process, one model, two loops over it that are given the same requests at the same steps, in turns. So step number
17 of one does what step number 17 of the other does, and the median of each step over many turns leaves out what else
the machine does: what is left says which steps telemetry makes longer, which no mean does. A request that ends is
followed by another one at once. What the core does while nobody asks anything (with one stream, between two requests)
is not counted, because nobody waits; messages go to another process, which drops them.

`lost` is of tokens/s, `p99` of the gaps between tokens as far as the steps' medians make them: all other reasons for a
long gap are left out. Intervals are 95 % ones of the bootstrap over turns. The dearest steps follow, with what
telemetry adds to each: with one stream steps 0 and 128 compute a prompt, with more every 128 / streams-th one.
"""

import argparse
import time
from collections import deque

import numpy as np

from engine.engine import Engine
from engine.messages import Outputs, Submit
from engine.sampling import SamplingParams
from tests.bench.overhead import Cost
from tests.bench.telemetry_core import two_loops

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 128
WARM_TURNS = 2
RESAMPLES = 400
DEAREST = 6  # steps that are told


class Play:
    """The same requests again and again, to one loop."""

    def __init__(self, name: str, engine: Engine, streams: int):
        self._name, self._engine, self._streams = name, engine, streams
        self._asked = 0
        self._ended = 0  # since the last look
        self._tell, engine.publish = engine.publish, self._publish

    def turn(self) -> np.ndarray:
        """Microseconds of each step, from one in which all streams are under way to when each has had two requests."""
        engine, streams = self._engine, self._streams
        lengths = deque(OUTPUT_TOKENS * (index + 1) // streams for index in range(streams))
        lengths += [OUTPUT_TOKENS] * (2 * streams)
        arriving, took_ns = streams, []
        begin_ns = time.monotonic_ns()
        while arriving or engine.has_work:
            if not engine.has_work:
                engine.tell_all()
                begin_ns = time.monotonic_ns()
            asked = [self._submit(lengths.popleft(), begin_ns) for _ in range(min(arriving, len(lengths)))]
            engine.receive(asked, begin_ns)
            self._ended = 0
            end_ns = engine.step()
            took_ns.append(end_ns - begin_ns)
            begin_ns, arriving = end_ns, self._ended if lengths else 0
        engine.tell_all()
        return np.array(took_ns[OUTPUT_TOKENS : 3 * OUTPUT_TOKENS]) / 1e3

    def _submit(self, tokens: int, now_ns: int) -> Submit:
        self._asked += 1
        prompt = np.random.default_rng(self._asked).integers(100, 2000, PROMPT_TOKENS).tolist()
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return Submit(f"{self._name}-{self._asked:030x}", prompt, sampling, now_ns)

    def _publish(self, outputs: Outputs) -> None:
        self._tell(outputs)
        self._ended += sum(output.finish_reason is not None for output in outputs.outputs)

    def close(self) -> None:
        self._engine.publish = self._tell


def measure(engines: dict[str, Engine], streams: int, turns: int) -> dict[str, np.ndarray]:
    """Microseconds of each step, by what is booked: [turns, steps]."""
    plays = {name: Play(name, engine, streams) for name, engine in engines.items()}
    took: dict[str, list[np.ndarray]] = {name: [] for name in plays}
    for number in range(WARM_TURNS + turns):
        for name in sorted(plays, reverse=number % 2 == 1):
            each = plays[name].turn()
            if number >= WARM_TURNS:
                took[name].append(each)
    for play in plays.values():
        play.close()
    return {name: np.stack(each) for name, each in took.items()}


def profiles(off: np.ndarray, full: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of each step without books and what they add: [steps] each, of [turns, steps]. What changes from
    turn to turn meets both of a pair alike."""
    return np.median(off, axis=0), np.median(full - off, axis=0)


def percents(off: np.ndarray, full: np.ndarray) -> tuple[float, float]:
    """Tokens/s lost and the 99th percentile gained, of [turns, steps]."""
    without, added = profiles(off, full)
    lost = 1 - without.sum() / (without + added).sum()
    return 100 * lost, 100 * (np.percentile(without + added, 99) / np.percentile(without, 99) - 1)


def costs(off: np.ndarray, full: np.ndarray) -> tuple[Cost, Cost]:
    """`percents`, with their intervals."""
    draws = np.random.default_rng(0).integers(0, len(off), (RESAMPLES, len(off)))
    bounds = np.percentile([percents(off[draw], full[draw]) for draw in draws], (2.5, 97.5), axis=0)
    return tuple(Cost(value, *bounds[:, index].tolist()) for index, value in enumerate(percents(off, full)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-c", "--streams", type=int, action="append")
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0 is one for each core")
    parser.add_argument("--turns", type=int, default=30)
    options = parser.parse_args()
    with two_loops(options.model, options.threads) as engines:
        print("streams  us a step, off   tokens/s lost, %        p99 gained, %           dearest steps, us")
        for streams in options.streams or [1, 8, 32]:
            took = measure(engines, streams, options.turns)
            lost, p99 = (f"{cost.value:+.1f} ({cost.low:+.1f} to {cost.high:+.1f})" for cost in costs(**took))
            without, added = profiles(**took)
            dearest = ", ".join(f"{step}: {added[step]:+.0f}" for step in np.argsort(-added)[:DEAREST])
            median = f"median {np.median(added):+.1f}"
            print(f"{streams:7} {np.median(without):15.0f}   {lost:22}  {p99:22}  {dearest}; {median}")


if __name__ == "__main__":
    main()
