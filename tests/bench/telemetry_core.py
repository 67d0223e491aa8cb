"""What telemetry takes of a real step in the core, with the model between two steps: full books against none.

    python -m tests.bench.telemetry_core tiny-model -c 1 -c 8 -c 32

One process, one model, two loops over it, in turns: each serves the same requests from a cold pool, so that a pair
differs in its books only, and not in where a process happens to lie in memory. After each step the model's weights have
driven the books out of the caches, so that this is several times what `telemetry_step` says; messages go to another
process, which reads and drops them. Of each load the median step counts, and its 95th percentile: what meets some steps
of a hundred (other machines that take the core) moves neither of the books' costs. A figure is the median over pairs of
full less off, with a 95 % interval of the bootstrap. What the front does is not in it: `overhead` has that.
"""

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
import zmq

from engine import garbage, messages
from engine.books import make_books
from engine.config import EngineConfig
from engine.core import build
from engine.engine import Engine, make_scheduler
from engine.sampling import SamplingParams
from tests.bench.overhead import Cost, cost

PROMPT_TOKENS, SETTLING_STEPS, TIMED_STEPS = 64, 10, 100
PERCENTILES = (50, 95)  # of the steps of one load


def drop_messages(address: str) -> None:
    """The other end: reads until it is told to stop."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.connect(address)
        while socket.recv():
            pass


def loops(model: str, publish) -> dict[str, Engine]:
    """Two loops over one runner, by what they book. Only one may have work at a time."""
    configs = {name: EngineConfig(model=model, telemetry=name, prefix_caching=False) for name in ("off", "full")}
    off, ready = build(configs["off"], 0, publish)
    scheduler = make_scheduler(configs["full"], ready.num_kv_blocks)
    books = make_books(configs["full"], ready.shape, scheduler)
    return {"off": off, "full": Engine(scheduler, off.runner, books, publish, overlap=off.overlap)}


def step_times(engine: Engine, streams: int) -> np.ndarray:
    """Microseconds of each of TIMED_STEPS."""
    sampling = SamplingParams(max_tokens=SETTLING_STEPS + TIMED_STEPS + 2, temperature=0.0, ignore_eos=True)
    begin_ns = time.monotonic_ns()
    asked = [messages.Submit(f"cmpl-{i:032x}", [100 + i] * PROMPT_TOKENS, sampling, begin_ns) for i in range(streams)]
    engine.receive(asked, begin_ns)
    for _ in range(SETTLING_STEPS):
        engine.receive([], engine.step())
    read_ns = [time.monotonic_ns()]
    for _ in range(TIMED_STEPS):
        engine.receive([], engine.step())
        read_ns.append(time.monotonic_ns())
    while engine.has_work:
        engine.receive([], engine.step())
    return np.diff(read_ns) / 1e3


def measure(engines: dict[str, Engine], streams: int, pairs: int) -> tuple[dict[str, float], dict[str, Cost]]:
    """Microseconds of a step without books, and what the books add, by figure."""
    took = {name: [] for name in engines}
    for pair in range(pairs + 1):
        for name in ("full", "off") if pair % 2 else ("off", "full"):
            took[name].append(step_times(engines[name], streams))
    full, off = (np.stack(took[name][1:]) for name in ("full", "off"))  # the first pair warms up
    without = {f"p{percent}": np.percentile(off, percent, axis=1) for percent in PERCENTILES}
    with_them = {f"p{percent}": np.percentile(full, percent, axis=1) for percent in PERCENTILES}
    return (
        {name: float(np.median(values)) for name, values in without.items()},
        {name: cost(list(with_them[name] - values)) for name, values in without.items()},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("-c", "--streams", type=int, action="append")
    parser.add_argument("--pairs", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.PUSH) as outbox:
        address = f"ipc://{Path(folder) / 'messages'}"
        outbox.bind(address)
        reader = multiprocessing.get_context("spawn").Process(target=drop_messages, args=(address,), daemon=True)
        reader.start()
        engines = loops(options.model, lambda outputs: outbox.send(messages.encode(outputs), copy=False))
        garbage.settle()
        print("streams         us a step, off   books, us a step (95 % interval)    books, %")
        for streams in options.streams or [1, 8, 32]:
            without, added = measure(engines, streams, options.pairs)
            for name, books in added.items():
                interval = f"{books.median:+.1f} ({books.low:+.1f} to {books.high:+.1f})"
                percent = 100 * books.median / without[name]
                print(f"{streams:7} {name:>6} {without[name]:15.0f} {interval:>34} {percent:+11.2f}")
        outbox.send(b"")
        reader.join()


if __name__ == "__main__":
    main()
