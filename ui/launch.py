"""Starts the app as a process of its own, on this machine only."""

import socket
import subprocess
import sys
from pathlib import Path

from sojourn.metrics.errors import ServerError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.listing import has_rows
from sojourn.metrics.usage.files import FOLDER, usage_files

APP = Path(__file__).with_name("app.py")
DEFAULT_PORT = 8501
# Each page with its icon of Material Symbols.
PAGES = {
    "live": "monitor_heart",
    "overview": "speed",
    "symptoms": "stethoscope",
    "diagnose": "troubleshoot",
    "fleet": "hub",
    "goodput": "target",
    "requests": "view_timeline",
    "steps": "stacked_bar_chart",
    "memory": "memory",
    "compute": "developer_board",
    "usage": "receipt_long",
    "runs": "list",
    "start": "play_circle",
    "compare": "compare_arrows",
    "predictions": "fact_check",
    "sweep": "ssid_chart",
    "size": "straighten",
}
OF_NO_RUN = ("live",)
OF_ALL_RUNS = ("runs", "start", "compare", "predictions", "sweep", "size")


# Tables of a run of which a page needs one with rows; a run without them has no such page.
NEEDS = {"steps": ("steps", "scrapes"), "memory": ("steps", "requests", "kv_events"), "compute": ("steps",)}


def unfilled_pages(run: Path | None) -> set[str]:
    """The pages that this run has nothing for."""
    if run is None:
        return {"fleet"}
    if any(run.glob("server-*/run.json")):
        return set()  # they lead to those of its servers
    directory = RunDirectory(run)
    without = {page for page, tables in NEEDS.items() if not any(has_rows(directory, table) for table in tables)}
    return without | {"fleet"} | (set() if usage_files(run / FOLDER) else {"usage"})


def app_command(
    runs: Path | str,
    run: Path | str | None = None,
    port: int = DEFAULT_PORT,
    is_read_only: bool = False,
    prometheus: str | None = None,
    boards: Path | str | None = None,
) -> list[str]:
    """The command line that shows the runs below `runs`; `run` is shown first, and its folder replaces `runs`. An app
    that `is_read_only` starts no scenario.

    With `prometheus`, its address, the page *Dashboards* draws Grafana's dashboards in the folder `boards` from it.

    Raises RunDataError if `run` is no run directory.
    """
    chosen: list[str] = []
    if run is not None:
        opened = RunDirectory.open(run)
        folder = opened.path.resolve() if opened.path.name in ("", "..") else opened.path
        name = opened.name
        if opened.meta().get("fleet"):  # a server's run lies in that of its fleet
            folder = opened.path.resolve().parent
            name = f"{folder.name}/{name}"
        runs, chosen = folder.parent, ["--run", name]
    return [
        sys.executable, "-m", "streamlit", "run", str(APP),
        "--server.address", "127.0.0.1", "--server.port", str(port), "--server.headless", "true",
        "--browser.gatherUsageStats", "false",
        "--", "--runs", str(runs), *chosen, *(["--read-only"] if is_read_only else []),
        *(["--prometheus", prometheus, "--boards", str(boards)] if prometheus is not None else []),
    ]  # fmt: skip


def open_app(
    runs: Path | str, run: Path | str | None = None, port: int = DEFAULT_PORT, is_read_only: bool = False
) -> int:
    """Runs the app until Ctrl-C; returns its exit code. Raises RunDataError or ServerError if it cannot start."""
    command = app_command(runs, run, port, is_read_only)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ServerError(
                f"port {port} of 127.0.0.1 cannot be used ({error}); choose another with --port"
            ) from None
    try:
        return subprocess.call(command)
    except KeyboardInterrupt:
        return 0
