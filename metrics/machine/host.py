"""What a run ran on: the host, its devices and the versions of what took part. Asked for, never imported."""

import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from sojourn.metrics.version import own_version

_PACKAGES = (
    "torch",
    "locust",
    "gevent",
    "httptools",
    "numpy",
    "pyarrow",
    "tokenizers",
    "transformers",
    "fastapi",
    "uvicorn",
)
_GPU_QUERY = ("name", "memory.total", "driver_version")

SAMPLE_SECONDS = 1.0  # between two samples of the table `system`
# A step waits for the slowest of its threads, so what is stolen from one core costs it more than its share (a third of
# two cores doubled its time), and the differences that runs are to tell begin at 1%.
STEAL_WARNS_PERCENT = 1.0


def hardware() -> dict[str, Any]:
    """CPU model, cores that this process may use and those of the host, memory, the NVIDIA devices, if any, and which
    start of the system this is: processes that see the same one share its monotonic clock."""
    return {
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "host_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "system": platform.platform(),
        "boot_id": boot_id(),
    }


def usable_cores() -> int:
    """Cores that this process may use; of a system that does not say which, all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Python and the packages that are installed here."""
    found = {"python": platform.python_version(), "sojourn": own_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def boot_id() -> str | None:
    """Linux draws one at each start; None elsewhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _gpus() -> list[dict[str, str]]:
    """One entry a device, from nvidia-smi; [] without it."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_QUERY)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(_GPU_QUERY, map(str.strip, line.split(",")), strict=False)) for line in answer.splitlines()]


def company() -> str | None:
    """A sentence where other processes take more than a quarter of this machine's CPU, or the hypervisor more than
    STEAL_WARNS_PERCENT: what is measured then is low."""
    before = psutil.cpu_times()
    time.sleep(0.5)
    after = psutil.cpu_times()
    steal, busy = steal_percent(before, after) or 0.0, busy_percent(before, after) or 0.0
    warnings = [f"other work runs here ({busy:.0f}% of the CPU is taken)"] if busy > 25 else []
    if steal > STEAL_WARNS_PERCENT:
        warnings.append(f"the hypervisor gives {steal:.0f}% of the CPU to other machines")
    return " and ".join(warnings) or None


def steal_percent(earlier: Any, later: Any) -> float | None:
    """Of the time of all cores between two `psutil.cpu_times()`, 0 to 100, what the hypervisor gave to other machines
    while this one had work. None where the kernel does not count it, or too little time has passed for its ticks.

    `psutil.cpu_times_percent` would not do: it remembers the last call of each thread, and says 0 at a thread's first
    one; and of less than a second of CPU time it tells the share of a whole second.
    """
    shares = _shares(earlier, later)
    return 100 * shares["steal"] if "steal" in shares else None


def busy_percent(earlier: Any, later: Any) -> float | None:
    """The same of what this machine worked itself."""
    shares = _shares(earlier, later)
    idle = sum(shares.get(kind, 0.0) for kind in ("idle", "iowait", "steal"))
    return 100 * (1 - idle) if shares else None


def _shares(earlier: Any, later: Any) -> dict[str, float]:
    """By kind, of all CPU time between two readings; {} while no tick has passed."""
    kinds = [kind for kind in later._fields if kind not in ("guest", "guest_nice")]  # these are in `user` and `nice`
    spent = {kind: max(0.0, getattr(later, kind) - getattr(earlier, kind)) for kind in kinds}  # iowait may go back
    whole = sum(spent.values())
    return {kind: seconds / whole for kind, seconds in spent.items()} if whole > 0 else {}
