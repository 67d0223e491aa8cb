"""What telemetry adds to each step in the core while requests come and go.

    python -m bench.telemetry_traffic tiny-model -c 1 -c 8 -c 32

Two loops over one model in one process, with telemetry off and with full telemetry, get the same requests at the same
steps, in turns. A new request follows each one that ends. So step 17 of one loop does the work of step 17 of the other,
and whatever else runs on the machine hits both. Messages go to another process, which drops them.

A step has the parts PARTS. The part `wait`, in which the model computes, is not compared: other work on the machine
hits it most. So the cost of a colder cache for the model is missing, and every figure is a lower bound. What
telemetry adds to a step is the median of the differences over turns. The loss of tokens/s and the rise of the 99th
percentile of the gaps between messages follow from these medians. Intervals are 95% bootstrap intervals over turns.
Then come the microseconds added to steps with a prompt, to the step behind one, and to all others; by part with
`--parts`. Work between requests, when no request waits, is not counted.
"""

import argparse
import contextlib
import copy
import multiprocessing
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import zmq

from bench.report.estimate import Estimate
from bench.shapes import model_to_bench
from sojourn.engine import core, messages
from sojourn.engine.config import EngineConfig
from sojourn.engine.loop.engine import Engine
from sojourn.engine.loop.scheduling import make_scheduler
from sojourn.engine.process import freeze_startup_objects
from sojourn.engine.request.plan import LaunchedStep, StepOutcome, StepPlan
from sojourn.engine.sampling import SamplingParams
from sojourn.engine.techniques.planning import planning
from sojourn.engine.telemetry.observer import make_observer

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 128
STEPS = 2 * OUTPUT_TOKENS  # steps of a turn that count
WARM_TURNS = 2
RESAMPLES = 400
PARTS = ("plan", "launch", "wait", "collect", "commit", "after")  # the tokens go out between the last two
HOST = [index for index, part in enumerate(PARTS) if part != "wait"]


class TimedLoop:
    """A loop over a runner that other loops use too. Records when each part of a step began."""

    def __init__(self, config: EngineConfig, first: Engine, ready: messages.Ready, outbox: zmq.Socket):
        self._runner = copy.copy(first.runner)  # the same weights and the same KV cache
        self._runner.entropy_probe = copy.copy(first.runner.entropy_probe) if config.telemetry == "full" else None
        self._outbox = outbox
        scheduler = make_scheduler(config, ready.num_kv_blocks, None, planning(config, first.runner))
        self.engine = Engine(scheduler, self, make_observer(config, ready.shape, scheduler), self._publish)
        self.begin, self.forget = self._runner.begin, self._runner.forget
        self._num_requests = 0
        self._num_ended = 0  # by the last step
        self._published_ns = 0  # when the tokens of the last step went out
        self._stamps: list[list[int]] = []  # of each step of this turn
        self.has_prompts: list[bool] = []  # of the last turn

    def turn(self, streams: int) -> np.ndarray:
        """Microseconds of each part, [STEPS, PARTS], from when all streams are running."""
        lengths = deque(OUTPUT_TOKENS * (index + 1) // streams for index in range(streams))
        lengths += [OUTPUT_TOKENS] * (2 * streams)
        prompts = np.random.default_rng(self._num_requests).integers(100, 2000, (len(lengths), PROMPT_TOKENS)).tolist()
        arriving, begin_ns = streams, time.monotonic_ns()
        self._stamps, self.has_prompts = [], []
        while arriving or self.engine.has_work:
            if not self.engine.has_work:
                self.engine.flush()
                begin_ns = time.monotonic_ns()
            arriving = min(arriving, len(lengths))
            arrivals = [self._submit(prompts.pop(), lengths.popleft(), begin_ns) for _ in range(arriving)]
            self._num_ended = 0
            self._stamps.append([begin_ns])
            self.engine.receive(arrivals, begin_ns)
            begin_ns = self.engine.step()
            self._stamps[-1] += (self._published_ns, begin_ns)
            arriving = self._num_ended if lengths else 0
        self.engine.flush()
        self.has_prompts = self.has_prompts[OUTPUT_TOKENS : OUTPUT_TOKENS + STEPS]
        return np.diff(self._stamps[OUTPUT_TOKENS : OUTPUT_TOKENS + STEPS], axis=1) / 1e3

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._stamps[-1].append(time.monotonic_ns())
        launched = self._runner.launch(plan)
        self._stamps[-1].append(time.monotonic_ns())
        self.has_prompts.append(plan.has_prompts)
        return launched

    def collect(self, launched: LaunchedStep) -> StepOutcome:
        outcome = self._runner.collect(launched)
        self._stamps[-1] += (outcome.waited_ns, time.monotonic_ns())
        return outcome

    def _submit(self, prompt: list[int], tokens: int, now_ns: int) -> messages.Submit:
        self._num_requests += 1
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return messages.Submit(f"{self._num_requests:032x}", prompt, sampling, now_ns)

    def _publish(self, message: messages.Tokens | messages.Observed) -> None:
        self._outbox.send(messages.encode(message), copy=False)
        if isinstance(message, messages.Tokens):
            self._published_ns = time.monotonic_ns()
            self._num_ended += sum(output.finish_reason is not None for output in message.outputs)


@contextlib.contextmanager
def two_loops(model: str, load_format: str, threads: int) -> Iterator[dict[str, TimedLoop]]:
    """Both loops. Another process reads their messages."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.PUSH) as outbox:
        address = f"ipc://{Path(folder) / 'messages'}"
        outbox.bind(address)
        reader = multiprocessing.get_context("spawn").Process(target=drop_messages, args=(address,), daemon=True)
        reader.start()
        configs = {
            name: EngineConfig(
                model=model, load_format=load_format, telemetry=name, prefix_caching=False, threads=threads
            )
            for name in ("off", "full")
        }
        # The runner needs room for the requests of both.
        room = 2 * configs["full"].max_num_seqs
        first, ready = core.build(configs["full"].model_copy(update={"max_num_seqs": room}), 0, lambda message: None)
        if first.overlap:
            raise SystemExit("telemetry_traffic needs the CPU: parts of overlapping steps cannot be told apart")
        loops = {name: TimedLoop(config, first, ready, outbox) for name, config in configs.items()}
        freeze_startup_objects()
        try:
            yield loops
        finally:
            outbox.send(b"")
            reader.join()


def drop_messages(address: str) -> None:
    """Reads until an empty message comes."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.connect(address)
        while socket.recv():
            pass


def measure(loops: dict[str, TimedLoop], streams: int, turns: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Microseconds of each part with telemetry off, and what full telemetry adds, both [turns, STEPS, PARTS]; which
    steps compute a prompt."""
    took: dict[str, list[np.ndarray]] = {name: [] for name in loops}
    for number in range(WARM_TURNS + turns):
        for name in sorted(loops, reverse=number % 2 == 1):
            parts_us = loops[name].turn(streams)
            if number >= WARM_TURNS:
                took[name].append(parts_us)
    assert loops["off"].has_prompts == loops["full"].has_prompts, "the loops did different work"
    off, full = (np.stack(took[name]) for name in ("off", "full"))
    return off, full - off, np.array(loops["off"].has_prompts)


def gaps(parts_us: np.ndarray) -> np.ndarray:
    """From each message to the next: [..., STEPS - 1] of [..., STEPS, parts]."""
    return parts_us[..., :-1, -1] + parts_us[..., 1:, :-1].sum(axis=-1)


def percents(off_us: np.ndarray, added_us: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Tokens/s lost and the rise of the 99th percentile. `counts`: the steps that a running stream waits for."""
    off, added = np.median(off_us, axis=0), np.median(added_us, axis=0)
    lost = 1 - off.sum() / (off.sum() + added[:, HOST].sum())
    without, more = gaps(off)[counts[1:]], gaps(added[:, HOST])[counts[1:]]
    return 100 * lost, 100 * (np.percentile(without + more, 99) / np.percentile(without, 99) - 1)


def estimates(off_us: np.ndarray, added_us: np.ndarray, counts: np.ndarray) -> list[Estimate]:
    """`percents` with their intervals."""
    resamples = np.random.default_rng(0).integers(0, len(off_us), (RESAMPLES, len(off_us)))
    found = [percents(off_us[turns], added_us[turns], counts) for turns in resamples]
    low, high = np.percentile(found, (2.5, 97.5), axis=0).tolist()
    return [Estimate(*each) for each in zip(percents(off_us, added_us, counts), low, high, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a checkpoint, or a shape such as 100m")
    parser.add_argument(
        "-c", "--streams", type=int, action="append", choices=range(1, OUTPUT_TOKENS // 2 + 1), metavar="N"
    )
    parser.add_argument("--threads", type=int, default=0, help="of the model; 0 is one for each core")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--parts", action="store_true", help="also in which part of a step the time is added")
    options = parser.parse_args()
    columns = ("us a step, off", "tokens/s lost, %", "p99 ITL gained, %")
    with tempfile.TemporaryDirectory() as scratch:
        model, load_format = model_to_bench(options.model, Path(scratch))
        with two_loops(model, load_format, options.threads) as loops:
            print(f"streams {columns[0]:>15}   {columns[1]:20}  {columns[2]:20}  us added: prompt   behind    other")
            for streams in options.streams or [1, 8, 32]:
                report(streams, *measure(loops, streams, options.turns), by_part=options.parts)


def report(streams: int, off_us: np.ndarray, added_us: np.ndarray, prompt: np.ndarray, *, by_part: bool) -> None:
    """Prints a row, and one for each part."""
    counts = ~prompt if streams == 1 else np.full(STEPS, True)
    lost, p99 = (f"{estimate:+.1f}" for estimate in estimates(off_us, added_us, counts))
    behind = np.roll(prompt, 1) & ~prompt
    added = np.median(added_us, axis=0)
    kinds = [added[chosen].mean(axis=0) for chosen in (prompt, behind, ~prompt & ~behind)]
    cells = " ".join(f"{parts[HOST].sum():+8.1f}" for parts in kinds)
    print(f"{streams:7} {np.median(off_us.sum(axis=2)):15.0f}   {lost:20}  {p99:20}          {cells}")
    for index, part in enumerate(PARTS if by_part else ()):
        print(f"{part:>78}" + " ".join(f"{parts[index]:+8.1f}" for parts in kinds))


if __name__ == "__main__":
    main()
