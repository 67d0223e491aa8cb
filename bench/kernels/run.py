"""Single kernels: every file of this folder that has `measure() -> list[Row]`, each in a process of its own."""

import importlib
import subprocess
import sys
from collections.abc import Callable

import msgspec

from bench.json_process import ROOT, environment
from bench.results import BenchError, Report, Row, new_report

# Name of a module of this folder → the device that it needs.
KERNELS = {
    "linear": "any",
    "cpu_kernels": "cpu",
    "triton_attention": "cuda",
    "triton_operations": "cuda",
}
SECONDS = 300  # that one of them may take


def bench_kernels(names: list[str], show: Callable[[str], None], save: Callable[[Report], None]) -> Report:
    """Runs the kernels of `names`, or all that this machine has the device for; `save` gets the report as it grows.
    One that fails is a note."""
    unknown = [name for name in names if name not in KERNELS]
    if unknown:
        raise BenchError(f"kernel {unknown[0]} is not known; known are {', '.join(KERNELS)}")
    import torch

    here = ("any", "cuda") if torch.cuda.is_available() else ("any", "cpu")
    report = new_report("kernels", "single kernels")
    for name in names or [name for name, device in KERNELS.items() if device in here]:
        show(f"{name}: measuring, up to {SECONDS} s")
        command = [sys.executable, "-m", "bench.kernels.run", name]
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            report.notes.append(f"{name}: not done in {SECONDS} s")
            continue
        if done.returncode:
            report.notes.append(f"{name} failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
        else:
            report.rows += msgspec.json.decode(done.stdout.splitlines()[-1], type=list[Row])
        save(report)
    return report


def main() -> None:
    rows = importlib.import_module(f"bench.kernels.{sys.argv[1]}").measure()
    print(msgspec.json.encode(rows).decode())


if __name__ == "__main__":
    main()
