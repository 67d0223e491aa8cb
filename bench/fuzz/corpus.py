"""Inputs that reach different code, few and small enough for the repository: seeds, and a regression test."""

import shutil
from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(__file__).parent.parent.parent / "tests" / "fuzz" / "corpus"
MAX_INPUTS = 60  # of a target
MAX_TARGET_BYTES = 40_000  # of all inputs of a target


def save(names: Sequence[str], work: Path) -> None:
    """Copies the smallest inputs that were found into the corpus of the repository. Seeds of ours stay."""
    for name in names:
        found = work / "corpus" / name
        if found.is_dir():
            keep(found, CORPUS / name)


def keep(found: Path, corpus: Path) -> None:
    corpus.mkdir(parents=True, exist_ok=True)
    for file in corpus.iterdir():
        if not file.name.startswith(("seed", "crash")):  # those were found by an earlier run
            file.unlink()
    left = MAX_TARGET_BYTES - sum(file.stat().st_size for file in corpus.iterdir())
    for file in sorted(found.iterdir(), key=lambda file: (file.stat().st_size, file.name))[:MAX_INPUTS]:
        left -= file.stat().st_size
        if left < 0:
            break
        shutil.copyfile(file, corpus / file.name[:16])
