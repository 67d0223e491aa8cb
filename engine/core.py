"""The core process: owns the device and runs the loop. Started by the front, spoken to over ZeroMQ, never by hand.

python -m sojourn.engine.core FRONT_PID: imports torch, then reads a line of JSON:
{"sockets": folder, "first_step": number,
"config": settings, "wanted_ns": moment, "spawned_ns": moment}. Until that line comes the process is a spare; the end of
its input ends it.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import zmq
from msgspec.structs import replace

from sojourn.engine import FIRST_LINE_NS, messages
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.loop.engine import Engine
from sojourn.engine.loop.scheduling import make_scheduler
from sojourn.engine.process import (
    end_with_parent,
    freeze_startup_objects,
    keep_cupti,
    let_threads_sleep,
    name_process,
    num_cores,
)
from sojourn.engine.request.token_budget import FixedBudget, LearningBudget, StepTarget, TokenBudget
from sojourn.engine.techniques.planning import around
from sojourn.engine.telemetry.observer import make_observer
from sojourn.metrics.compute.startup import StartupClock
from sojourn.metrics.errors import SojournError

if TYPE_CHECKING:
    from sojourn.engine.runner.bed import Bed
    from sojourn.engine.runner.runner import ModelRunner
    from sojourn.engine.techniques.group.runner import GroupRunner

BEAT_NS = 900_000_000  # the loop wakes each second, and may do so a little early


def main() -> int:
    """The exit code: 0 when the front ended it, 1 where the model cannot be served."""
    front_pid = int(sys.argv[1])
    # Ctrl-C in a terminal, or SIGTERM to a process group, reach us too; the front decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(front_pid)
    name_process("sojourn-spare")
    with contextlib.suppress(ImportError):  # `build` raises it again, when there is a front to tell
        _import_torch()
    imported_ns = time.monotonic_ns()
    work = sys.stdin.readline()
    if not work:
        return 0
    name_process("sojourn-core")
    given = json.loads(work)
    startup = StartupClock.of_process(given.pop("wanted_ns"), given.pop("spawned_ns"), FIRST_LINE_NS, imported_ns)
    return run(front_pid, startup, **given)


def run(front_pid: int, startup: StartupClock, sockets: str, first_step: int, config: dict) -> int:
    """Loads the model, and computes until the front ends it."""
    mailbox = Mailbox(Path(sockets))
    startup.enter("setup")
    try:
        settings = EngineConfig.model_validate(config)
        engine, ready = build(
            settings, first_step, mailbox.publish, streams=True, startup=startup, folder=Path(sockets)
        )
        freeze_startup_objects()
        mailbox.publish(replace(ready, startup=startup.startup()))
        loop(engine, mailbox, front_pid)
        engine.flush()
        engine.close()
    except SojournError as error:  # its sentence says all
        mailbox.publish(messages.Failed(str(error)))
        return 1
    except Exception as error:
        mailbox.publish(messages.Failed(f"{type(error).__name__}: {error}"))
        raise
    finally:
        mailbox.close()
    return 0


def _import_torch() -> ModuleType:
    """torch, and with it all that computes: most of the time between the start of a process and its model."""
    let_threads_sleep(os.environ, sys.modules)
    keep_cupti(os.environ)
    import torch

    import sojourn.engine.profile_burst
    import sojourn.engine.runner.runner  # noqa: F401

    return torch


class Mailbox:
    """The ways from and to the front, whose ends it has bound in `folder`."""

    def __init__(self, folder: Path):
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.connect(f"ipc://{folder}/to-core")
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(f"ipc://{folder}/from-core")
        self._unreadable = 0
        self._beat_ns = 0

    def publish(self, message: messages.FromCore) -> None:
        self._outbox.send(messages.encode(message), copy=False)

    def wait(self, timeout_ms: int) -> bool:
        """Whether a message is there, now or in that time."""
        return bool(self._inbox.poll(timeout=timeout_ms))

    def read(self) -> Iterator[messages.ToCore]:
        """The messages that are there. Those of strangers are dropped and counted."""
        while self._inbox.poll(timeout=0):
            try:
                yield messages.decode_to_core(self._inbox.recv())
            except messages.UNREADABLE:
                self._unreadable += 1

    def beat(self, now_ns: int) -> None:
        """Once a second: the loop turns."""
        if now_ns - self._beat_ns >= BEAT_NS:
            self._beat_ns = now_ns
            self.publish(messages.Beat(self._unreadable))
            self._unreadable = 0

    def close(self) -> None:
        self._outbox.close(linger=1000)
        self._inbox.close()
        self._context.term()


def build(
    config: EngineConfig,
    first_step: int,
    publish,
    *,
    streams: bool = False,
    startup: StartupClock | None = None,
    folder: Path | None = None,
) -> tuple[Engine, messages.Ready]:
    """Loads the model and makes the loop around it. Raises ModelError with a sentence.

    `streams`: this is the core process of a server. Somebody reads each token as it comes, so
    max_num_batched_tokens=auto limits steps with decodes; and a parallel group whose rank is lost ends the process.
    `folder`: where the sockets of a parallel group are made.
    """
    startup = startup or StartupClock()
    torch = _import_torch()
    from sojourn.engine.runner.memory_plan import window_of
    from sojourn.engine.techniques.computing import make_runner, settled

    config = settled(config)
    threads = config.threads or max(1, num_cores() // config.num_ranks)
    torch.set_num_threads(threads)
    runner = make_runner(config, startup, folder, ends_process=streams)
    inner, placed = runner.inner, runner.inner.placed
    with startup.phase("warm_up"):
        budget = _token_budget(config, runner, streams=streams)
    guests = around(config, runner)  # behind the steps that the budget measured
    window, num_blocks = window_of(config, inner.shape, placed.max_tokens), inner.memory.num_kv_blocks
    scheduler = make_scheduler(config, num_blocks, budget, guests.techniques, window, guests.tier_indexes)
    observer = make_observer(config, inner.shape, scheduler)
    dtype = str(placed.dtype).removeprefix("torch.")
    ready = messages.Ready(
        model_name=config.served_model_name or model_folder(config.model).name,
        device=torch.cuda.get_device_name() if placed.device.type == "cuda" else "cpu",
        dtype=dtype,
        threads=threads,
        max_model_len=placed.max_model_len,
        num_kv_blocks=num_blocks,
        block_size=config.block_size,
        weights=placed.model.held_as or dtype,
        weight_bytes=placed.model.weight_bytes,
        num_parameters=placed.model.num_parameters,
        shape=inner.shape,
        memory=inner.memory,
        frees_window=window is not None and window.most_blocks(config.block_size) <= num_blocks,
        checkpoint_format=placed.model.checkpoint_format,
        weight_error=inner.weight_error,
        changes_outputs=config.changes_outputs,
        expert_exchange=None if config.expert_parallel == 1 else config.expert_exchange,
        kv_address=guests.kv_address,
    )
    engine = Engine(
        scheduler, runner, observer, publish, first_step=first_step, overlap=inner.overlap,
        pipeline_stages=config.pipeline_parallel,
    )  # fmt: skip
    if config.faults is not None:
        from sojourn.engine.faults.core import plant_in_core
        from sojourn.engine.faults.plan import planned

        plant_in_core(engine, planned(config.faults), on_gpu=placed.device.type == "cuda")
    return engine, ready


def _token_budget(config: EngineConfig, runner: "ModelRunner | GroupRunner", *, streams: bool) -> TokenBudget:
    placed, shape = runner.inner.placed, runner.inner.shape
    if not streams or config.max_num_batched_tokens != "auto":
        return FixedBudget(placed.max_tokens)
    from sojourn.engine.runner.measured_steps import measured_steps  # torch is loaded by now

    measured = measured_steps(
        runner, shape, most_tokens=placed.max_tokens, max_num_seqs=config.max_num_seqs,
        max_model_len=placed.max_model_len, num_slots=runner.inner.memory.kv_tokens, block_size=config.block_size,
    )  # fmt: skip
    return LearningBudget(placed.max_tokens, shape, StepTarget(config.objective_tpot_ms), measured)


def loop(engine: Engine, mailbox: Mailbox, front_pid: int) -> None:
    """Steps while there is work, sleeps while there is none, until told to stop or until the front is gone."""
    from sojourn.engine.profile_burst import ProfileBurst  # torch is loaded by now, as it has to be
    from sojourn.engine.runner.bed import Bed

    begin_ns = time.monotonic_ns()
    burst: ProfileBurst | None = None
    bed = Bed(engine.runner.inner)
    while os.getppid() == front_pid:  # else the front is gone
        mailbox.beat(begin_ns)
        if not engine.has_work:
            engine.flush()
            # Neither a compiled grammar nor a deadline wakes this loop: it has to look.
            watches = engine.is_preparing or burst is not None
            has_message = mailbox.wait(1 if watches else 1000)
            begin_ns = time.monotonic_ns()
            if not has_message and not watches:
                continue
        arrived, is_stopped = [], False
        for message in mailbox.read():
            if isinstance(message, messages.Stop):
                is_stopped = True
                break
            if isinstance(message, messages.Profile):
                burst = ProfileBurst(message, engine)
            elif isinstance(message, messages.Sleep | messages.Wake):
                mailbox.publish(_fall_asleep(engine, bed) if isinstance(message, messages.Sleep) else _wake(bed))
            else:
                arrived.append(message)
        engine.receive(arrived, begin_ns)
        if is_stopped:  # messages before it were received
            return
        if burst is not None and (answer := burst.advance()) is not None:
            mailbox.publish(messages.Profiled(answer))
            burst = None
        if engine.has_work:
            begin_ns = engine.step()


def _fall_asleep(engine: Engine, bed: "Bed") -> messages.Slept:
    """Nothing is under way: the front sees to that. What tiers are to store is stored before the pool goes."""
    engine.scheduler.pool.forget_cached()
    engine.flush()
    return messages.Slept(*bed.lie_down())


def _wake(bed: "Bed") -> messages.Woken:
    bed.leave()
    return messages.Woken()


if __name__ == "__main__":
    sys.exit(main())
