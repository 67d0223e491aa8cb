"""How well the step-time model predicts what it was not taught: .venv/bin/python -m bench.steps.step_model [MODEL ...]

One engine, two workloads in turns, so that the machine's drift falls on both: the model learns from the steps of the
one, and predicts those of the other, whose batches, prompts and chunks the first one never had, without learning from
them. Errors are relative to the measured time of the device, so the machine's own noise is in them: run it alone.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from bench.shapes import model_to_bench
from sojourn.engine import messages
from sojourn.engine.config import EngineConfig
from sojourn.engine.core import build
from sojourn.engine.loop.engine import Engine
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.compute.cost_model import ModelShape, step_work
from sojourn.metrics.compute.step_time import StepTimeModel, features
from sojourn.metrics.machine.host import hardware
from sojourn.metrics.records import StepRecord, composition

MAX_MODEL_LEN = 2048
CHUNK_TOKENS = 512
WARM_WAVES = 5


@dataclass(frozen=True, slots=True)
class Mix:
    """Waves of requests. Each wave draws its numbers from these lists."""

    batches: Sequence[int]
    prompts: Sequence[int]  # tokens
    outputs: tuple[int, int]


TAUGHT = Mix((1, 2, 4, 8, 16), (12, 40, 130, 260, 520, 900), (4, 40))
HELD_OUT = Mix((3, 6, 11, 14), (25, 75, 200, 400, 700, 1400), (4, 40))


def waves(mix: Mix, dice: random.Random) -> Iterator[list[tuple[int, int]]]:
    """(prompt tokens, output tokens) of each request of a wave, without end."""
    while True:
        lengths = [(dice.choice(mix.prompts), dice.randint(*mix.outputs)) for _ in range(dice.choice(mix.batches))]
        yield [(round(prompt * dice.uniform(0.9, 1.1)), output) for prompt, output in lengths]


def wave_of_steps(
    engine: Engine, records: list[StepRecord], wave: list[tuple[int, int]], dice: random.Random, name: str
) -> list[StepRecord]:
    """Serves one wave: half of it arrives at once, the rest while those run."""
    records.clear()
    pending = [
        messages.Submit(
            f"{name}-{index}", [dice.randrange(3, 2000) for _ in range(prompt)],
            SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True), time.monotonic_ns(),
        )
        for index, (prompt, output) in enumerate(wave)
    ]  # fmt: skip
    first = -(-len(pending) // 2)
    engine.receive(pending[:first], time.monotonic_ns())
    pending = pending[first:]
    while engine.has_work or pending:
        arrived = [pending.pop(0)] if pending and (not engine.has_work or dice.random() < 0.15) else []
        engine.receive(arrived, time.monotonic_ns())
        engine.step()
    return list(records)


def found(shape: ModelShape, record: StepRecord) -> np.ndarray:
    work = step_work(shape, record.new_tokens, record.past_tokens, record.logit_rows)
    return features(work, record.padding_tokens, eager=record.graph == "eager")


def percentages(errors: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of each phase and of all: the absolute error's mean, median and 95th percentile, and the mean with its sign."""
    found = {}
    for name, of_phase in errors.items():
        if len(of_phase) > 1:
            size = sorted(map(abs, of_phase))
            found[name] = {
                "steps": len(of_phase), "mape": statistics.mean(size), "median": statistics.median(size),
                "p95": size[int(0.95 * len(size))], "bias": statistics.mean(of_phase),
            }  # fmt: skip
    return found


def measure(name: str, threads: int, steps: int, seed: int, scratch: Path) -> dict:
    """`steps` to learn from, the first quarter of them before anything is scored."""
    folder, load_format = model_to_bench(name, scratch)
    config = EngineConfig(
        model=folder, load_format=load_format, max_num_seqs=16, max_model_len=MAX_MODEL_LEN, threads=threads,
        max_num_batched_tokens=CHUNK_TOKENS, prefix_caching=False,
    )  # fmt: skip
    records: list[StepRecord] = []

    def publish(message: messages.Tokens | messages.Observed) -> None:
        if isinstance(message, messages.Observed) and message.step is not None:
            records.append(message.step)

    engine, ready = build(config, 0, publish)
    dice, model, taught, number = random.Random(seed), StepTimeModel(), 0, 0
    learnt, held_out = waves(TAUGHT, dice), waves(HELD_OUT, dice)
    for _ in range(WARM_WAVES):  # memory is faulted in, kernels are chosen
        wave_of_steps(engine, records, next(learnt), dice, "warm")
    errors: dict[str, list[float]] = {part: [] for part in ("all", "prefill", "decode", "mixed")}
    seen_errors: list[float] = []  # of steps like those it has learnt from: what the noise leaves possible
    while taught < steps:
        number += 1
        for record in wave_of_steps(engine, records, next(learnt), dice, f"a{number}"):
            (predicted,) = model.observe_all(found(ready.shape, record)[None], np.array([record.device_ns]))
            taught += 1
            if not np.isnan(predicted) and taught > steps // 4:
                seen_errors.append(100 * (predicted / record.device_ns - 1))
        for record in wave_of_steps(engine, records, next(held_out), dice, f"b{number}"):
            predicted = model.predict(found(ready.shape, record))
            if predicted is not None and taught > steps // 4:
                error = 100 * (predicted / record.device_ns - 1)
                errors["all"].append(error)
                errors[composition(record.kinds)].append(error)
    scores = percentages(errors | {"taught": seen_errors})
    return {"model": name, "threads": ready.threads, "taught_steps": taught, "scores": scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["tiny-model", "small"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4000, help="that it is taught; about as many are held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.models:
            results.append(measure(name, options.threads, options.steps, options.seed, Path(scratch)))
            print(
                f"{name}, {results[-1]['threads']} threads, taught {results[-1]['taught_steps']} steps; held out, in %"
            )
            print(f"{'':8} {'steps':>6} {'mean':>6} {'median':>6} {'p95':>6} {'bias':>6}")
            for part, score in results[-1]["scores"].items():
                columns = " ".join(f"{score[column]:6.1f}" for column in ("mape", "median", "p95", "bias"))
                print(f"{part:8} {score['steps']:6} {columns}")
    if options.json is not None:
        document = {
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware(),
            "results": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
