"""`sojourn calibrate`: how wrong is our own client on this machine?"""

from pathlib import Path
from typing import Annotated

import typer

from commands.frame import need, out


def calibrate(
    quick: Annotated[bool, typer.Option("--quick", help="three points at 50 tokens/s, half a minute")] = False,
    bound_ms: Annotated[
        float, typer.Option(min=0.01, help="p99 error of a stamp, TTFT or ITL above which a run is not valid")
    ] = 5.0,
    output: Annotated[
        Path | None, typer.Option("--out", help="file to write; by default where every run looks")
    ] = None,
) -> None:
    """Measure the load generator against a server of known truth: its error by load, and its capacity. Kept, and told
    with the figures of every run."""
    need("loadgen", "locust", "gevent", "httptools")
    from loadgen.sweeps.calibrate import GRID, QUICK_GRID, QUICK_WINDOW_S, WINDOW_S
    from loadgen.sweeps.calibrate import calibrate as measure
    from metrics.machine.client_error import calibration_table, store_calibration

    grid = QUICK_GRID if quick else GRID
    with out.status("") as shown:
        done = measure(
            grid, QUICK_WINDOW_S if quick else WINDOW_S, bound_ms,
            lambda position, streams, rate: shown.update(
                f"{position + 1} of {len(grid)}: {streams} streams of {rate:g} tokens/s"
            ),
        )  # fmt: skip
    out.print(calibration_table(done))
    if done.company:
        out.print(f"{done.company}: these errors are too large; run it again on a quiet machine", highlight=False)
    out.print(f"kept in {store_calibration(done, output)}", highlight=False)
