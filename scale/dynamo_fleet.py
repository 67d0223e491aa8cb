"""Dynamo's frontend and one worker for each server, on the loopback, as children of this process.

It runs in Dynamo's environment, and imports nothing of Sojourn; `sojourn server fleet up --router dynamo` starts it.
There is no etcd and no NATS: the registry is a temporary folder. KV events go through a proxy of ZeroMQ in this
process, because without one each worker would publish them on all interfaces.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import zmq

WORKER = Path(__file__).with_name("dynamo_worker.py")
PR_SET_PDEATHSIG = 1  # linux/prctl.h
END_SECONDS = 8.0
_LIBC = ctypes.CDLL(None)


def event_proxy() -> str:
    """Passes events on from publishers to subscribers, for as long as this process lives. Returns Dynamo's setting."""
    context = zmq.Context.instance()
    inner, outer = context.socket(zmq.XSUB), context.socket(zmq.XPUB)
    for socket in (inner, outer):
        socket.set_hwm(100_000)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (inner, outer)]
    threading.Thread(target=zmq.proxy, args=(inner, outer), daemon=True).start()
    return f"xsub=tcp://127.0.0.1:{ports[0]} , xpub=tcp://127.0.0.1:{ports[1]}"


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """A child that gets SIGTERM when this process is gone, even after a kill -9."""
    parent = os.getpid()

    def end_with_parent() -> None:
        if sys.platform == "linux":
            _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen([sys.executable, *command], env=environment, preexec_fn=end_with_parent)


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + END_SECONDS
    for process in processes:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="port of the frontend, on the loopback")
    parser.add_argument("--policy", required=True, help="--router-mode of the frontend")
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument("--server", action="append", required=True, help="address of a server; repeatable")
    given = parser.parse_args()
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    with tempfile.TemporaryDirectory(prefix="sojourn-dynamo-") as registry:
        environment = {"DYN_LOG": "warn", "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0"} | os.environ | {
            "DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": registry, "DYN_ZMQ_BROKER_URL": event_proxy(),
            "DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq", "DYN_SELF_HOST_METADATA": "0",
            "DYN_TCP_RPC_HOST": "127.0.0.1", "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
            "DYN_EVENT_PLANE_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        workers, frontend = [], None
        try:
            # First the frontend: what workers publish before it listens is lost.
            frontend = start(
                ["-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(given.port), "--router-mode",
                 given.policy, "--router-min-initial-workers", str(len(given.server)), "--migration-limit", "3"],
                environment,
            )  # fmt: skip
            for server in given.server:
                workers.append(start([str(WORKER), "--server", server, "--model", given.model], environment))
            while not stopping.wait(0.2):
                if frontend.poll() is not None:
                    print(f"Dynamo's frontend ended with exit code {frontend.returncode}", file=sys.stderr)
                    return 1
                if all(worker.poll() is not None for worker in workers):
                    print("all workers ended", file=sys.stderr)
                    return 1
            return 0
        finally:
            end([] if frontend is None else [frontend])
            end(workers)


if __name__ == "__main__":
    sys.exit(main())
