"""What `sweep` and `capacity` share: where the load goes, and how an interrupted search is told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.engine_settings import check_engine_block
from commands.frame import need, out
from metrics.errors import InputError
from metrics.request.objectives import parse_bounds

if TYPE_CHECKING:
    from loadgen.scenario.scenario import Scenario
    from loadgen.sweeps.run_point import Target

BaseUrlOption = Annotated[
    str | None, typer.Option(help="a running OpenAI-compatible server; by default our engine, started for each run")
]
ModelOption = Annotated[str | None, typer.Option(help="model to ask the server for; only with --base-url")]
TokenizerOption = Annotated[
    str | None,
    typer.Option(
        help="tokenizer.json, its folder, `tiny-model`, or `server` (its POST /tokenize); only with --base-url"
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="change a setting of our engine; repeatable, not with --base-url"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="print the document instead of tables; progress on stderr")]
SloOption = Annotated[
    str | None,
    typer.Option(metavar="'ttft:500 tpot:50'", help="objectives in ms for every class, in place of the scenario's"),
]


def chosen_target(
    scenario: "Scenario", base_url: str | None, model: str | None, tokenizer: str | None, set_: list[str] | None,
    processes: int,
) -> "Target":  # fmt: skip
    """Where the load goes. Raises InputError where flags contradict each other, or the engine's settings are wrong."""
    need("loadgen", "locust", "gevent", "httptools")
    from loadgen.sweeps.run_point import Target

    if base_url is not None:
        check_engine_block(scenario)
        if set_:
            raise InputError("--set changes our engine, and --base-url names a server that runs already; drop one")
        return Target(base_url=base_url, model=model, tokenizer=tokenizer, processes=processes)
    for flag, value in (("--model", model), ("--tokenizer", tokenizer)):
        if value is not None:
            raise InputError(f"{flag} {value} is for a running server; add --base-url, or use --set model=…")
    need("engine", "torch", "fastapi", "uvicorn", "zmq", "tokenizers", "minijinja", "safetensors")
    from engine.options import assignments

    overrides: dict[str, Any] = assignments(set_ or [], "--set")
    check_engine_block(scenario, overrides)
    return Target(engine_overrides=overrides, processes=processes)


def with_slo(scenario: "Scenario", slo: str | None) -> "Scenario":
    if slo is None:
        return scenario
    from loadgen.sweeps.run_point import with_objectives

    try:
        bounds = parse_bounds(slo)
    except ValueError as error:
        raise InputError(f"--slo: {error}") from None
    if not scenario.target.stream and set(bounds) & {"ttft_ms", "tpot_ms"}:
        raise InputError(f"--slo {slo}: the scenario does not stream, so only e2e can be bounded")
    return with_objectives(scenario, bounds)


@contextmanager
def kept_when_interrupted(folder: Path) -> Iterator[None]:
    """Says on Ctrl-C that nothing finished is lost."""
    try:
        yield
    except KeyboardInterrupt:
        out.print(f"\nstopped; finished runs are kept in {folder}, and the same command goes on there", highlight=False)
        raise
