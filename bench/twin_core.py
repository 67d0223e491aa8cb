"""The core of twin servers: one model, one loop for each server, of which one runs. Started by `twins`.

python -m bench.twin_core FOLDER NAME...

FOLDER/NAME.json tells where the front of that name listens, and its settings. A line on the standard input names the
loop that runs next; it is stopped by `Stop`, then a line tells that it stands.
"""

import contextlib
import copy
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import zmq

from engine import core, messages
from engine.config import EngineConfig
from engine.engine import Engine, make_scheduler
from engine.process import freeze_startup_objects
from engine.telemetry import step_log
from engine.telemetry.observer import make_books

Publish = Callable[[messages.Outputs], None]


def loops(configs: dict[str, EngineConfig], publish: dict[str, Publish]) -> tuple[dict[str, Engine], messages.Ready]:
    """A loop for each of the configurations, which differ in `telemetry`, over one runner, and what it said of itself.

    They have one KV cache, and a pool of blocks each: what one has computed, another writes over.
    """
    widest = max(configs, key=lambda name: configs[name].telemetry == "full")
    room = len(configs) * configs[widest].max_num_seqs  # for the requests of all of them
    first, ready = core.build(configs[widest].model_copy(update={"max_num_seqs": room}), 0, publish[widest])
    engines = {}
    for name, config in configs.items():
        runner = copy.copy(first.runner)  # the same weights, the same memory
        runner.entropy_probe = copy.copy(first.runner.entropy_probe) if config.telemetry == "full" else None
        scheduler = make_scheduler(config, ready.num_kv_blocks)
        books = make_books(config, ready.shape, scheduler)
        engines[name] = Engine(scheduler, runner, books, publish[name], overlap=first.overlap)
    return engines, ready


@contextlib.contextmanager
def two_loops(model: str, threads: int) -> Iterator[dict[str, Engine]]:
    """A loop without books and one with, over one model. Another process reads what they tell."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context, context.socket(zmq.PUSH) as outbox:
        address = f"ipc://{Path(folder) / 'messages'}"
        outbox.bind(address)
        reader = multiprocessing.get_context("spawn").Process(target=drop_messages, args=(address,), daemon=True)
        reader.start()
        configs = {
            name: EngineConfig(model=model, telemetry=name, prefix_caching=False, threads=threads)
            for name in ("off", "full")
        }
        engines, _ = loops(configs, dict.fromkeys(configs, partial(publish, outbox)))
        freeze_startup_objects()
        try:
            yield engines
        finally:
            outbox.send(b"")
            reader.join()


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    bench_pid = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark decides when this ends
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    orders = {name: _order(folder / f"{name}.json", bench_pid) for name in names}
    context = zmq.Context()
    sockets = {name: core.open_sockets(context, Path(order["sockets"])) for name, order in orders.items()}
    for name, (inbox, _) in sockets.items():
        inbox.bind(stop_address(folder, name))
    configs = {name: EngineConfig(**order["config"]) for name, order in orders.items()}
    step_log.UNTOLD_NS *= len(names)  # of the time that each has
    engines, ready = loops(configs, {name: partial(publish, outbox) for name, (_, outbox) in sockets.items()})
    for _, outbox in sockets.values():
        outbox.send(messages.encode(ready))
    freeze_startup_objects()
    for line in sys.stdin:
        name = line.strip()
        core.loop(engines[name], *sockets[name], bench_pid)
        answers.write("stands\n")
    context.destroy(linger=0)


def stop_address(folder: Path, name: str) -> str:
    """Where the benchmark stops a loop."""
    return f"ipc://{folder}/stop-{name}"


def drop_messages(address: str) -> None:
    """The other end: reads until it is told to stop."""
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.connect(address)
        while socket.recv():
            pass


def publish(outbox: zmq.Socket, outputs: messages.Outputs) -> None:
    outbox.send(messages.encode(outputs), copy=False)


def _order(path: Path, bench_pid: int) -> dict:
    """Waits for what the front has to say."""
    while not path.exists():
        if os.getppid() != bench_pid:
            sys.exit("twin_core: the benchmark is gone")
        time.sleep(0.02)
    return json.loads(path.read_bytes())


if __name__ == "__main__":
    main()
