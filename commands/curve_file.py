"""The curve of throughput against tokens per user, on a terminal and as a file: of sweeps, of sizes and of plans."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sojourn.commands.cli import need, out, output_option, rounded, table, writing
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.loadgen.search.curve import Curve

ENDINGS = (".html", ".csv", ".json")
MOST_ROWS, FEWEST_ROWS = 12, 3  # on a terminal: of all curves, and of each
CurveFile: Any = output_option("file of its curve: .html is the chart, .csv and .json are its points")


def check_curve_file(path: Path | None) -> None:
    """Before the work begins. Raises InputError."""
    if path is None:
        return
    if path.suffix not in ENDINGS:
        raise InputError(f"--output {path}: a curve is written as {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if path.suffix == ".html":
        need("plotly")


def write_points(curves: "Sequence[Curve]", path: Path) -> None:
    """As .csv or .json."""
    from sojourn.loadgen.search.curve import curve_csv, curve_json
    from sojourn.metrics.whole_file import write_whole

    write_whole(path, curve_csv(curves) if path.suffix == ".csv" else curve_json(curves))


def write_curves(curves: "Sequence[Curve]", path: Path, title: str) -> None:
    """The file's ending chooses what is written."""
    with writing(path):
        if path.suffix == ".html":
            from sojourn.metrics.whole_file import write_whole
            from sojourn.ui.markup.tradeoff import page

            write_whole(path, page(title, curves))
        else:
            write_points(curves, path)


def print_curves(curves: "Sequence[Curve]") -> None:
    """Some of the points that no other one of the same curve beats."""
    most = max(FEWEST_ROWS, MOST_ROWS // len(curves))
    out.print("\n[bold]throughput per device against tokens per second per user[/bold]")
    rows = table("configuration", "load", "kept", "tok/s/device", "tok/s/user", "median", text=("configuration",))
    rows.padding = (0, 1, 0, 0)
    for curve in curves:
        best = curve.frontier
        step = max(1, math.ceil(len(best) / most))
        for number, point in enumerate(best[::step]):
            rows.add_row(
                curve.label if number == 0 else "", f"{point.rate_rps:.3g}", f"{point.attainment:.0%}",
                rounded(point.tokens_per_s / curve.devices if curve.devices else None),
                rounded(point.user_tokens_per_s), rounded(point.interactivity),
            )  # fmt: skip
    out.print(rows)
    out.print("tok/s/user: 1000 / TPOT p90 in ms; median: of TPOT p50, as InferenceX has it")
