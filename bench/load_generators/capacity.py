"""How many streams one process of the load generator can time:  python -m bench.load_generators.capacity

A reference server, a process of its own, writes one token to every stream at each step, as a batching engine does.
The error of a stamp is what the client says minus the moment when the server began to write. Run on a quiet machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import yaml

from sojourn.loadgen.target.processes import free_port, load_command

STEP_S = 0.02
START_S = 1.0  # when all streams connect at once; these errors are reported apart


def scenario_of(streams: int, seconds: float, connections: str) -> dict:
    return {
        "name": "capacity", "description": "all streams at once", "target": {"connections": connections},
        "arrivals": {"process": "at_once", "count": streams},
        "workload": {"classes": [{"klass": "k", "prompt_tokens": 16, "output_tokens": round(seconds / STEP_S)}]},
        "objectives": [{"e2e_ms": 1e6, "source": "none"}],
    }  # fmt: skip


def measure(streams: int, seconds: float, processes: int, connections: str, folder: Path) -> dict[str, float]:
    """Errors of all stamps of one run in ms, and what it took of a core."""
    port, run_dir = free_port(), folder / "run"
    timing = json.dumps({"ttft_s": 0.05, "token_s": STEP_S, "in_step": True})
    command = [sys.executable, "-m", "sojourn.loadgen.reference_server.server", timing, "--port", str(port)]
    server = subprocess.Popen(command)
    try:
        file = folder / "capacity.yaml"
        file.write_text(yaml.safe_dump(scenario_of(streams, seconds, connections)))
        wait_until_it_listens(port)
        options = {"processes": processes} if processes > 1 else {}
        load = subprocess.Popen(
            load_command(str(file), f"http://127.0.0.1:{port}", run_dir, options),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        before = cpu_of_children()
        load.wait(120)
        cpu_s = cpu_of_children() - before
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/log") as reply:
            answers = {answer["request_id"]: answer for answer in json.load(reply)["requests"]}
    finally:
        server.terminate()
        server.wait(20)
    rows = pq.read_table(run_dir / "client.parquet").to_pylist()
    errors, steady, begin = [], [], min(row["due_ns"] for row in rows)
    lag = [(row["sent_ns"] - row["due_ns"]) / 1e6 for row in rows if row["sent_ns"]]
    for row in rows:
        written = answers[row["request_id"]]["write_ns"] if row["request_id"] in answers else []
        pairs = list(zip(row["chunk_ns"], written, strict=False))
        errors += [(read - wrote) / 1e6 for read, wrote in pairs]
        steady += [(read - wrote) / 1e6 for read, wrote in pairs if wrote - begin > START_S * 1e9]
    whole = [len(row["chunk_ns"]) for row in rows]
    p50, p99 = np.quantile(steady, [0.5, 0.99])
    return {
        "streams": streams, "stamps": sum(whole), "expected": streams * round(seconds / STEP_S),
        "ok": sum(row["status"] == "ok" for row in rows), "min_ms": min(errors), "p50_ms": p50, "p99_ms": p99,
        "max_ms": max(steady), "p99_with_start_ms": float(np.quantile(errors, 0.99)),
        "sent_late_p99_ms": float(np.quantile(lag, 0.99)), "cpu_s": cpu_s,
    }  # fmt: skip


def wait_until_it_listens(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def cpu_of_children() -> float:
    """Seconds of CPU of the children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--streams", type=int, nargs="+", default=[64, 256, 512, 1024])
    options.add_argument("--seconds", type=float, default=6.0)
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--connections", choices=("per_request", "reuse"), default="per_request")
    chosen = options.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f}; {os.cpu_count()} cores", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for streams in chosen.streams:
            place = Path(folder) / str(streams)
            place.mkdir()
            found = measure(streams, chosen.seconds, chosen.processes, chosen.connections, place)
            print(
                "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()), flush=True
            )


if __name__ == "__main__":
    main()
