"""`sojourn server quantize`: a quantised checkpoint out of a dense one."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from sojourn.commands.cli import need, out, output_option
from sojourn.metrics.errors import InputError

Target = Literal["int8", "fp8", "w4a16", "awq", "gptq", "gguf-f16", "gguf-q8_0", "gguf-q5_0", "gguf-q4_0", "gguf-q4_1"]


def quantize(
    model: Annotated[str, typer.Argument(help="folder of a dense checkpoint, or `tiny-model` for the bundled one")],
    to: Annotated[Target, typer.Option(help="format of the new checkpoint")],
    output: Annotated[Path, output_option("folder to write; it must not exist")],
    scaling: Annotated[
        Literal["auto", "none", "awq"],
        typer.Option(help="awq: by activations on a text, before rounding; auto: awq for --to awq, else none"),
    ] = "auto",
    calibration: Annotated[
        Path | None, typer.Option(help="text whose activations are used; by default one that is bundled")
    ] = None,
    group_size: Annotated[
        int | None, typer.Option(min=4, help="inputs that share a scale; by default 128, or the most that divides all")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="measure the error of the new weights on 1,024 tokens")
    ] = True,
) -> None:
    """Round a checkpoint's weights to 8 or 4 bits, and say what that changes.

    The whole model is held in float32 meanwhile.
    """
    need("engine")
    from sojourn.engine.config import model_folder
    from sojourn.engine.token.quantise.checkpoint import quantise_checkpoint
    from sojourn.engine.token.quantise.error import error_of_checkpoint, text_ids

    scaled_by_text = scaling == "awq" or (scaling == "auto" and to == "awq")
    if calibration is not None and not scaled_by_text:
        raise InputError("calibration: only scaling=awq reads a text; add --scaling awq, or leave it out")
    folder = model_folder(model)
    with out.status(f"{folder.name} → {to}"):
        ids = text_ids(folder, calibration) if scaled_by_text else None
        scaled = quantise_checkpoint(folder, to, output, group_size=group_size, calibration=ids)
    size, before = (_megabytes(each) for each in (output, folder))
    out.print(f"{output}: {size:.1f} MB of weights, {before:.1f} MB before", soft_wrap=True)
    if scaled_by_text:
        out.print(f"{scaled} layers are scaled by their activations on {len(ids)} tokens")
    if measure:
        with out.status("measuring the error"):
            error = error_of_checkpoint(output, folder)
        out.print(f"error of the weights: {error.sentence()}", soft_wrap=True)


def _megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for kind in ("*.safetensors", "*.gguf") for path in folder.glob(kind)) / 1e6
