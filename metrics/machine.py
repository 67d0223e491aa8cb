"""What a run ran on: the host, its devices and the versions of what took part. Asked for, never imported."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = (
    "sojourn",
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


def hardware() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory, the NVIDIA devices, if any, and which start of the system
    this is: processes that see the same one share its monotonic clock."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "cpu": _cpu_model(),
        "cores": len(cores),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "system": platform.platform(),
        "boot_id": boot_id(),
    }


def versions() -> dict[str, str]:
    """Python and the packages that are installed here."""
    found = {"python": platform.python_version()}
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
    """One entry a device, as nvidia-smi tells; [] without it."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_QUERY)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(_GPU_QUERY, map(str.strip, line.split(",")), strict=False)) for line in answer.splitlines()]


def company() -> str | None:
    """A sentence where other processes take more than a quarter of this machine's CPU: what is measured then is low."""
    taken = psutil.cpu_percent(interval=0.5)
    return f"other work runs here ({taken:.0f}% of the CPU is taken)" if taken > 25 else None
