"""Microseconds that telemetry takes of a decode step: .venv/bin/python -m tests.bench.telemetry_step [--steps N]

The real loop over a device that takes no time, full books against none, encoding what it would send; then the front's
side of the same messages: decoding them, working out what their steps cost, folding the records into the exporter,
keeping them in a file. Time of the thread on its CPU, and the least of several repeats, in turns: whatever else the
machine does only adds.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from engine import messages
from engine.books import make_books
from engine.config import EngineConfig
from engine.engine import Engine, make_scheduler
from engine.request.plan import StepOutcome, StepPlan
from engine.request.request import Request
from engine.sampling import SamplingParams
from engine.step_rows import StepRows
from metrics.appraisal import Appraiser
from metrics.costmodel import ModelShape
from metrics.exporter import Exporter
from metrics.packed import PackedSegment, encode, packed_steps

SHAPE = ModelShape(
    vocab_size=2560, hidden_size=256, attention_parameters=800_000, mlp_parameters=1_200_000, pair_flops=1024,
    windows=((None, 4),), kv_bytes_per_token=4096, weight_bytes=10_000_000,
)  # fmt: skip
BLOCKS = 4096
PROMPT_TOKENS = 64


@dataclass(slots=True)
class Step:
    """A step that was over as soon as it was launched."""

    prepared_ns: int
    launched_ns: int
    sampled: dict[str, int]


class StillRunner:
    """Draws the same token for everybody, at once."""

    def __init__(self) -> None:
        self._drawn: dict[str, int] = {}

    def launch(self, plan: StepPlan) -> Step:
        if len(self._drawn) != len(plan.scheduled):
            self._drawn = {item.request.id: 7 for item in plan.scheduled}
        now_ns = time.monotonic_ns()
        return Step(now_ns, now_ns, self._drawn)

    def collect(self, handle: Step) -> StepOutcome:
        now_ns = time.monotonic_ns()
        return StepOutcome(handle.sampled, now_ns, now_ns, handle.launched_ns, now_ns, 0)

    def begin(self, request: Request) -> None: ...
    def forget(self, request_id: str) -> None: ...


def run(telemetry: str, batch: int, steps: int, send: Callable[[bytes], None]) -> float:
    """Microseconds of a step of the loop."""
    config = EngineConfig(model="", telemetry=telemetry, max_num_seqs=batch, max_num_batched_tokens=4096)
    scheduler = make_scheduler(config, BLOCKS)
    books = make_books(config, SHAPE, scheduler)
    engine = Engine(scheduler, StillRunner(), books, lambda outputs: send(messages.encode(outputs)))
    sampling = SamplingParams(max_tokens=steps + 40, temperature=0.0, ignore_eos=True)
    begin_ns = time.monotonic_ns()
    prompts = [[100 + index] * PROMPT_TOKENS for index in range(batch)]
    asked = [messages.Submit(f"cmpl-{index:032x}", prompt, sampling, begin_ns) for index, prompt in enumerate(prompts)]
    engine.receive(asked, begin_ns)
    for _ in range(30):
        engine.receive([], engine.step())
    began_ns = time.thread_time_ns()
    for _ in range(steps):
        engine.receive([], engine.step())
    return (time.thread_time_ns() - began_ns) / steps / 1e3


def front(told: list[bytes], steps: int) -> tuple[float, float, float, float]:
    """Microseconds a step of decoding the messages, of working out what their steps cost, of folding them, and of
    writing them to the disk (which a thread of its own does in a server)."""
    began_ns = time.thread_time_ns()
    decoded = [messages.decode_from_core(message) for message in told]
    decoded_ns = time.thread_time_ns()
    exporter, appraiser = Exporter("m"), Appraiser(SHAPE)
    rows, batches = StepRows(), []
    for message in decoded:
        if rows.take_in(message) and (batch := rows.take()) is not None:
            batches.append(appraiser.complete(batch))
    appraised_ns = time.thread_time_ns()
    for batch in batches:
        exporter.observe_steps(batch)
    folded_ns = time.thread_time_ns()
    with tempfile.TemporaryDirectory() as folder:
        segment = PackedSegment(Path(folder) / "steps.packed")
        for batch in batches:
            segment.write(encode(packed_steps(batch)))
        segment.close()
    ends_ns = (began_ns, decoded_ns, appraised_ns, folded_ns, time.thread_time_ns())
    return tuple((later - earlier) / steps / 1e3 for earlier, later in pairwise(ends_ns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    columns = ("core off", "core full", "core cost", "decode off", "decode full", "appraise", "fold", "keep")
    print("decodes " + " ".join(f"{column:>12}" for column in columns) + "   (us a step)")
    for batch in (1, 8, 32):
        best: dict[str, float] = {}
        for _ in range(options.repeats):
            for telemetry in ("off", "full"):
                told: list[bytes] = []
                took = {f"core {telemetry}": run(telemetry, batch, options.steps, told.append)}
                took[f"decode {telemetry}"], *records = front(told, options.steps)
                if telemetry == "full":
                    took["appraise"], took["fold"], took["keep"] = records
                best |= {name: min(value, best.get(name, value)) for name, value in took.items()}
        best["core cost"] = best["core full"] - best["core off"]
        print(f"{batch:7} " + " ".join(f"{best[column]:12.1f}" for column in columns))


if __name__ == "__main__":
    main()
