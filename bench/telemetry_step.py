"""Microseconds a step that full telemetry takes in the core and in the front.

    python -m bench.telemetry_step
    python -m bench.telemetry_step --output-tokens 128

The real loop runs over a device that takes no time, once with full telemetry and once without, in turns, step by step.
All steps decode, unless `--output-tokens` lets requests end: then each is replaced by another one with a prompt of 64
tokens, and what requests cost is part of the mean. Messages pass through the real
encoder, a socket of ZeroMQ and the front's telemetry, which records into a run directory. Before each step of the loop,
and before the front reads its messages, a buffer larger than the caches is read, as a model reads its weights. What is
reported is the mean over all steps of the CPU time with telemetry, less the mean without. The time to read the buffer
is left out. `fold` is the part of the front that works out all steps of the last 0.7 s at once.

The budget, at 8 streams: 20 microseconds in the core and 20 in the front.
"""

import argparse
import gc
import tempfile
import time
from pathlib import Path

import numpy as np
import zmq

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig
from sojourn.engine.loop.engine import Engine
from sojourn.engine.loop.scheduling import make_scheduler
from sojourn.engine.process import freeze_startup_objects
from sojourn.engine.request.plan import LaunchedStep, StepOutcome, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.sampling import SamplingParams
from sojourn.engine.server.telemetry.full import FOLD_SECONDS, Telemetry
from sojourn.engine.server.telemetry.off import NoTelemetry
from sojourn.engine.techniques.planning import planning
from sojourn.engine.telemetry.observer import make_observer
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.compute.step_costs import StepCosts

SHAPE = ModelShape(
    vocab_size=2560, hidden_size=256, attention_parameters=800_000, mlp_parameters=1_200_000, pair_flops=1024,
    windows=((None, 4),), kv_bytes_per_token=4096, weight_bytes=10_000_000,
)  # fmt: skip
BLOCKS = 4096
SWEPT_BYTES = 16 << 20  # more than the caches of a core
PROMPT_TOKENS, OUTPUT_TOKENS = 64, 100_000
WARM_STEPS = 256
STEP_SECONDS = 0.005  # of the model that the budget is for: so often the front folds


class CacheSweep:
    """Drives code and data out of the caches of a core."""

    def __init__(self) -> None:
        self._weights = np.ones(SWEPT_BYTES // 8, np.int64)
        self.took_ns = 0

    def __call__(self) -> None:
        begin_ns = time.thread_time_ns()
        self._weights.sum()
        self.took_ns = time.thread_time_ns() - begin_ns


class InstantRunner:
    """Draws the same token for everybody at once, with the caches swept."""

    def __init__(self, sweep: CacheSweep):
        self._sweep = sweep

    def launch(self, plan: StepPlan) -> LaunchedStep:
        sampled = {item.request.id: [7] for item in plan.scheduled if item.samples}
        now_ns = time.monotonic_ns()
        return LaunchedStep(plan, now_ns, now_ns, sampled)

    def collect(self, launched: LaunchedStep) -> StepOutcome:
        self._sweep()
        now_ns = time.monotonic_ns()
        return StepOutcome(launched.state, now_ns, now_ns, launched.launched_ns, now_ns, 0)

    def begin(self, request: Request) -> None: ...
    def forget(self, request_id: str) -> None: ...
    def close(self) -> None: ...


class Side:
    """A loop and a front that take part with `full` or with `off`."""

    def __init__(self, telemetry: str, streams: int, output_tokens: int, sweep: CacheSweep, folder: Path):
        self._output_tokens, self._sweep = output_tokens, sweep
        self._number = 0
        self._dice = np.random.default_rng(1)
        self._context = zmq.Context.instance()
        self._from_core, self._to_front = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        for socket in (self._from_core, self._to_front):
            socket.set_hwm(0)
        address = f"ipc://{folder}/{telemetry}"
        self._from_core.bind(address)
        self._to_front.connect(address)
        config = EngineConfig(
            model="", telemetry=telemetry, max_num_seqs=streams, max_num_batched_tokens=4096,
            run_dir=folder / "run" if telemetry == "full" else None,
        )  # fmt: skip
        self.front = Telemetry(config) if telemetry == "full" else NoTelemetry(config)
        self.front.costs = StepCosts(SHAPE)
        scheduler = make_scheduler(config, BLOCKS, None, planning(config))
        self._engine = Engine(scheduler, InstantRunner(sweep), make_observer(config, SHAPE, scheduler), self._send)
        self._waiting = self._requests([output_tokens * (index + 1) // streams for index in range(streams)])
        self._end_ns = time.monotonic_ns()

    def close(self) -> None:
        for socket in (self._from_core, self._to_front):
            socket.close(linger=0)
        self.front.close()

    def core_us(self) -> float:
        """One turn of the loop: what ended in the last one has been replaced."""
        begin_ns = time.thread_time_ns()
        self._engine.receive(self._waiting, self._end_ns)
        self._end_ns = self._engine.step()
        return (time.thread_time_ns() - begin_ns - self._sweep.took_ns) / 1e3

    def front_us(self) -> float:
        """Receives the messages of a turn. The requests that ended are replaced outside the time."""
        self._sweep()
        begin_ns, ended = time.thread_time_ns(), 0
        while self._from_core.poll(0):
            message = messages.decode_from_core(self._from_core.recv())
            if isinstance(message, messages.Tokens):
                self.front.tokens(message)
            else:
                self.front.observed(message)
                ended += len(message.ended)
        took_ns = time.thread_time_ns() - begin_ns
        self._waiting = self._requests([self._output_tokens] * ended)
        return took_ns / 1e3

    def fold_us(self) -> float:
        begin_ns = time.thread_time_ns()
        self.front._fold_steps()
        return (time.thread_time_ns() - begin_ns) / 1e3

    def _send(self, message: messages.Tokens | messages.Observed) -> None:
        self._to_front.send(messages.encode(message), copy=False)

    def _requests(self, lengths: list[int]) -> list[messages.Submit]:
        prompts = self._dice.integers(100, 2000, (len(lengths), PROMPT_TOKENS)).tolist()
        submitted = []
        for prompt, length in zip(prompts, lengths, strict=True):
            self._number += 1
            sampling = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
            submitted.append(messages.Submit(f"cmpl-{self._number:032x}", prompt, sampling, time.monotonic_ns()))
        return submitted


def measure(streams: int, steps: int, output_tokens: int) -> dict[str, float]:
    """Mean microseconds a step: of the loop and the front without telemetry, and what telemetry adds."""
    with tempfile.TemporaryDirectory() as folder:
        sweep = CacheSweep()
        sides = {name: Side(name, streams, output_tokens, sweep, Path(folder)) for name in ("off", "full")}
        freeze_startup_objects()
        took: dict[tuple[str, str], list[float]] = {(place, name): [] for place in ("core", "front") for name in sides}
        folds: list[float] = []
        fold_every = round(FOLD_SECONDS / STEP_SECONDS)
        for step in range(WARM_STEPS + steps):
            for name in sorted(sides, reverse=step % 2 == 1):
                took["core", name].append(sides[name].core_us())
                time.sleep(0.0001)  # the socket's own thread hands the messages over
                took["front", name].append(sides[name].front_us())
            if step % fold_every == fold_every - 1:
                folds.append(sides["full"].fold_us())
        for side in sides.values():
            side.close()
        gc.unfreeze()
    mean = {key: float(np.mean(values[WARM_STEPS:])) for key, values in took.items()}
    fold = float(np.mean(folds[1:])) / fold_every
    return {
        "core off": mean["core", "off"],
        "core": mean["core", "full"] - mean["core", "off"],
        "front off": mean["front", "off"],
        "front": mean["front", "full"] - mean["front", "off"] + fold,
        "fold": fold,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2048, help="steps that are averaged")
    parser.add_argument("--repeats", type=int, default=5, help="starts, of which the median and the range are shown")
    parser.add_argument(
        "--output-tokens", type=int, default=OUTPUT_TOKENS, help="of each request; by default none ends"
    )
    parser.add_argument("-c", "--streams", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    print(f"{'streams':>8}" + "".join(f"{name:>24}" for name in ("core off", "core", "front off", "front", "fold")))
    for streams in options.streams:
        found = [measure(streams, options.steps, options.output_tokens) for _ in range(options.repeats)]
        cells = []
        for name in found[0]:
            values = sorted(repeat[name] for repeat in found)
            cells.append(f"{np.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})")
        print(f"{streams:>8}" + "".join(f"{cell:>24}" for cell in cells) + "   us a step", flush=True)


if __name__ == "__main__":
    main()
