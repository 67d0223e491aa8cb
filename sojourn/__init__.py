"""Sojourn for notebooks and scripts: `run = sojourn.open("runs/demo")`, then `run.requests`, `run.diagnose()`, ….

Importing it loads no package: pandas, the engine and plotly load when an answer needs them. The command line is
`sojourn.commands.program`; `python -m sojourn` starts it, too.
"""

import os

TYPE_CHECKING = False  # of typing, whose import would take longer than the rest of this file
if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pandas as pd

    from sojourn.live.kv_lens.document import KvLens
    from sojourn.live.watch.document import Watch
    from sojourn.scripting.run import Run
    from sojourn.triage.document import Triage

# In a checkout the rooms (engine/, metrics/, ...) stand beside this folder; a wheel has them in it.
_HERE = os.path.dirname(__file__)
if not os.path.isdir(os.path.join(_HERE, "metrics")):
    __path__.append(os.path.dirname(_HERE))

__all__ = ["kv_lens", "list_runs", "open", "triage_of", "watch"]


def open(path: "Path | str") -> "Run":
    """Opens a run directory, by path or by its name in runs/. Raises `metrics.errors.RunDataError` where it is none."""
    from sojourn.scripting.run import Run

    return Run.open(path)


def list_runs(folder: "Path | str" = "runs") -> "pd.DataFrame":
    """The runs in a folder, newest first, one row each. Columns: see `metrics.run.listing.ListedRun`."""
    from pathlib import Path

    from sojourn.metrics.run.listing import frame_of, list_runs

    return frame_of(list_runs(Path(folder)))


def watch(*urls: str, seconds: float = 30.0, slo: str = "") -> "Watch":
    """What live servers suffer from, after so many seconds of their own metrics. `slo`: such as "ttft:500 tpot:50".

    Sends no load. Raises `metrics.errors.InputError` for an address that is none, and ValueError for wrong objectives.
    """
    from sojourn.live.watch.watcher import watch_once
    from sojourn.metrics.request.objectives import WHAT_SERVERS_TELL, parse_bounds

    return watch_once(urls, seconds, parse_bounds(slo, WHAT_SERVERS_TELL) if slo else None)


def triage_of(*files: "Path | str", slo: str = "") -> "Triage":
    """What logs, pages, summaries and flags in files show together: certain, likely, unknowable, the next command.

    Raises `metrics.errors.InputError` where none of them can be read, and ValueError for wrong objectives.
    """
    from sojourn.metrics.request.objectives import WHAT_SERVERS_TELL, parse_bounds
    from sojourn.triage.conclude import triage_given

    return triage_given([str(file) for file in files], bounds=parse_bounds(slo, WHAT_SERVERS_TELL) if slo else None)


def kv_lens(
    *addresses: str, replay: "Sequence[str]" = (), metrics: "Sequence[str]" = (), seconds: float = 60.0
) -> "KvLens":
    """What the KV caches of live servers hold, evict and would gain from more memory, after so many seconds of their KV
    events. `addresses`: such as "tcp://127.0.0.1:5557", or http addresses of servers that say where they publish.

    Raises `metrics.errors.InputError`, `ServerError` and, without the kv-events extra, `PackageMissing`.
    """
    from sojourn.metrics.installed import need

    need("zmq", what="reading KV events")
    from sojourn.live.kv_lens.addresses import endpoints_from
    from sojourn.live.kv_lens.session import lens_once

    endpoints, counted = endpoints_from(addresses, replay)
    return lens_once(endpoints, [*counted, *metrics], seconds)


def main() -> None:
    """The entry point of the command line."""
    import _signal as signal  # without the enums of `signal`, whose import Ctrl-C could still meet

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's job in the background ignores it
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from sojourn.commands.entry import main

    main()
