"""`sojourn size`: how much of a load a server would serve, on which devices, before it exists."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from sojourn.commands.cli import SeedOption, SloOption, open_run, out, print_json, slo_objectives
from sojourn.commands.curve_file import CurveFile, check_curve_file, write_curves
from sojourn.metrics.errors import InputError, ReplayError
from sojourn.metrics.exit_codes import Ended
from sojourn.metrics.request.objectives import A_REPLAY

if TYPE_CHECKING:
    from sojourn.metrics.compute.model_sizes import ModelSizes
    from sojourn.replay.device.catalogue import Device
    from sojourn.replay.device.estimate import Deployment
    from sojourn.replay.sizing.answer import Question, Sized
    from sojourn.replay.sizing.load import SizedLoad

LENGTHS = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
FEWEST_REQUESTS = 3000
BACKENDS = ("vllm", "sglang", "trtllm", "sojourn")
DEFAULTS = ("auto", "bf16", 1, "vllm")  # of --weights, --kv, --ep and --backend


def size(
    model: Annotated[str, typer.Argument(help="a config.json, its folder, or a name such as Llama-3.1-8B")],
    load: Annotated[str, typer.Argument(help="a scenario, a trace, a recorded run, or lengths in tokens: 1024/256")],
    device: Annotated[str, typer.Option(help="devices, with commas, such as h100_sxm,h200_sxm; or a recorded run")],
    tp: Annotated[str, typer.Option("--tp", help="devices of a replica (tensor parallel), with commas")] = "1",
    ep: Annotated[int, typer.Option("--ep", min=1, max=1024, help="expert parallel degree within a replica")] = 1,
    backend: Annotated[str, typer.Option(help="how the server fills its steps: " + ", ".join(BACKENDS))] = "vllm",
    weights: Annotated[str, typer.Option(help="format of the weights; auto is that of the checkpoint")] = "auto",
    kv: Annotated[str, typer.Option("--kv", help="format of keys and values: bf16, fp8, int8")] = "bf16",
    slo: SloOption = None,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="share of the requests that must keep the objectives")
    ] = 0.9,
    rate: Annotated[
        float | None,
        typer.Option(min=1e-6, max=1e9, help="requests per second to find a fleet for; of a trace its own"),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a setting of the server; repeatable")
    ] = None,
    usd_per_hour: Annotated[
        float | None, typer.Option(min=0.0001, max=1e6, help="price of one device, in place of the catalogue's")
    ] = None,
    devices: Annotated[
        Path | None, typer.Option("--devices", help="your file of devices and prices, in the catalogue's form")
    ] = None,
    calibrate: Annotated[
        str | None, typer.Option(help="a run, or a result of another tool: a measured point of this deployment")
    ] = None,
    maker: Annotated[str, typer.Option("--times", help="where times come from: auto, kernels, roofline")] = "auto",
    seed: SeedOption = None,
    output: Annotated[Path | None, CurveFile] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON document instead of tables")] = False,
) -> None:
    """Size a server before it exists: its memory, its largest load within the objectives, its walls, its price.

    The engine's own scheduler serves the load on step times of measured kernels, or of the device's peak rates. Starts
    nothing, and needs no weights.
    """
    from sojourn.commands.size_report import SizeReport
    from sojourn.metrics.compute.model_catalog import find_model
    from sojourn.replay.device.catalogue import catalogue

    check_curve_file(output)
    sizes, known = find_model(model), catalogue(devices)
    loaded, objectives, is_trace = _load(load, slo, seed)
    deployments = _deployments(model, sizes, device, tp, ep, backend, weights, kv)
    wanted = rate if rate is not None else (loaded.rate_rps if is_trace else None)
    question = _question(objectives, attainment, set_ or [], usd_per_hour, wanted, is_one=len(deployments) == 1)
    if maker not in ("auto", "kernels", "roofline"):
        raise InputError(f"--times {maker!r} is not known; give auto, kernels or roofline")
    if calibrate is not None and len(deployments) > 1:
        raise InputError("--calibrate is a point of one deployment; give one device and one --tp")
    answers = _answers([(sizes, loaded, each, known, question, maker, calibrate) for each in deployments])
    report = SizeReport(sizes, loaded, question, answers)
    if output is not None:
        write_curves(report.curves, output, f"{sizes.name}: throughput per device against tokens per user")
    if json:
        print_json(report.document())
    else:
        report.print()
        if output is not None:
            out.print(f"wrote {output}", markup=False)
    if all(each.refused for each in answers):
        raise typer.Exit(Ended.FAILED)


def _load(text: str, slo: str | None, seed: int | None) -> "tuple[SizedLoad, list[Any], bool]":
    """The load, its objectives, and whether it is a trace, whose rate a fleet is sized for."""
    from sojourn.loadgen.scenario.scenario import bundled_scenarios, load_scenario
    from sojourn.loadgen.schedule.sized import sized_load, traced_load, traced_requests
    from sojourn.replay.sizing.load import plain_load, recorded_load_of

    given, own = slo_objectives(slo, A_REPLAY), None
    is_trace = False
    if (lengths := LENGTHS.fullmatch(text)) is not None:
        found = plain_load(*map(int, lengths.groups()), count=FEWEST_REQUESTS, seed=seed or 0)
    elif (Path(text) / "run.json").is_file():
        run = open_run(Path(text))
        found, own = recorded_load_of(run), run.meta().get("objectives")
    elif _is_trace(text):
        rows, block_tokens = traced_requests(text)
        found, is_trace = traced_load(Path(text).name, rows, block_tokens, FEWEST_REQUESTS), True
    else:
        if not Path(text).exists() and text not in bundled_scenarios():
            raise InputError(
                f"{text!r} is no scenario, trace or recorded run, and no lengths: these are whole tokens from 1 to "
                f"999,999,999, such as 1024/256. Bundled scenarios are {', '.join(bundled_scenarios())}"
            )
        scenario = load_scenario(text)
        found = sized_load(scenario, FEWEST_REQUESTS, seed)
        own = [each.model_dump(exclude_none=True) for each in scenario.objectives]
    objectives = given or own
    if not objectives:
        raise InputError(f"{text} has no objectives to size for; give some: --slo 'ttft:500 tpot:50'")
    return found, objectives, is_trace


def _is_trace(text: str) -> bool:
    """A file that is no scenario by its ending, a folder of files, or a bundled trace. The name of a bundled scenario
    goes before a folder's."""
    from sojourn.loadgen.scenario.scenario import bundled_scenarios
    from sojourn.loadgen.traces.reader import TRACE_FOLDER

    path = Path(text)
    if path.is_dir():
        return text not in bundled_scenarios()
    return path.suffix not in ("", ".yaml", ".yml") and (path.is_file() or (TRACE_FOLDER / text).is_file())


def _deployments(
    model: str, sizes: "ModelSizes", devices: str, degrees: str, ep: int, backend: str, weights: str, kv: str
) -> "list[Deployment]":
    from sojourn.metrics.compute.number_formats import kv_format, weight_format
    from sojourn.metrics.compute.rank_shape import check_parallel
    from sojourn.replay.device.estimate import Deployment

    if backend not in BACKENDS:
        raise InputError(f"--backend {backend!r} is not known; give one of {', '.join(BACKENDS)}")
    try:
        parallel = [int(each) for each in degrees.split(",")]
    except ValueError:
        raise InputError(f"--tp {degrees!r} must be whole numbers with commas, such as 1,2,4") from None
    names = [each.strip() for each in devices.split(",") if each.strip()]
    if not names or len(set(names)) < len(names) or len(set(parallel)) < len(parallel):
        raise InputError("--device and --tp must name each device and each degree once")
    runs = [name for name in names if (Path(name) / "run.json").is_file()]
    if runs and (weights, kv, ep, backend) != DEFAULTS:
        raise InputError(
            f"--device {runs[0]} is a recorded run, whose steps are of its own server; leave --weights, --kv, --ep and "
            "--backend out"
        )
    for degree in parallel:
        check_parallel(sizes, degree, ep)
    return [
        Deployment(
            model=model,
            device=name,
            backend=backend,  # type: ignore[arg-type]
            tensor_parallel=degree,
            expert_parallel=ep,
            weight_format=sizes.stored.name if weights == "auto" else weight_format(weights).name,
            kv_format=kv_format(kv).name,
        )
        for name in names
        for degree in parallel
    ]


def _question(
    objectives: list[Any], share: float, set_: list[str], usd_per_hour: float | None, rate: float | None,
    *, is_one: bool,
) -> "Question":  # fmt: skip
    from sojourn.replay.device.simulate import check_settings
    from sojourn.replay.sizing.answer import Question
    from sojourn.scripting.changes import grid

    changes = grid(set_)
    if len(changes) > 1:
        raise InputError("--set takes one value a key here; compare settings by several calls")
    if changes and any(name != "settings" for name in _changed(changes[0])):
        raise InputError("--set takes settings of a server here, such as max_num_seqs=64")
    settings = dict(changes[0].settings) if changes else {}
    check_settings(settings)
    return Question(
        objectives=objectives,
        share=share,
        settings=settings,
        usd_per_hour=usd_per_hour,
        rate_rps=rate,
        has_split=is_one,
    )


def _changed(change: Any) -> list[str]:
    return [name for name in change.__struct_fields__ if getattr(change, name) != getattr(type(change)(), name)]


def _answers(jobs: list[tuple[Any, ...]]) -> "list[Sized]":
    """Several deployments are sized in as many processes as there are cores."""
    import multiprocessing

    from sojourn.metrics.interrupts import own_interrupts
    from sojourn.metrics.machine.host import usable_cores

    processes = min(usable_cores(), len(jobs))
    if processes < 2:
        return [_answer(*job) for job in jobs]
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of pyarrow
    with own_interrupts():
        workers = context.Pool(processes)
    with workers as pool:
        return pool.starmap(_answer, jobs, chunksize=1)


def _answer(
    sizes: "ModelSizes", load: "SizedLoad", deployment: "Deployment", known: "dict[str, Device]",
    question: "Question", maker: str, calibrate: str | None,
) -> "Sized":  # fmt: skip
    from sojourn.replay.sizing.answer import refused, sized
    from sojourn.replay.sizing.estimates import estimate_for

    try:
        made = estimate_for(deployment, known, maker)
        question = msgspec.structs.replace(question, settings={**made.settings, **question.settings})
        correction = None
        if calibrate is not None:
            from sojourn.commands.size_calibrate import correction_of

            correction = msgspec.structs.replace(
                correction_of(calibrate, made.estimate, load, question.settings), error=made.corrected
            )
        device = known.get(deployment.device)
        return sized(sizes, load, device, made.estimate, question, correction, made.why_roofline)
    except ReplayError as error:
        return refused(deployment, str(error))
