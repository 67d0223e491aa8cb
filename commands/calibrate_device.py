"""`sojourn calibrate-device`: the limits of a device, for utilisation and rooflines."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from commands.cli import need, out


def calibrate_device(
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA if there is a device")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default all cores")] = None,
    output: Annotated[Path | None, typer.Option("--out", help="file to write; by default where bench reads it")] = None,
) -> None:
    """Measure and store the limits of a device: memory bandwidth, and matrix products by precision and rows."""
    need("engine", "torch")
    from engine.process import let_threads_sleep

    let_threads_sleep(os.environ, sys.modules)  # before torch: spinning threads distort the figures on a busy machine
    from engine.compute.device_ceilings import calibrate
    from metrics.compute.roofline import ceilings_table, store_ceilings
    from metrics.machine.host import company

    busy = company()
    ceilings = calibrate(device, threads)
    out.print(ceilings_table(ceilings))
    if busy:
        out.print(f"{busy}: these ceilings are too low; run it again on a quiet machine")
    out.print(f"stored in {store_ceilings(ceilings, output)}")
