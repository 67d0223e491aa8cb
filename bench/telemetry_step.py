"""Microseconds that telemetry takes of a decode step: .venv/bin/python -m bench.telemetry_step [--steps N]

The real loop over a device that takes no time, full books against none, encoding what it would send; then the front's
side of the same messages: decoding them, working out what their steps cost, folding the records into the exporter,
keeping them in a file. Time of the thread on its CPU, and the least of several repeats, in turns: whatever else the
machine does only adds.

With `--cold` a buffer is read before each step is read, and before the front takes its message, as a model's weights
would be: what code and data then cost is mostly the way to memory. The two loops go step by step in turns, and medians
of full less off stand a busy machine. `steady` is of neighbouring steps; `block` of those steps of 16 in which a block
becomes full; `core` and `front` of the means of 512 steps, which hold what is put off: what the shadow index books once
64 of its events wait, the rows of up to 256 steps. No request comes or ends, and the front's two milliseconds every
five seconds are in one mean of some ten.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from engine.telemetry.step_rows import StepRows

from engine import messages
from engine.config import EngineConfig
from engine.engine import Engine, make_scheduler
from engine.request.plan import LaunchedStep, StepOutcome, StepPlan
from engine.request.request import Request
from engine.sampling import SamplingParams
from engine.server.telemetry.full import Telemetry
from engine.server.telemetry.off import NoTelemetry
from engine.telemetry.observer import make_books
from metrics.compute.cost_model import ModelShape
from metrics.compute.step_costs import StepCosts
from metrics.export.prometheus import Exporter
from metrics.records import SCHEMAS
from metrics.run.segments import StreamSegment

SHAPE = ModelShape(
    vocab_size=2560, hidden_size=256, attention_parameters=800_000, mlp_parameters=1_200_000, pair_flops=1024,
    windows=((None, 4),), kv_bytes_per_token=4096, weight_bytes=10_000_000,
)  # fmt: skip
BLOCKS, BLOCK_TOKENS = 4096, 16
WINDOW = 512  # steps that are averaged
SWEPT_BYTES = 16 << 20  # more than the caches of a core
PROMPT_TOKENS = 64


class StillRunner:
    """Draws the same token for everybody, at once."""

    def __init__(self) -> None:
        self._drawn: dict[str, int] = {}

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if len(self._drawn) != len(plan.scheduled):
            self._drawn = {item.request.id: 7 for item in plan.scheduled}
        now_ns = time.monotonic_ns()
        return LaunchedStep(plan, now_ns, now_ns, self._drawn)

    def collect(self, step: LaunchedStep) -> StepOutcome:
        now_ns = time.monotonic_ns()
        return StepOutcome(step.state, now_ns, now_ns, step.launched_ns, now_ns, 0)

    def begin(self, request: Request) -> None: ...
    def forget(self, request_id: str) -> None: ...


class SweepingRunner(StillRunner):
    """Drives what the loop needs out of the caches before its step is read."""

    def __init__(self) -> None:
        super().__init__()
        self._weights = np.ones(SWEPT_BYTES // 8, np.int64)
        self.swept_ns = 0  # by the last sweep

    def sweep(self) -> None:
        began_ns = time.monotonic_ns()
        self._weights.sum()
        self.swept_ns = time.monotonic_ns() - began_ns

    def collect(self, step: LaunchedStep) -> StepOutcome:
        self.sweep()
        return super().collect(step)


def decoding(telemetry: str, batch: int, steps: int, runner: StillRunner, send: Callable[[bytes], None]) -> Engine:
    """A loop in the middle of requests that have so many steps before them."""
    config = EngineConfig(model="", telemetry=telemetry, max_num_seqs=batch, max_num_batched_tokens=4096)
    scheduler = make_scheduler(config, BLOCKS)
    books = make_books(config, SHAPE, scheduler)
    engine = Engine(scheduler, runner, books, lambda outputs: send(messages.encode(outputs)))
    sampling = SamplingParams(max_tokens=steps + 40, temperature=0.0, ignore_eos=True)
    begin_ns = time.monotonic_ns()
    prompts = [[100 + index] * PROMPT_TOKENS for index in range(batch)]
    asked = [messages.Submit(f"cmpl-{index:032x}", prompt, sampling, begin_ns) for index, prompt in enumerate(prompts)]
    engine.receive(asked, begin_ns)
    for _ in range(30):
        engine.receive([], engine.step())
    return engine


def run(telemetry: str, batch: int, steps: int, send: Callable[[bytes], None]) -> float:
    """Microseconds of a step of the loop."""
    engine = decoding(telemetry, batch, steps, StillRunner(), send)
    began_ns = time.thread_time_ns()
    for _ in range(steps):
        engine.receive([], engine.step())
    took_ns = time.thread_time_ns() - began_ns
    engine.tell_all()
    return took_ns / steps / 1e3


def front(told: list[bytes], steps: int) -> tuple[float, float, float, float]:
    """Microseconds a step of decoding the messages, of working out what their steps cost, of folding them, and of
    writing them to the disk (which a thread of its own does in a server)."""
    began_ns = time.thread_time_ns()
    decoded = [messages.decode_from_core(message) for message in told]
    decoded_ns = time.thread_time_ns()
    exporter, costs = Exporter("m"), StepCosts(SHAPE)
    rows = StepRows()
    for message in decoded:
        if message.steps is not None:
            rows.add(message.steps)
    batch = rows.take()
    batches = [] if batch is None else [costs.complete(batch)]
    appraised_ns = time.thread_time_ns()
    for batch in batches:
        exporter.observe_steps(batch)
    folded_ns = time.thread_time_ns()
    with tempfile.TemporaryDirectory() as folder:
        segment = StreamSegment(Path(folder) / "steps.arrows", SCHEMAS["steps"])
        for batch in batches:
            segment.append(batch.table())
        segment.close()
    ends_ns = (began_ns, decoded_ns, appraised_ns, folded_ns, time.thread_time_ns())
    return tuple((later - earlier) / steps / 1e3 for earlier, later in pairwise(ends_ns))


def cold(batch: int, steps: int) -> dict[str, float]:
    """Microseconds of a step of the loop without books, and what they add to it; the same of the front."""
    runner, told = SweepingRunner(), []
    fronts = {"off": NoTelemetry(EngineConfig(model="")), "full": Telemetry(EngineConfig(model=""))}
    fronts["full"].costs = StepCosts(SHAPE)
    engines: dict[str, Engine] = {}
    for name, taking in fronts.items():
        engines[name] = decoding(name, batch, steps, runner, told.append)
        for message in told:
            taking.outputs(messages.decode_from_core(message))
        told.clear()
    took = {(place, name): [] for place in ("core", "front") for name in engines}
    for step in range(steps):
        for name in sorted(engines, reverse=step % 2 == 1):
            engine = engines[name]
            began_ns = time.monotonic_ns()
            end_ns = engine.step()
            engine.receive([], end_ns)
            took["core", name].append((time.monotonic_ns() - began_ns - runner.swept_ns) / 1e3)
            runner.sweep()
            began_ns = time.monotonic_ns()
            fronts[name].outputs(messages.decode_from_core(told.pop()))
            took["front", name].append((time.monotonic_ns() - began_ns) / 1e3)
    added = {place: np.array(took[place, "full"]) - np.array(took[place, "off"]) for place in ("core", "front")}
    means = {place: each[: steps // WINDOW * WINDOW].reshape(-1, WINDOW).mean(axis=1) for place, each in added.items()}
    places = range(BLOCK_TOKENS)  # of a step, counted from some block's begin
    return {
        "core off": float(np.median(took["core", "off"])),
        "steady": float(np.median(added["core"])),
        "block": max(float(np.median(added["core"][place::BLOCK_TOKENS])) for place in places),
        "core": float(np.median(means["core"])),
        "front off": float(np.median(took["front", "off"])),
        "front": float(np.median(means["front"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="with caches as a model leaves them")
    options = parser.parse_args()
    if options.cold and options.steps < WINDOW:
        parser.error(f"--cold takes means of {WINDOW} steps; give --steps {WINDOW} or more")
    if options.cold:
        for batch in (1, 8, 32):
            repeats = [cold(batch, options.steps) for _ in range(options.repeats)]
            found = {name: float(np.median([repeat[name] for repeat in repeats])) for name in repeats[0]}
            if batch == 1:
                print("decodes " + " ".join(f"{column:>12}" for column in found) + "   (us a step)")
            print(f"{batch:7} " + " ".join(f"{value:12.1f}" for value in found.values()))
        return
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
