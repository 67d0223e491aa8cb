"""What searches over rates share: the target of the load, its options, and the progress of a search."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sojourn.commands.cli import need, out
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.loadgen.scenario.scenario import Scenario
    from sojourn.loadgen.sweeps.run_point import Target

BaseUrlOption = Annotated[
    str | None, typer.Option(help="a running OpenAI-compatible server; by default our engine, started for each run")
]
ModelOption = Annotated[str | None, typer.Option(help="model to request; only with --base-url")]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        help="tokenizer.json, its folder, `tiny-model`, or `server` (its POST /tokenize); only with --base-url"
    ),
]


def chosen_target(
    scenario: "Scenario", base_url: str | None, model: str | None, tokenizer: str | None, set_: list[str] | None,
    processes: int,
) -> "Target":  # fmt: skip
    """The target of the load. Raises InputError if flags contradict each other or the engine's settings are wrong."""
    from sojourn.engine.options import assignments, check_settings
    from sojourn.loadgen.sweeps.run_point import Target

    if base_url is not None:
        check_settings(scenario.engine)
        if set_:
            raise InputError("--set changes our engine, and --base-url names a server that runs already; drop one")
        return Target(base_url=base_url, model=model, tokenizer=tokenizer, processes=processes)
    for flag, value in (("--model", model), ("--tokenizer", tokenizer)):
        if value is not None:
            raise InputError(f"{flag} {value} is for a running server; add --base-url, or use --set model=…")
    need("engine")
    overrides: dict[str, Any] = assignments(set_ or [], "--set")
    check_settings(scenario.engine, overrides)
    return Target(engine_overrides=overrides, processes=processes)


@contextmanager
def search_progress(folder: Path, doubts: Iterable[str], json: bool) -> Iterator[tuple[Callable[[str], None], Any]]:
    """Gives a function that prints a sentence, and a progress bar: on stderr where stdout is for `json`.

    Ctrl-C names the folder that the same command continues from.
    """
    from sojourn.loadgen.run.progress_bar import ProgressBar

    console = Console(file=sys.stderr) if json else out

    def show_note(sentence: str) -> None:
        console.print(sentence, highlight=False, markup=False)

    for doubt in doubts:
        show_note(doubt)
    try:
        with ProgressBar(console) as progress:
            yield show_note, progress
    except KeyboardInterrupt:
        out.print(f"\nstopped; finished runs stay in {folder}, and the same command continues there")
        raise
