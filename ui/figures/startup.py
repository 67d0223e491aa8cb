"""Where the time of a core's starts went, before it served."""

from collections.abc import Sequence

import plotly.graph_objects as go

from sojourn.metrics.compute.startup import PHASES, TIERS, Startup
from sojourn.ui import theme
from sojourn.ui.text import number

_PROCESS, _WEIGHTS, _STEPS, _WAIT = "token", "memory", "compute", "request"  # whose colours phases have
COLOURS = {
    phase: theme.shade(theme.COLOURS[family], strength)
    for family, phases in (
        (_PROCESS, ("process", "imports", "sockets")),
        (_WEIGHTS, ("read_page_cache", "read_disk", "conversion", "reference")),
        (_STEPS, ("kernels", "memory_plan", "memory_probe", "capture", "warm_up")),
        (_WAIT, ("setup", "ready", "group")),
    )
    for phase, strength in zip(phases, (0.3, 0.0, 0.55, 0.75, 0.15), strict=False)
}


def startups(starts: Sequence[Startup]) -> go.Figure:
    """A bar for each start, from when the front asks for it until ready; its phases fill it."""
    if not starts:
        return theme.note("This run has no phases of its server's start: an older or another server recorded it.")
    rows = [theme.row_label(_name(place), _detail(start)) for place, start in enumerate(starts)]
    fig = theme.stacked_bars(rows, "start-up time, until ready (s)", "start", rangemode="tozero")
    for phase, meaning in PHASES.items():
        lengths = [start.phases_ns.get(phase, 0) / 1e9 for start in starts]
        if not any(lengths):
            continue
        shares = [length * 1e9 / start.total_ns for length, start in zip(lengths, starts, strict=True)]
        theme.add_share_bars(
            fig, phase.replace("_", " "), rows, lengths, shares, COLOURS[phase],
            f"<b>{phase.replace('_', ' ')}</b>: %{{x:,.3f}} s<br>{meaning}",
        )  # fmt: skip
    return fig


def _name(place: int) -> str:
    return "first start" if not place else f"start {place + 1}"


def _detail(start: Startup) -> str:
    """The sum, and how fast each tier was read."""
    rates = [
        f"{tier.replace('_', ' ')} {number(rate / 1e6)} MB/s"
        for tier in TIERS
        if (rate := start.bytes_per_second(tier)) is not None
    ]
    spared = sum(start.spared_ns.values()) / 1e9
    return ", ".join([f"{start.total_ns / 1e9:,.2f} s", *rates, *([f"spared {spared:,.2f} s"] if spared else [])])
