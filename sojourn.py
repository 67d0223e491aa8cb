"""Sojourn for notebooks and scripts: `run = sojourn.open("runs/demo")`, then `run.requests`, `run.diagnose()`, ….

Importing it loads no package: pandas, the engine and plotly load when an answer needs them. The command line is
`commands.program`; `python -m sojourn` starts it, too.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

    from scripting.run import Run

__all__ = ["list_runs", "open"]


def open(path: Path | str) -> "Run":
    """Opens a run directory, by path or by its name in runs/. Raises `metrics.errors.RunDataError` where it is none."""
    from scripting.run import Run

    return Run.open(path)


def list_runs(folder: Path | str = "runs") -> "pd.DataFrame":
    """The runs in a folder, newest first, one row each. Columns: see `scripting.documents.ListedRun`."""
    from scripting.listing import frame_of, list_runs

    return frame_of(list_runs(Path(folder)))


def main() -> None:
    """The entry point of the command line."""
    from commands.program import main

    main()


if __name__ == "__main__":
    main()
