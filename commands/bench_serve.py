"""`sojourn bench-serve`: the flags of `vllm bench serve`, our measurement."""

import json

import typer

from sojourn.commands.cli import need, new_run, out, run_progress, table, writing
from sojourn.commands.export import vllm_document
from sojourn.commands.load_options import print_load
from sojourn.commands.summary import summarise


def _print_table(rows: list[tuple[str, str, str]]) -> None:
    shown = table("", "value", "", text=("",))
    for name, value, note in rows:
        shown.add_row(name if value else f"[bold]{name}[/bold]", value, note)
    shown.show_header = False
    out.print(shown)
    out.print("As vllm bench serve: latencies from the actual send. The tables below are from the intended send.\n")


def bench_serve(context: typer.Context) -> None:
    """Load a running server with the flags of `vllm bench serve`; --help lists them. Records a run as `load` does."""
    need("loadgen")
    from sojourn.commands.vllm_table import vllm_table
    from sojourn.loadgen.run.experiment import load_url
    from sojourn.loadgen.scenario.vllm_flags import flag_parser, parse

    if {"-h", "--help"} & set(context.args) or not context.args:
        out.print(flag_parser().format_help(), markup=False, soft_wrap=True)
        return
    flags = parse(context.args)
    run_dir = flags.run_dir or new_run(flags.scenario.name)
    print_load(flags.scenario, flags.seed)
    with run_progress(run_dir, flags.show_progress) as progress:
        done = load_url(
            flags.scenario, flags.base_url, run_dir, model=flags.model, tokenizer=flags.tokenizer, seed=flags.seed,
            processes=flags.processes, progress=progress,
        )  # fmt: skip
    save = flags.save
    _print_table(vllm_table(vllm_document(done), *((save.metrics, save.percentiles) if save is not None else ())))
    code = summarise(done)
    if save is not None:
        label = {"label": save.label} if save.label else {}
        document = vllm_document(
            done, metrics=save.metrics, percentiles=save.percentiles, detailed=save.detailed,
            metadata=label | save.metadata,
        )  # fmt: skip
        path = save.path(document)
        with writing(path, "the run itself is complete"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if save.append else "w", encoding="utf-8") as file:
                file.write(json.dumps(document, allow_nan=False) + "\n")
        out.print(f"result file    {path}")
    raise typer.Exit(code)
