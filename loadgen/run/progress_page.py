"""The page of a running load on a terminal, at most 80 columns wide; elsewhere a line every ten seconds."""

import time
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from sojourn.loadgen.run.experiment import Progress
from sojourn.loadgen.run.live_view import LiveView

WIDTH = 80
LINE_S = 10.0
ACCOUNTS = 5


class ProgressPage:
    """Shows an experiment while it runs: goodput by class, time left, latencies so far, and what its server shows.

    It is drawn by a thread of the process that watches the load; the load is sent by another process.
    """

    def __init__(self, out: Console):
        self._out = out
        self._progress: Progress | None = None
        self._began = time.monotonic()
        self._next_line_s = self._began + LINE_S
        self._stage = self._summary = ""
        self._live: Live | None = None

    def __enter__(self) -> "ProgressPage":
        if self._out.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._out, transient=True, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._summary:
            self._out.print(f"{self._summary}\n", highlight=False)

    def __call__(self, progress: Progress) -> None:
        self._progress = progress
        if progress.total:
            failed = f", {progress.failed} failed" if progress.failed else ""
            answered = progress.finished + progress.failed
            self._summary = f"{progress.sent} of {progress.total} requests sent, {answered} ended{failed}"
        if self._live is not None:
            return
        if progress.stage != self._stage:
            self._stage = progress.stage
            self._out.print(progress.stage, highlight=False)
            self._next_line_s = time.monotonic() + LINE_S
        elif progress.total and time.monotonic() >= self._next_line_s:
            self._next_line_s = time.monotonic() + LINE_S
            self._out.print(_line(progress), highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        progress = self._progress
        if progress is None:
            return Text("")
        elapsed = _duration(time.monotonic() - self._began)
        if not progress.total or progress.stage != "sending":
            return Text(f"{progress.stage}   {elapsed}")
        width = min(WIDTH, self._out.width)
        ended = progress.finished + progress.failed
        head = Text(f"sending   {ended:,} of {progress.total:,} ended   {elapsed}   {_left(progress.live)}")
        in_flight = Text(f"sent {progress.sent:,}   in flight {progress.sent - ended:,}   failed {progress.failed:,}")
        parts: list[RenderableType] = [head, Bar(total=progress.total, completed=ended, width=width), in_flight]
        if progress.live is not None:
            parts += _live_parts(progress.live, width)
        return Group(*parts)


def _live_parts(view: LiveView, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if view.classes:
        rows = Table(box=None, padding=(0, 1), width=width)
        for name in ("class", "good/s", "good", "ended", "failed", "TTFT p50", "p90", "TPOT p50", "p90"):
            rows.add_column(name, justify="left" if name == "class" else "right", no_wrap=True)
        for each in view.classes:
            latencies = [_ms(ms) for pair in (each.ttft_ms, each.tpot_ms) for ms in pair or (None, None)]
            rows.add_row(each.klass, f"{each.goodput_rps:.3g}", f"{each.good / each.ended:.0%}", f"{each.ended:,}",
                         f"{each.failed:,}", *latencies)  # fmt: skip
        parts += [Text(""), rows]
    if view.test:
        parts.append(Text(view.test, no_wrap=True, overflow="ellipsis"))
    if view.server is not None:
        gauges = {"running": view.server.running, "waiting": view.server.waiting}
        words = [f"{name} {value:,.0f}" for name, value in gauges.items() if value is not None]
        words += [f"KV {view.server.kv_use:.0%}"] if view.server.kv_use is not None else []
        parts += [Text(""), Text(f"server    {'   '.join(words)}")] if words else []
        for place, (name, share) in enumerate(view.server.accounts[:ACCOUNTS]):
            label = "time now  " if place == 0 else " " * 10
            parts.append(Text(f"{label}{name:<28.28} {share:>4.0%} {'█' * round(share * 30)}"))
    return parts


def _line(progress: Progress) -> str:
    ended, view = progress.finished + progress.failed, progress.live
    words = [f"{ended} of {progress.total} ended, {progress.sent - ended} in flight, {progress.failed} failed"]
    if view is not None and view.classes:
        good, total = sum(each.good for each in view.classes), sum(each.ended for each in view.classes)
        goodput = sum(each.goodput_rps for each in view.classes)
        words.append(f"goodput {goodput:.3g}/s, {good / total:.0%} good")
    if view is not None and view.test:
        words.append(view.test)
    return "; ".join([*words, _left(view)])


def _left(view: LiveView | None) -> str:
    return "time left unknown" if view is None or view.seconds_left is None else f"{_duration(view.seconds_left)} left"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if minutes else f"{rest} s"


def _ms(value: Any) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
