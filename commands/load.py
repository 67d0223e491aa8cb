"""`sojourn load`: a load against a server that is already running."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import (
    ProcessesOption,
    RunDirOption,
    SeedOption,
    SensorsOption,
    StopOption,
    VerboseOption,
    need,
    new_run,
    out,
    print_again,
    run_progress,
    running_sensors,
    sensors_of,
)
from sojourn.commands.export import VLLM_FILE, export
from sojourn.commands.load_options import (
    OtherArgument,
    TargetArgument,
    load_options,
    print_load,
    scenario_and_server,
    stated_scenario,
)
from sojourn.commands.summary import summarise
from sojourn.metrics.errors import InputError

SLO_NAMES = ("ttft_ms", "tpot_ms", "e2e_ms")

if TYPE_CHECKING:
    from sojourn.loadgen.scenario.options import LoadOptions
    from sojourn.metrics.run.directory import RunDirectory


@load_options
def load(
    context: typer.Context,
    scenario: TargetArgument = None,
    server: OtherArgument = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            help="any OpenAI-compatible server, such as 127.0.0.1:8000, unless it is the first word; the environment "
            "variable SOJOURN_API_KEY has its key"
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="model to request; by default the server's first one")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="tokenizer.json, its folder, `tiny-model`, or `server` (its POST /tokenize): makes prompt lengths "
            "exact; without it they are counted in words"
        ),
    ] = None,
    server_run: Annotated[
        list[Path] | None,
        typer.Option(
            help="run directory of a Sojourn server on this host (serve --run-dir), or folder of a probe in "
            "another server; causes need its records; "
            "repeatable for the servers behind a router"
        ),
    ] = None,
    output: RunDirOption = None,
    seed: SeedOption = None,
    processes: ProcessesOption = 1,
    stop_when_resolved: StopOption = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help=f"also write {VLLM_FILE}, the result file of vllm bench serve")
    ] = False,
    sensors: SensorsOption = None,
    verbose: VerboseOption = False,
    *,
    asked: "LoadOptions",
) -> None:
    """Load a running server and diagnose the run. Causes need the server's records too.

    With an address alone it sends a small load with announced bounds: `sojourn load 127.0.0.1:8000`. With --rate,
    --duration or --requests, or with a scenario, it sends what they say.
    """
    need("loadgen")
    from sojourn.engine.options import check_settings
    from sojourn.loadgen.run.experiment import load_url
    from sojourn.loadgen.run.small_load import OUTPUT_TOKENS, PROMPT_TOKENS

    named, base_url = scenario_and_server((scenario, server), base_url)
    if base_url is None:
        to = f"--base-url, as in `sojourn load {named} --base-url 127.0.0.1:8000`" if named else "its address"
        raise InputError(f"no server is named; give {to}")
    feed = sensors_of(sensors, [base_url])
    sent = {"sensors": feed, "model": model, "seed": seed, "server_runs": server_run or (), "processes": processes}
    if named is None and not asked.states_a_load and stop_when_resolved is None:
        with running_sensors(feed):
            done, rate = _small_load(asked, base_url, tokenizer, output or new_run("first"), sent)
        code = _finish(done, save_result, verbose)
        if rate is not None:
            kept = [] if asked.prompt_tokens else ["--prompt-tokens", str(PROMPT_TOKENS)]
            kept += [] if asked.output_tokens else ["--output-tokens", str(OUTPUT_TOKENS)]
            kept += [] if asked.slo else _judged_slo(done)
            print_again(context, "a larger load", "--rate", f"{2 * rate:.2g}", "--duration", "60s", *kept)
        raise typer.Exit(code)
    loaded = stated_scenario(named, asked)
    check_settings(loaded.engine)
    run_dir = output or new_run(loaded.name)
    print_load(loaded, seed)
    with running_sensors(feed), run_progress(run_dir) as progress:
        done = load_url(
            loaded, base_url, run_dir, tokenizer=tokenizer, progress=progress, stop_when_resolved=stop_when_resolved,
            **sent,
        )  # fmt: skip
    raise typer.Exit(_finish(done, save_result, verbose))


def _small_load(
    asked: "LoadOptions", base_url: str, tokenizer: str | None, run_dir: Path, sent: dict
) -> "tuple[RunDirectory, float | None]":
    from sojourn.loadgen.run.small_load import SmallLoad, send_small_load

    small = SmallLoad(asked, tokenizer)
    for name, sentence in small.sentences():
        out.print(f"{name:<14} {sentence}", markup=False)
    with run_progress(run_dir) as progress:
        return send_small_load(
            small, base_url, run_dir, lambda sentence: out.print(sentence, markup=False), progress=progress, **sent
        )


def _judged_slo(done: "RunDirectory") -> list[str]:
    """The option for the objectives that a run was judged by, so that the next one is judged alike."""
    bounds = next(iter(done.meta()["objectives"] or ()), {})
    told = [f"{name.removesuffix('_ms')}:{bounds[name]:g}" for name in SLO_NAMES if bounds.get(name)]
    return ["--slo", " ".join(told)] if told else []


def _finish(done: "RunDirectory", save_result: bool, verbose: bool) -> int:
    code = summarise(done, verbose)
    if save_result:
        export(done.path)
    return code
