"""Whether a watch stays silent on a healthy server under a steady load: `sojourn watch` as a process of its own.

    python -m bench.watch.silence --into FOLDER [--python .../vllm/bin/python] [--minutes 10]

The server is ours, or with `--python` vLLM with the probe. It gets chats at a rate that it serves with ease. The watch
reads /metrics and records, with objectives. Each line that it says is printed.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import psutil

from bench.engines.servers import HOST, Server, our_server
from bench.json_process import ROOT
from bench.probe.cases import THREADS
from bench.probe.vllm_with_probe import vllm_with_probe
from bench.watch.cases import CHAT, OURS, SLO, VLLM_FLAGS, Case, end_load, start_load

CALM = Case("calm", [CHAT], 1.0)
OBJECTIVES = " ".join(f"{name.removesuffix('_ms')}:{bound:g}" for name, bound in SLO.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", required=True, type=Path)
    parser.add_argument("--python", help="the interpreter of vLLM's environment")
    parser.add_argument("--minutes", type=float, default=10.0)
    chosen = parser.parse_args()
    folder = chosen.into.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if chosen.python:
        server = vllm_with_probe(chosen.python, folder / "vllm", *VLLM_FLAGS, threads=THREADS)
    else:
        server = our_server("ours", "tiny-model", OURS, folder / "ours")
    try:
        server.start()
        watched(folder, server, folder / "vllm" if chosen.python else server.run_dir, 60 * chosen.minutes)
    finally:
        server.stop()


def watched(folder: Path, server: Server, record: Path, seconds: float) -> None:
    url = f"http://{HOST}:{server.port}"
    load = start_load(CALM, folder / server.name, url, seconds + 60)
    words = ["watch", url, "--slo", OBJECTIVES, "--server-run", str(record)]
    with (folder / "said.txt").open("w", encoding="utf-8") as said:
        watch = subprocess.Popen([sys.executable, "-m", "sojourn", *words], cwd=ROOT, stdout=said, stderr=said)
        try:
            time.sleep(seconds)
            spent = psutil.Process(watch.pid).cpu_times()
        finally:
            watch.terminate()
            watch.wait()
            end_load(load)
    print((folder / "said.txt").read_text(encoding="utf-8"))
    cpu_s = spent.user + spent.system
    print(f"{seconds:.0f} s; the watch took {cpu_s:.0f} s of CPU, {cpu_s / seconds:.0%} of a core")


if __name__ == "__main__":
    main()
