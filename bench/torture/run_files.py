"""Run directories that a kill left: whole enough to be read, and to be compacted."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.torture.server import ROOT
from sojourn.metrics.errors import SojournError
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.directory import RunDirectory


def check_server_run(path: Path) -> list[str]:
    """Faults of the run directory of a server, dead or ended. It is compacted in a copy."""
    with tempfile.TemporaryDirectory(prefix="torture-run-") as folder:
        copy = Path(folder) / "run"
        try:
            shutil.copytree(path, copy)
            before = rows(copy)
            RunDirectory.open(copy).compact()
            after = rows(copy)
        except (SojournError, OSError, ValueError) as error:
            return [f"run directory of the server: {error}"]
    if before != after:
        return [f"run directory of the server: compaction changed its rows: {before} → {after}"]
    return [] if before["requests"] or before["steps"] else ["run directory of the server: it has no rows"]


def rows(path: Path) -> dict[str, int]:
    run = RunDirectory.open(path)
    return {table: len(run.arrow(table)) for table in SCHEMAS}


def check_client_run(path: Path) -> list[str]:
    """Faults of the run directory of a load generator that was killed: `sojourn diagnose` must read it, or say in a
    sentence that there is too little."""
    if not (path / "run.json").exists():
        return []  # killed before it wrote anything
    command = [sys.executable, "-m", "sojourn", "diagnose", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    if "Traceback" in done.stdout + done.stderr or done.returncode not in (0, 1, 4, 5):
        return [
            f"run directory of the load generator: exit code {done.returncode}: {(done.stdout + done.stderr)[-300:]}"
        ]
    return []
