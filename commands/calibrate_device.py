"""`sojourn calibrate device`: the limits of a device, for utilisation and rooflines; the normal speed of a model."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from sojourn.commands.cli import need, out, output_option, writing
from sojourn.metrics.errors import InputError


def calibrate_device(
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: CUDA if there is a device")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default all cores")] = None,
    output: Annotated[Path | None, output_option("file to write; by default where bench reads it")] = None,
    model: Annotated[
        str | None, typer.Option(help="measure the normal speed of this model instead: what a diagnosis compares with")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="with --model: an engine setting; repeatable"),
    ] = None,
) -> None:
    """Measure and store the limits of a device: memory bandwidth, matrix products by precision and rows, and exchanges
    between two ranks by size. With --model: what the steps of that model take on it."""
    need("torch")
    if model is not None:
        return _calibrate_model(model, device, threads, output, set_ or [])
    if set_:
        raise InputError("--set changes an engine's settings, and without --model there is no engine; name a model")
    from sojourn.engine.process import let_threads_sleep

    let_threads_sleep(os.environ, sys.modules)  # before torch: spinning threads distort the figures on a busy machine
    from sojourn.engine.compute.device_ceilings import calibrate
    from sojourn.engine.techniques import load
    from sojourn.metrics.compute.roofline import ceilings_table, links_table, store_ceilings
    from sojourn.metrics.machine.host import company

    busy = company()
    ceilings = calibrate(device, threads, load("group", "link_ceilings").links)
    out.print(ceilings_table(ceilings))
    if ceilings.links:
        out.print(links_table(ceilings.links))
    if busy:
        out.print(f"{busy}: these ceilings are too low; run it again on a quiet machine")
    out.print(f"stored in {store_ceilings(ceilings, output)}")


def _calibrate_model(model: str, device: str, threads: int | None, output: Path | None, assigned: list[str]) -> None:
    from sojourn.engine.measure_speed import measure
    from sojourn.engine.options import assignments
    from sojourn.metrics.compute.speed_reference import add_entry
    from sojourn.metrics.machine.host import company
    from sojourn.metrics.machine.store import store_path

    busy = company()
    settings = {"device": device} | ({"threads": threads} if threads else {}) | assignments(assigned, "--set")
    family, entry = measure(model, settings)
    out.print(f"{family}: {entry.steps} steps")
    if busy:
        out.print(f"{busy}: this speed is too low; run it again on a quiet machine")
    path = output or store_path("speed", family)
    with writing(path, "choose another with --output"):
        out.print(f"stored in {add_entry(family, entry, path)}")
