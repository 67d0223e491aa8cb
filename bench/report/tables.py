"""Reports as tables: for a terminal, and as Markdown for docs/results/performance.md."""

import re
import statistics
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from bench.results import BenchError, Point, Report

# Figure → its heading, and its number of decimals.
FIGURES = {
    "output_tokens_per_s": ("output tok/s", 1),
    "ttft_p50_ms": ("TTFT p50 ms", 0),
    "ttft_p99_ms": ("TTFT p99 ms", 0),
    "itl_p50_ms": ("ITL p50 ms", 1),
    "itl_p99_ms": ("ITL p99 ms", 1),
    "roofline_percent": ("% of roofline", 0),
    "mfu_percent": ("MFU %", 0),
    "mbu_percent": ("MBU %", 0),
    "device_idle_percent": ("device idle %", 1),
}
COUNTS = ("steps", "replayed")  # of a breakdown; all else is time
BREAKDOWN_TITLE = "% of the wall time: with pauses and outside, the host's accounts sum to it, and so do the device's"
KEYS = 2  # first columns of the main table, which name its lines
HEADLINE = "output_tokens_per_s"


def spread(values: list[float], decimals: int) -> str:
    """median (min to max)"""
    if not values:
        return "–"
    middle = f"{statistics.median(values):,.{decimals}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):,.{decimals}f}–{max(values):,.{decimals}f})"


def ratio(values: list[float]) -> str:
    middle = f"{statistics.median(values):.2f}×" if values else "–"
    return middle if len(values) < 2 else f"{middle} ({min(values):.2f}–{max(values):.2f})"


def grid(report: Report) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the main table: one line an engine and point; ratios are those of the first engine over it."""
    if report.kind == "kernels":
        return _kernel_grid(report)
    shown = [name for name in FIGURES if any(name in point.figures for point in report.points)]
    bases = _bases(report)
    heads = ["engine", "point", *(FIGURES[name][0] for name in shown), *(f"{base} over it" for base in bases)]
    lines = []
    for point in sorted(report.points, key=lambda point: _order(report, point)):
        line = [point.engine, point.point]
        line += [spread(point.figures.get(name, []), FIGURES[name][1]) for name in shown]
        for base in bases:
            compared = point.engine not in bases
            line.append(ratio(report.ratios(base, point.engine, point.point, HEADLINE)) if compared else "")
        lines.append(line)
    return heads, lines


def _bases(report: Report) -> list[str]:
    """The engines that the others are compared with: all of ours where there are peers, else the first."""
    ours = dict.fromkeys(point.engine for point in report.points if not point.peer)
    engines = {point.engine for point in report.points}
    return list(ours) if len(ours) < len(engines) else list(ours)[: len(engines) > 1]


def _order(report: Report, point: Point) -> tuple[int, int]:
    points = list(dict.fromkeys(known.point for known in report.points))
    engines = list(dict.fromkeys(known.engine for known in report.points))
    return points.index(point.point), engines.index(point.engine)


def _kernel_grid(report: Report) -> tuple[list[str], list[list[str]]]:
    lines = []
    for row in report.rows:
        achieved = "–" if row.achieved is None else f"{row.achieved:,.1f} {row.unit}"
        share = "–" if row.percent_of_limit is None else f"{row.percent_of_limit:.0f}"
        lines.append([row.kernel, row.case, f"{row.microseconds:,.1f}", achieved, share])
    return ["kernel", "case", "µs", "achieved", "% of limit"], lines


def breakdown_grid(report: Report) -> tuple[list[str], list[list[str]]]:
    """Where the wall time went, in % of it (medians over the repeats): one line an account, one column a point."""
    explained = sorted((point for point in report.points if point.breakdowns), key=lambda point: _order(report, point))
    if not explained:
        return [], []
    lines = []
    for name in explained[0].breakdowns[0]:
        if name in COUNTS:
            medians = [statistics.median(each[name] for each in point.breakdowns) for point in explained]
            lines.append([name, *(f"{count:,.0f}" for count in medians)])
        elif name != "wall" and any(_share(point, name) >= 0.05 for point in explained):
            lines.append([name, *(f"{_share(point, name):.1f}" for point in explained)])
    return ["account", *(f"{point.engine}, {point.point}" for point in explained)], lines


def _share(point: Point, name: str) -> float:
    return statistics.median(100 * account[name] / account["wall"] for account in point.breakdowns)


def render(report: Report, width: int) -> RenderableType:
    """For a terminal of so many columns."""
    heads, lines = grid(report)
    parts: list[RenderableType] = [report.title, *_fitting(heads, lines, KEYS, width)]
    if report.kind != "kernels":
        parts += [_legend(report), ""]
    heads, lines = breakdown_grid(report)
    if lines:
        parts += [BREAKDOWN_TITLE, *_fitting(heads, lines, 1, width)]
    if report.ceilings is not None:
        parts.append(_ceilings_line(report))
    return Group(*parts, *report.notes)


def _legend(report: Report) -> str:
    """What the cells of the main table hold."""
    repeats = max((len(point.figures.get(HEADLINE, [])) for point in report.points), default=0)
    if repeats == 1:
        caption = "one repeat: a difference may be noise; --repeats 3 shows the spread"
    else:
        caption = f"median of {repeats} repeats (least–greatest)"
    if len({point.engine for point in report.points}) > 1:
        caption += "; × = output tok/s over that of the line's engine, repeat by repeat"
        caption += "; a range that holds 1.00 is no difference" if repeats > 1 else ""
    return f"{caption}. docs/results/performance.md explains the columns"


def _fitting(heads: list[str], lines: list[list[str]], keys: int, width: int) -> list[Table]:
    """As many tables as it takes for no cell to be broken: each repeats the first `keys` columns. Heads break at
    spaces, the ranges of figures before their bracket."""
    heads = [head if index < keys else re.sub("(?<!%) ", "\n", head) for index, head in enumerate(heads)]
    lines = [[*line[:keys], *(cell.replace(" (", "\n(") for cell in line[keys:])] for line in lines]
    columns = list(zip(heads, *lines, strict=True))
    # with padding and divider
    needs = [max(len(part) for cell in column for part in cell.split("\n")) + 3 for column in columns]
    key_width = sum(needs[:keys]) + 1
    groups: list[list[int]] = [[]]
    for index in range(keys, len(columns)):
        if groups[-1] and key_width + sum(needs[each] for each in groups[-1]) + needs[index] > width:
            groups.append([])
        groups[-1].append(index)
    return [_table(columns, [*range(keys), *group]) for group in groups]


def _table(columns: list[tuple[str, ...]], chosen: list[int]) -> Table:
    table = Table(box=box.SIMPLE)
    for index in chosen:
        table.add_column(columns[index][0], justify="right" if index else "left", overflow="fold")
    for line in zip(*(columns[index][1:] for index in chosen), strict=True):
        table.add_row(*line)
    return table


def _ceilings_line(report: Report) -> str:
    ceilings = report.ceilings
    rates = ", ".join(f"{name} {ceilings.peak_flops(name) / 1e9:,.0f}" for name in ceilings.precisions)
    return f"measured ceilings: {ceilings.bandwidth / 1e9:,.1f} GB/s; GFLOP/s {rates} ({ceilings.measured_at[:10]})"


def markdown(report: Report) -> str:
    """The tables with command, machine, versions and date."""
    parts = [f"`{report.command}`  ", f"{_machine(report)}, {report.date[:10]}; {_versions(report)}", ""]
    parts += _markdown_table(*grid(report))
    heads, lines = breakdown_grid(report)
    if lines:
        parts += ["", f"{BREAKDOWN_TITLE}:", ""]
        parts += _markdown_table(heads, lines)
    if report.ceilings is not None:
        parts += ["", f"{_ceilings_line(report)[0].upper()}{_ceilings_line(report)[1:]}."]
    return "\n".join([*parts, *report.notes, ""])


def _markdown_table(heads: list[str], lines: list[list[str]]) -> list[str]:
    rule = ["---:" if index else "---" for index in range(len(heads))]
    return [f"| {' | '.join(line)} |" for line in (heads, rule, *lines)]


def _machine(report: Report) -> str:
    gpus = report.hardware.get("gpus") or []
    if gpus:
        return gpus[0]["name"]
    return f"{report.hardware['cpu']}, {report.hardware['cores']} cores"


def _versions(report: Report) -> str:
    own = {name: report.versions[name] for name in ("python", "torch", "triton") if name in report.versions}
    peers = {point.engine: point.version for point in report.points if point.peer}
    return ", ".join(f"{name} {version}" for name, version in (own | peers).items() if version)


def place(document: Path, name: str, content: str) -> None:
    """Replaces what stands between the marks of `name` in a Markdown file. Raises BenchError where it has none."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    text = document.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise BenchError(f"{document} has no `{begin}` and `{end}` to write between")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    document.write_text(f"{before}{begin}\n{content.strip()}\n{end}{after}", encoding="utf-8")
