"""`sojourn calibrate client`: the timing error of our load generator on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import need, out, output_option


def calibrate(
    quick: Annotated[bool, typer.Option("--quick", help="three points at 50 tokens/s, half a minute")] = False,
    bound_ms: Annotated[
        float, typer.Option(min=0.01, help="largest p99 error of a timestamp, TTFT or ITL in a valid run")
    ] = 5.0,
    output: Annotated[Path | None, output_option("file to write; by default where every run reads it")] = None,
) -> None:
    """Measure the load generator's own timing error by load, and its capacity. Every run reports it."""
    need("loadgen")
    from sojourn.loadgen.sweeps.calibrate import GRID, QUICK_GRID, QUICK_WINDOW_S, WINDOW_S
    from sojourn.loadgen.sweeps.calibrate import calibrate as measure
    from sojourn.metrics.machine.client_error import calibration_table, store_calibration

    grid = QUICK_GRID if quick else GRID
    with out.status("") as status:
        done = measure(
            grid, QUICK_WINDOW_S if quick else WINDOW_S, bound_ms,
            lambda position, streams, rate: status.update(
                f"{position + 1} of {len(grid)}: {streams} streams of {rate:g} tokens/s"
            ),
        )  # fmt: skip
    out.print(calibration_table(done))
    if done.company:
        out.print(f"{done.company}: these errors are too large; run it again on a quiet machine")
    out.print(f"stored in {store_calibration(done, output)}")
