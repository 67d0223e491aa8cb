"""`sojourn locust`: Locust with Sojourn's timing, for a scenario or for a locustfile of one's own."""

import os
import sys
from pathlib import Path

import typer

from sojourn.commands.cli import need

OWN_FILE = ("-f", "--locustfile")


def locust(context: typer.Context) -> None:
    """Run Locust on a locustfile with LLMUser, or on a scenario. All options are Locust's and the locustfile's."""
    need("loadgen")
    from sojourn.loadgen.target.processes import LOCUSTFILE

    words = list(context.args)
    if not names_a_file(words):
        words = ["-f", str(LOCUSTFILE), *words]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "locust", *words])


def names_a_file(words: list[str]) -> bool:
    """Whether Locust finds a file by itself: in its options, in its environment, or as ./locustfile.py. A scenario is
    for our file."""
    if any(word.split("=")[0] == "--scenario" for word in words):
        return False
    given = any(word.split("=")[0] in OWN_FILE or (word.startswith("-f") and word != "-f") for word in words)
    return given or "LOCUST_LOCUSTFILE" in os.environ or Path("locustfile.py").exists()
