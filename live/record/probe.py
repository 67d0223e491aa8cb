"""Whether the probe can be in a server that is to be started: what its interpreter needs for that."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).parents[2] / "probe"  # of Sojourn; a wheel has none
TIMEOUT_S = 60.0  # of an import on a busy machine


def probe_path(words: Sequence[str]) -> str | None:
    """What PYTHONPATH needs so that the command's interpreter finds the probe: "" if nothing; None where it cannot be
    found there."""
    python = interpreter(words)
    if python is None:
        return None
    for path in ("", *([str(CHECKOUT)] if CHECKOUT.is_dir() else [])):
        try:
            done = subprocess.run(
                [python, "-c", "import sojourn_probe.writer"], env=with_path(os.environ, path), capture_output=True,
                timeout=TIMEOUT_S,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return path
    return None


def with_path(environment: os._Environ[str] | dict[str, str], path: str) -> dict[str, str]:
    """The environment with a folder before the others of PYTHONPATH."""
    found = dict(environment)
    if path:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [path, found.get("PYTHONPATH", "")]))
    return found


def interpreter(words: Sequence[str]) -> str | None:
    """The Python that a command runs in: the command itself, or the first line of the script that it names."""
    program = shutil.which(words[0])
    if program is None:
        return None
    if Path(program).name.startswith("python"):
        return program
    try:
        with open(program, "rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    parts = first[2:].decode("utf-8", "replace").split()
    if parts and Path(parts[0]).name == "env":
        parts = [shutil.which(parts[1]) or ""] if len(parts) > 1 else []
    return parts[0] if parts and "python" in Path(parts[0]).name else None
