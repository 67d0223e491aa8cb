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
    "numpy",
    "pyarrow",
    "tokenizers",
    "transformers",
    "fastapi",
    "uvicorn",
)
_GPU_QUERY = ("name", "memory.total", "driver_version")


def hardware() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory, and the NVIDIA devices, if any."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "cpu": _cpu_model(),
        "cores": len(cores),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": _gpus(),
        "system": platform.platform(),
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
