"""`sojourn bench-serve`: the flags of `vllm bench serve`, our measurement."""

import json
from contextlib import nullcontext
from pathlib import Path

import typer

from commands.export import vllm_document
from commands.frame import need, new_run, out, run_told_when_stopped
from commands.telling import tell
from metrics.errors import SojournError


def bench_serve(context: typer.Context) -> None:
    """Load a running server as `vllm bench serve` would, by its flags; --help lists them. Recorded as a scenario."""
    need("loadgen", "locust", "gevent", "httptools")
    from loadgen.run.experiment import SCENARIO_FILE, load_url
    from loadgen.run.progress_bar import ProgressBar
    from loadgen.scenario.vllm_flags import flag_parser, parse

    if {"-h", "--help"} & set(context.args) or not context.args:
        out.print(flag_parser().format_help(), highlight=False, markup=False)
        return
    asked = parse(context.args)
    run_dir = asked.run_dir or new_run(asked.scenario.name)
    recorded = asked.scenario.given_as_file(run_dir / SCENARIO_FILE)
    shown = ProgressBar(out) if asked.show_progress else nullcontext(lambda _: None)
    with run_told_when_stopped(run_dir), shown as progress:
        done = load_url(
            recorded, asked.base_url, run_dir, model=asked.model, tokenizer=asked.tokenizer, seed=asked.seed,
            processes=asked.processes, progress=progress,
        )  # fmt: skip
    code = tell(done)
    if asked.save is not None:
        save = asked.save
        label = {"label": save.label} if save.label else {}
        document = vllm_document(
            done, metrics=save.metrics, percentiles=save.percentiles, detailed=save.detailed,
            metadata=label | save.metadata,
        )  # fmt: skip
        out.print(f"result file    {_write(save.path(document), document, save.append)}", highlight=False)
    raise typer.Exit(code)


def _write(path: Path, document: dict, append: bool) -> Path:
    text = json.dumps(document, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SojournError(
            f"the result file {path} cannot be written: {error.strerror}; the run itself is kept"
        ) from None
    return path
