"""The core process: owns the device and runs the loop. Started by the front, spoken to over ZeroMQ, never by hand.

python -m engine.core SOCKET_DIRECTORY FIRST_STEP FRONT_PID < engine-config.json
"""

import os
import signal
import sys
import time
from pathlib import Path

import zmq

from engine import messages
from engine.config import EngineConfig, model_folder
from engine.engine import Engine, make_scheduler
from engine.process import freeze_startup_objects, keep_cupti, let_threads_sleep, num_cores
from engine.telemetry.observer import make_observer


def main() -> None:
    sockets, first_step, front_pid = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    config = EngineConfig.model_validate_json(sys.stdin.read())
    # Ctrl-C in a terminal, or SIGTERM to a process group, reach us too; the front decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    context = zmq.Context()
    inbox, outbox = open_sockets(context, sockets)
    try:
        engine, ready = build(config, first_step, lambda message: outbox.send(messages.encode(message), copy=False))
    except Exception as error:
        outbox.send(messages.encode(messages.Failed(f"{type(error).__name__}: {error}")))
        raise
    else:
        outbox.send(messages.encode(ready))
        freeze_startup_objects()
        loop(engine, inbox, outbox, front_pid)
        engine.flush()
    finally:
        outbox.close(linger=1000)
        inbox.close()
        context.term()


def open_sockets(context: zmq.Context, folder: Path) -> tuple[zmq.Socket, zmq.Socket]:
    """The ways from and to the front, whose ends it has bound in `folder`."""
    inbox = context.socket(zmq.PULL)
    inbox.connect(f"ipc://{folder}/to-core")
    outbox = context.socket(zmq.PUSH)
    outbox.set_hwm(0)
    outbox.connect(f"ipc://{folder}/from-core")
    return inbox, outbox


def build(config: EngineConfig, first_step: int, publish) -> tuple[Engine, messages.Ready]:
    """Loads the model and makes the loop around it. Raises ModelError with a sentence."""
    let_threads_sleep(os.environ, sys.modules)
    keep_cupti(os.environ)
    import torch

    from engine.runner import ModelRunner

    threads = config.threads or num_cores()
    torch.set_num_threads(threads)
    runner = ModelRunner(config, model_folder(config.model))
    scheduler = make_scheduler(config, runner.num_blocks)
    observer = make_observer(config, runner.shape, scheduler)
    dtype = str(runner.dtype).removeprefix("torch.")
    ready = messages.Ready(
        model_name=config.served_model_name or model_folder(config.model).name,
        device=torch.cuda.get_device_name() if runner.device.type == "cuda" else "cpu",
        dtype=dtype,
        threads=threads,
        max_model_len=runner.max_model_len,
        num_kv_blocks=runner.num_blocks,
        block_size=config.block_size,
        weights=runner.model.packed_format or dtype,
        weight_bytes=runner.model.weight_bytes,
        num_parameters=runner.model.num_parameters,
        shape=runner.shape,
        memory=runner.memory,
    )
    return Engine(scheduler, runner, observer, publish, first_step=first_step, overlap=runner.overlap), ready


def loop(engine: Engine, inbox: zmq.Socket, outbox: zmq.Socket, front_pid: int) -> None:
    """Steps while there is work, sleeps while there is none, until told to stop or until the front is gone."""
    from engine.profile_burst import ProfileBurst  # torch is loaded by now, as it has to be

    begin_ns = time.monotonic_ns()
    burst: ProfileBurst | None = None
    while os.getppid() == front_pid:  # else the front is gone
        if not engine.has_work:
            engine.flush()
            # Neither a compiled grammar nor a deadline wakes this loop: it has to look.
            watches = engine.is_preparing or burst is not None
            if not inbox.poll(timeout=1 if watches else 1000) and not watches:
                continue
            begin_ns = time.monotonic_ns()
        arrived, is_stopped = [], False
        while not is_stopped and inbox.poll(timeout=0):
            message = messages.decode_to_core(inbox.recv())
            if isinstance(message, messages.Stop):
                is_stopped = True
            elif isinstance(message, messages.Profile):
                burst = ProfileBurst(message, engine)
            else:
                arrived.append(message)
        engine.receive(arrived, begin_ns)
        if is_stopped:  # messages before it were received
            return
        if burst is not None and (answer := burst.advance()) is not None:
            outbox.send(messages.encode(messages.Profiled(answer)), copy=False)
            burst = None
        if engine.has_work:
            begin_ns = engine.step()


if __name__ == "__main__":
    main()
