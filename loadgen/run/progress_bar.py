"""The progress of an experiment, on a terminal or in a log."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from sojourn.loadgen.run.experiment import Progress


class ProgressBar:
    """Shows the stage of an experiment and its number of answered requests: a bar, or in a log a line a stage.

    Of many experiments one after another, `prints_stages` = False prints no line of a single one.
    """

    def __init__(self, out: Console, *, prints_stages: bool = True):
        self._out = out
        self._prints_stages = prints_stages

    def __enter__(self) -> "ProgressBar":
        columns = (
            SpinnerColumn(), TextColumn("{task.description:<16}"), BarColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        self._bar = Bar(*columns, console=self._out, transient=True, disable=not self._out.is_terminal)
        self._task = self._bar.add_task("", total=None, note="")
        self._stage = self._summary = ""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._summary and self._prints_stages:
            self._out.print(f"{self._summary}\n", highlight=False)

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self._stage:
            self._stage = progress.stage
            if self._prints_stages and not self._out.is_terminal:
                self._out.print(progress.stage, highlight=False)
        changes: dict[str, Any] = {"description": progress.stage, "note": ""}
        if progress.total:
            failed = f", {progress.failed} failed" if progress.failed else ""
            note = f"{progress.finished} of {progress.total} answered{failed}"
            self._summary = f"{progress.sent} of {progress.total} requests sent, {progress.finished} ended{failed}"
            changes |= {"total": progress.total, "completed": progress.finished, "note": note}
        self._bar.update(self._task, **changes)
