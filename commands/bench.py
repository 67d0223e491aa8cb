"""`sojourn dev bench`: hands its arguments to the benchmarks of the source folder."""

import sys
from pathlib import Path

import typer

from sojourn.commands.cli import need, program_name
from sojourn.metrics.errors import SojournError


def bench(context: typer.Context) -> None:
    """Measure the engine's throughput, latency and kernels, beside other engines and the limits of the device."""
    need("torch", "zmq", "tokenizers", "safetensors")
    source = Path(__file__).parents[1]
    if not (source / "bench" / "command.py").is_file():
        raise SojournError(
            "sojourn dev bench runs from Sojourn's source folder only; get it, and install with pip install -e ."
        )
    sys.path.insert(0, str(source))
    from bench.command import app

    sys.exit(app(args=context.args, prog_name=f"{program_name()} dev bench", standalone_mode=False) or 0)  # 130: Ctrl-C
