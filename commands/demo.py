"""`sojourn demo`: the main job in one command."""

import typer

from commands.run import run
from loadgen.exit_code import NOT_VALID


def demo() -> None:
    """Serve the bundled model, replay one minute of a real trace against it, and diagnose the run.

    On a machine that is too busy for the load the run is not valid. The demo says so and still ends with 0.
    """
    try:
        run("demo")
    except typer.Exit as ended:
        if ended.exit_code != NOT_VALID:
            raise
