"""What the host takes of a step beside the device: .venv/bin/python -m bench.steps.host_time [MODEL] [--threads N]

Decode steps of a full batch, without the server: the core's loop in this process, encoding what it would send. Host is
every stage but wait and sample, and what of a step's time the device had nothing to do.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from bench.shapes import model_to_bench
from sojourn.engine import messages
from sojourn.engine.config import EngineConfig
from sojourn.engine.core import build
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.records import STAGES, StepRecord

PROMPT_TOKENS = 64
DEVICE_STAGES = ("wait", "sample")


def decode_records(folder: str, load_format: str, batch: int, steps: int, threads: int, **settings) -> list[StepRecord]:
    """Records of steps in which all of `batch` requests decode, after as many to warm up."""
    config = EngineConfig(
        model=folder, load_format=load_format, max_num_seqs=batch, max_model_len=1024, threads=threads,
        max_num_batched_tokens=512, **settings,
    )  # fmt: skip
    records: list[StepRecord] = []

    def publish(message: messages.Tokens | messages.Observed) -> None:
        messages.encode(message)
        if isinstance(message, messages.Observed) and message.step is not None:
            records.append(message.step)

    engine, _ = build(config, 0, publish)
    sampling = SamplingParams(max_tokens=2 * steps + 50, temperature=0.0, ignore_eos=True)
    prompts = [[(7 * index + 13 * place) % 4000 + 3 for place in range(PROMPT_TOKENS)] for index in range(batch)]
    begin_ns = time.monotonic_ns()
    engine.receive([messages.Submit(f"r{i}", prompt, sampling, begin_ns) for i, prompt in enumerate(prompts)], begin_ns)
    while engine.has_work:
        engine.receive([], engine.step())
    full = [record for record in records if record.new_tokens == [1] * batch]
    return full[-steps:]


def summary(records: list[StepRecord]) -> dict[str, float]:
    """Medians in microseconds, by stage and in all; `gap` is what the device waited for the host."""
    stages = {
        stage: statistics.median(record.stages[index] / 1e3 for record in records) for index, stage in enumerate(STAGES)
    }
    wall = statistics.median((record.end_ns - record.begin_ns) / 1e3 for record in records)
    host = statistics.median(
        sum(took for stage, took in zip(STAGES, record.stages, strict=True) if stage not in DEVICE_STAGES) / 1e3
        for record in records
    )
    gap = statistics.median(record.gap_ns / 1e3 for record in records)
    return stages | {"host": host, "gap": gap, "wall": wall, "gap share": 100 * gap / wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="small")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    options = parser.parse_args()
    columns = [*STAGES, "host", "gap", "wall", "gap share"]
    print("batch overlap " + " ".join(f"{column:>9}" for column in columns))
    with tempfile.TemporaryDirectory() as scratch:
        folder, load_format = model_to_bench(options.model, Path(scratch))
        for batch in options.batches:
            for repeat in range(options.repeats):
                for overlap in ("off", "on")[:: 1 if repeat % 2 else -1]:
                    took = summary(
                        decode_records(folder, load_format, batch, options.steps, options.threads, overlap=overlap)
                    )
                    print(f"{batch:5} {overlap:>7} " + " ".join(f"{took[column]:9.1f}" for column in columns))


if __name__ == "__main__":
    main()
