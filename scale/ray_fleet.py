"""Ray and `ray_app.py` on this machine alone; `sojourn server fleet up --router ray` starts it.

It runs in Ray's environment and imports nothing of Sojourn. All of Ray's processes end with this one, and all their
ports are on the loopback.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

SETTINGS = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a cluster of one host: Ray then listens on the loopback only
    "RAY_AUTH_MODE": "token",  # other users of the machine reach the loopback, too
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",
}
OBJECT_STORE_BYTES = 100 << 20  # nothing goes through it
LOGICAL_CPUS = 1024  # servers of one machine share its cores, as they do behind any router
POLL_SECONDS = 0.3
NAME = "sojourn"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="port of Ray's proxy, on the loopback")
    parser.add_argument("--application", required=True, help="options of ray_app.py, as JSON")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # also in the middle of a start
    os.environ.update(SETTINGS | {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
    os.environ.pop("RAY_ADDRESS", None)  # of another cluster
    holder = next(each for each in Path(__file__).parents if (each / "sojourn" / "__init__.py").is_file())
    sys.path.insert(0, str(holder))  # of this package: a checkout, or a folder of installed packages
    folder = tempfile.mkdtemp(prefix="sojourn-ray-")
    try:
        serve_until_signal(json.loads(given.application), given.port, folder)
    except CannotServe as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


class CannotServe(Exception):
    """A sentence that says why."""


def serve_until_signal(application: dict[str, Any], port: int, folder: str) -> None:
    """Raises CannotServe."""
    check_port(port)
    import ray
    from ray import serve

    from sojourn.scale.ray_app import SERVERS_FILE, Options, build

    stopping = threading.Event()
    try:
        ray.init(address="local", include_dashboard=False, num_cpus=LOGICAL_CPUS, log_to_driver=False,
                 object_store_memory=OBJECT_STORE_BYTES, _temp_dir=folder)  # fmt: skip
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopping.set())  # in the place of Ray's own
        options = Options(**application, loopback_only=True)
        options = on_these_devices(options, int(ray.cluster_resources().get("GPU", 0)))
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        target = serve.RunTarget(build(options), name=NAME, route_prefix="/")
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        has_run = False
        while not stopping.wait(POLL_SECONDS):
            seen = serve.status().applications[NAME]
            if seen.status == "DEPLOY_FAILED":
                raise CannotServe(failure(seen, options.folder))
            if seen.status == "RUNNING" and not has_run:
                has_run = True
                with (Path(options.folder) / SERVERS_FILE).open("a") as file:
                    file.write(json.dumps({"state": "running"}) + "\n")
    finally:
        serve.shutdown()  # waits for open requests
        ray.shutdown()


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise CannotServe(f"port {port} of the loopback: {error.strerror}; choose another with --port") from None


def on_these_devices(options: Any, found: int) -> Any:
    """Servers on the CPU where the machine has no GPU; else each gets GPUs of its own."""
    if not found:
        return options.model_copy(update={"gpus": 0})
    most = max(options.replicas, options.max_replicas or 0)
    if most * options.gpus > found:
        raise CannotServe(f"{most} servers of {options.gpus} GPUs need {most * options.gpus}, and this machine has "
                          f"{found}; ask for fewer servers, or for --set device=cpu")  # fmt: skip
    return options


def failure(seen: Any, folder: str) -> str:
    """What Ray says, and the last lines of the server that did not start."""
    said = [deployment.message for deployment in seen.deployments.values()] or [seen.message]
    logs = sorted(Path(folder).glob("server-*.log"), key=lambda log: log.stat().st_mtime)
    if logs:
        lines = logs[-1].read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
        return "\n".join(["the servers did not start; the last lines of one:", *(f"  {line}" for line in lines)])
    return f"the servers did not start: {said[0]}"


if __name__ == "__main__":
    sys.exit(main())
