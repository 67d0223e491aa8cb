"""The files of the repository, for tests that read them all."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_OURS = {".venv", ".git", "build", "runs", "__pycache__"}


def repository_files() -> list[Path]:
    """Those that git knows; in a tree without git, all of its folders but those that tools make."""
    listed = ""
    if shutil.which("git"):
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    found = [ROOT / line for line in listed.splitlines()]
    for folder, inside, names in os.walk(ROOT) if not found else ():
        inside[:] = [name for name in inside if name not in NOT_OURS and not name.endswith(".egg-info")]
        found += [Path(folder) / name for name in names]
    return sorted(path for path in found if path.exists())
