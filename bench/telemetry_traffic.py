"""What telemetry takes in the core while requests come and go, step by step: full books against none.

    python -m bench.telemetry_traffic tiny-model -c 1 -c 8 -c 32

One process, one model, two loops over it that are given the same requests at the same steps, in turns: a request that
ends is followed by another one at once. So step number 17 of one does what step number 17 of the other does. Compared
are the stages of each step but `wait`, in which the model computes: what else the machine does meets that stage most of
all. What telemetry adds to a step is the median of the differences over turns, which says where it costs, as no mean
does. What the model loses because the books have had its caches is left out, so that all of it is a lower bound.

`lost` is of tokens/s, `p99` of the gaps from one step's message to the next one's, as far as the steps' medians make
them: all other reasons for a long gap are left out. Intervals are 95 % ones of the bootstrap over turns of one start.
Then microseconds added to steps with a prompt, to those behind one, and to all others; by stage with `--stages`, where
`after` is what the loop does once its message is out. What the core does while nobody asks anything (with one stream,
between two requests) is not counted, because nobody waits; messages go to another process, which drops them.
"""

import argparse
import time
from collections import deque

import numpy as np

from bench.overhead import Cost
from bench.twin_core import two_loops
from engine.engine import Engine
from engine.messages import Outputs, Submit, ToldSteps
from engine.sampling import SamplingParams
from metrics.records import STAGES

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 128
STEPS = 2 * OUTPUT_TOKENS  # of a turn that are looked at
WARM_TURNS = 2
RESAMPLES = 400
PARTS = (*STAGES, "after")  # of a step; the message goes out between the last two
HOST = [index for index, part in enumerate(PARTS) if part != "wait"]


class Play:
    """The same requests again and again, to one loop. Stands between that and its books, and its reader."""

    def __init__(self, name: str, engine: Engine, streams: int):
        self._name, self._engine, self._streams = name, engine, streams
        self._asked = 0
        self._ended = 0  # since the last look
        self._told_ns = 0
        self._readings: list[list[int]] = []  # of each step
        self.has_prompts: list[bool] = []  # ... of the last turn
        self._tell, engine.publish = engine.publish, self._publish
        self._committed, engine.telemetry.observer.committed = engine.telemetry.observer.committed, self._commit

    def close(self) -> None:
        self._engine.publish, self._engine.books.committed = self._tell, self._committed

    def turn(self) -> np.ndarray:
        """Microseconds of each part, [STEPS, PARTS], from when all streams are under way."""
        engine, streams = self._engine, self._streams
        lengths = deque(OUTPUT_TOKENS * (index + 1) // streams for index in range(streams))
        lengths += [OUTPUT_TOKENS] * (2 * streams)
        prompts = np.random.default_rng(self._asked).integers(100, 2000, (len(lengths), PROMPT_TOKENS)).tolist()
        arriving, begin_ns = streams, time.monotonic_ns()
        self._readings, self.has_prompts = [], []
        while arriving or engine.has_work:
            if not engine.has_work:
                engine.tell_all()
                begin_ns = time.monotonic_ns()
            arriving = min(arriving, len(lengths))
            asked = [self._submit(prompts.pop(), lengths.popleft(), begin_ns) for _ in range(arriving)]
            engine.receive(asked, begin_ns)
            self._ended = 0
            begin_ns = engine.step()
            self._readings[-1] += (self._told_ns, begin_ns)
            arriving = self._ended if lengths else 0
        engine.tell_all()
        self.has_prompts = self.has_prompts[OUTPUT_TOKENS : OUTPUT_TOKENS + STEPS]
        return np.diff(self._readings[OUTPUT_TOKENS : OUTPUT_TOKENS + STEPS], axis=1) / 1e3

    def _submit(self, prompt: list[int], tokens: int, now_ns: int) -> Submit:
        self._asked += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return Submit(f"{self._name}-{self._asked:030x}", prompt, sampling, now_ns)

    def _publish(self, outputs: Outputs) -> None:
        self._tell(outputs)
        self._told_ns = time.monotonic_ns()
        self._ended += sum(output.finish_reason is not None for output in outputs.outputs)

    def _commit(self, plan, outcome, readings: list[int], turned, is_steady: bool) -> ToldSteps | None:
        self._readings.append(list(readings))
        self.has_prompts.append(plan.has_prompts)
        return self._committed(plan, outcome, readings, turned, is_steady)


def measure(engines: dict[str, Engine], streams: int, turns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Microseconds of each part without books, and what they add, [turns, STEPS, PARTS] both; which steps compute a
    prompt."""
    plays = {name: Play(name, engine, streams) for name, engine in engines.items()}
    took: dict[str, list[np.ndarray]] = {name: [] for name in plays}
    for number in range(WARM_TURNS + turns):
        for name in sorted(plays, reverse=number % 2 == 1):
            each = plays[name].turn()
            if number >= WARM_TURNS:
                took[name].append(each)
    for play in plays.values():
        play.close()
    assert plays["off"].has_prompts == plays["full"].has_prompts, "the loops did not do the same"
    off, full = (np.stack(took[name]) for name in ("off", "full"))
    return off, full - off, np.array(plays["off"].has_prompts)


def gaps(parts_us: np.ndarray) -> np.ndarray:
    """From each message to the next: [..., STEPS - 1] of [..., STEPS, parts]."""
    return parts_us[..., :-1, -1] + parts_us[..., 1:, :-1].sum(axis=-1)


def percents(off_us: np.ndarray, added_us: np.ndarray, waited_for: np.ndarray) -> tuple[float, float]:
    """Tokens/s lost and the 99th percentile gained, of the medians over the turns. `waited_for`: by a stream."""
    off, added = np.median(off_us, axis=0), np.median(added_us, axis=0)
    lost = 1 - off.sum() / (off.sum() + added[:, HOST].sum())
    without, more = gaps(off)[waited_for[1:]], gaps(added[:, HOST])[waited_for[1:]]
    return 100 * lost, 100 * (np.percentile(without + more, 99) / np.percentile(without, 99) - 1)


def costs(off_us: np.ndarray, added_us: np.ndarray, waited_for: np.ndarray) -> list[Cost]:
    """`percents`, with their intervals."""
    draws = np.random.default_rng(0).integers(0, len(off_us), (RESAMPLES, len(off_us)))
    drawn = [percents(off_us[draw], added_us[draw], waited_for) for draw in draws]
    low, high = np.percentile(drawn, (2.5, 97.5), axis=0).tolist()
    return [Cost(*each) for each in zip(percents(off_us, added_us, waited_for), low, high, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument(
        "-c", "--streams", type=int, action="append", choices=range(1, OUTPUT_TOKENS // 2 + 1), metavar="N"
    )
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0 is one for each core")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--stages", action="store_true", help="also where in a step it is added")
    options = parser.parse_args()
    with two_loops(options.model, options.threads) as engines:
        if engines["full"].overlap:
            parser.error("of a loop that overlaps steps the stages say nothing alone; it needs the CPU")
        columns = ("us a step, off", "tokens/s lost, %", "p99 ITL gained, %")
        print(f"streams {columns[0]:>15}   {columns[1]:20}  {columns[2]:20}  us added: prompt   behind    other")
        for streams in options.streams or [1, 8, 32]:
            off_us, added_us, prompt = measure(engines, streams, options.turns)
            waited_for = ~prompt if streams == 1 else np.full(STEPS, True)
            lost, p99 = (
                f"{cost.value:+.1f} ({cost.low:+.1f} to {cost.high:+.1f})"
                for cost in costs(off_us, added_us, waited_for)
            )
            behind = np.roll(prompt, 1) & ~prompt
            added = np.median(added_us, axis=0)
            of_kinds = [added[chosen].mean(axis=0) for chosen in (prompt, behind, ~prompt & ~behind)]
            told = " ".join(f"{by_part[HOST].sum():+8.1f}" for by_part in of_kinds)
            step_us = float(np.median(off_us.sum(axis=2)))
            print(f"{streams:7} {step_us:15.0f}   {lost:20}  {p99:20}          {told}")
            if options.stages:
                for index, part in enumerate(PARTS):
                    told = " ".join(f"{by_part[index]:+8.1f}" for by_part in of_kinds)
                    print(f"{part:>78}{told}")


if __name__ == "__main__":
    main()
