"""Inputs that reach different code, few and small enough for the repository: seeds, and a regression test."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(__file__).parent.parent.parent / "tests" / "fuzz" / "corpus"
MAX_BYTES = 4096  # of one input
MAX_TARGET_BYTES = 40_000  # of all inputs of a target


def save(names: Sequence[str], work: Path) -> None:
    """Merges what was found into the corpus of the repository, the smallest inputs first. Seeds of ours stay."""
    for name in names:
        found = work / "corpus" / name
        if not found.is_dir():
            continue
        merged = work / "merged" / name
        shutil.rmtree(merged, ignore_errors=True)
        merged.mkdir(parents=True)
        command = [sys.executable, "-m", "bench.fuzz.one", name, "-merge=1", f"-max_len={MAX_BYTES}"]
        subprocess.run([*command, str(merged), str(found)], check=False, capture_output=True)
        keep(merged, CORPUS / name)


def keep(merged: Path, corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    for file in corpus.iterdir():
        if not file.name.startswith(("seed", "crash")):  # those were found by an earlier run
            file.unlink()
    left = MAX_TARGET_BYTES - sum(file.stat().st_size for file in corpus.iterdir())
    for file in sorted(merged.iterdir(), key=lambda file: (file.stat().st_size, file.name)):
        left -= file.stat().st_size
        if left < 0:
            break
        shutil.copyfile(file, corpus / file.name[:16])
