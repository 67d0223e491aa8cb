"""Sojourn for notebooks and scripts: `run = sojourn.open("runs/demo")`, then `run.requests`, `run.diagnose()`, ….

Importing it loads no package: pandas, the engine and plotly load when an answer needs them. The command line is
`commands.program`; `python -m sojourn` starts it, too.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from metrics.kv_lens.document import KvLens
    from metrics.live.document import Watch
    from scripting.run import Run

__all__ = ["kv_lens", "list_runs", "open", "watch"]


def open(path: Path | str) -> "Run":
    """Opens a run directory, by path or by its name in runs/. Raises `metrics.errors.RunDataError` where it is none."""
    from scripting.run import Run

    return Run.open(path)


def list_runs(folder: Path | str = "runs") -> "pd.DataFrame":
    """The runs in a folder, newest first, one row each. Columns: see `metrics.run.listing.ListedRun`."""
    from metrics.run.listing import frame_of, list_runs

    return frame_of(list_runs(Path(folder)))


def watch(*urls: str, seconds: float = 30.0, slo: str = "") -> "Watch":
    """What live servers suffer from, after so many seconds of their own metrics. `slo`: such as "ttft:500 tpot:50".

    Sends no load. Raises `metrics.errors.InputError` for an address that is none, and ValueError for wrong objectives.
    """
    from metrics.live.watcher import watch_once
    from metrics.request.objectives import parse_bounds

    return watch_once(urls, seconds, parse_bounds(slo) if slo else None)


def kv_lens(
    *addresses: str, replay: "Sequence[str]" = (), metrics: "Sequence[str]" = (), seconds: float = 60.0
) -> "KvLens":
    """What the KV caches of live servers hold, evict and would gain from more memory, after so many seconds of their KV
    events. `addresses`: such as "tcp://127.0.0.1:5557", or http addresses of servers that say where they publish.

    Needs the kv-events extra. Raises `metrics.errors.InputError` and `ServerError`.
    """
    from metrics.kv_lens.addresses import endpoints_from
    from metrics.kv_lens.session import lens_once

    endpoints, counted = endpoints_from(addresses, replay)
    return lens_once(endpoints, [*counted, *metrics], seconds)


def main() -> None:
    """The entry point of the command line."""
    from commands.program import main

    main()


if __name__ == "__main__":
    main()
