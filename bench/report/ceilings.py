"""The measured ceilings that a benchmark stands beside, and which of them bounds an engine."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from bench.json_process import ROOT, environment
from bench.results import BenchError
from sojourn.metrics.compute.roofline import Ceilings, device_name, load_ceilings
from sojourn.metrics.errors import CalibrationError


def measured_ceilings(device: str, show: Callable[[str], None]) -> Ceilings:
    """Of `device` as an engine names it; measured now where none are stored. Nothing else may run meanwhile."""
    name = device_name(None if device == "cpu" else device)
    try:
        return load_ceilings(name)
    except CalibrationError:
        show(f"measuring the ceilings of {name} (once)")
    kind = "cpu" if device == "cpu" else "cuda"
    command = [sys.executable, "-m", "sojourn", "calibrate", "device", "--device", kind]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise BenchError(f"the ceilings of {name} cannot be measured: {done.stderr.strip()}")
    return load_ceilings(name)


def precision_of(settings: Mapping[str, Any], dtype: str) -> str:
    """The precision of the arithmetic. Weights of 16 bits on a CPU are read as such, but multiplied in float32."""
    return "int8" if settings.get("weights") == "int8" else dtype
