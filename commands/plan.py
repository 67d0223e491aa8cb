"""`sojourn plan`: which settings serve most within the objectives, found by replays of one run."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console

from sojourn.commands.cli import (
    RunArgument,
    SloOption,
    new_run,
    open_run,
    out,
    print_json,
    run_progress,
    slo_objectives,
)
from sojourn.commands.curve_file import CurveFile, check_curve_file, write_curves
from sojourn.commands.plan_devices import Offers
from sojourn.commands.plan_report import Report, offered_rps
from sojourn.commands.repeat_run import check_repeatable, repeat_run
from sojourn.metrics.errors import InputError, ReplayError
from sojourn.metrics.exit_codes import Ended
from sojourn.metrics.request.objectives import A_REPLAY

if TYPE_CHECKING:
    from sojourn.metrics.prediction import Change, Predictor
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.replay.verdict.plan import Planned, Progress
    from sojourn.replay.verdict.verify import Verified

HOST_SHARE = 0.5  # of a host's memory that a planned pool may take: others use it, too


def plan(
    run: RunArgument,
    slo: SloOption = None,
    attainment: Annotated[
        float, typer.Option(min=0.01, max=0.999, help="share of the requests that must keep the objectives")
    ] = 0.9,
    dollars_per_hour: Annotated[
        float | None, typer.Option(min=0.0001, help="price of this machine, for the cost of a million output tokens")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="GPUs to compare, such as h100_sxm,2xh200_sxm, in place of twice the parts"),
    ] = None,
    recorded_device: Annotated[
        str | None, typer.Option(metavar="NAME", help="the GPU of the run, where run.json does not name it")
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(help="TOML file whose prices and figures replace those of the devices")
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="make one real run with the best settings, and verify the prediction")
    ] = False,
    output: Annotated[Path | None, CurveFile] = None,
    json: Annotated[
        bool, typer.Option("--json", help="print one JSON document instead of tables; progress goes to stderr")
    ] = False,
) -> None:
    """Search the settings that serve most requests within the objectives, by replays of a recorded run.

    Prints the best settings, their frontier from low load to overload, the walls that bind there, and what twice the
    memory, the bandwidth, the arithmetic or the replicas would buy; with --device, what other GPUs would serve, and
    for how many dollars. Starts no server, except with --confirm.
    """
    from sojourn.metrics.machine.host import usable_cores
    from sojourn.metrics.run.fleet import refuse_fleet
    from sojourn.replay.predictor import predictor_of
    from sojourn.replay.verdict.plan import Search
    from sojourn.replay.verdict.run_walls import RunWalls, recorded_load

    check_curve_file(output)
    opened = open_run(run)
    refuse_fleet(opened, "a plan")
    objectives = _objectives(opened, slo)
    if confirm:
        check_repeatable(opened)
    offers = _offers(device, prices, recorded_device)
    predictor = predictor_of(opened, processes=usable_cores())
    bought = _bought(offers, predictor)
    walls = RunWalls(opened)
    with _shown_progress(offered_rps(opened)) as progress:
        load = None if _is_closed(predictor) else recorded_load(opened)
        search = Search(predictor, objectives, attainment, load, progress)
        found = search.run(_candidates(opened, predictor), bought)
    report = Report(opened, found, walls, predictor.pool_tokens, objectives, attainment, dollars_per_hour, slo)
    if offers is not None:
        report.offers = offers
        report.sentences = [f"{name}: {predictor.hardware_sentence(change)}" for name, change in bought.items()]
    if not found.is_partial:  # else a whole plan that lies there is the better one
        keep(opened, report)
    if output is not None:
        write_curves(report.curves, output, f"Plan of {opened.name}: throughput per device against tokens per user")
    if not json:
        report.print()
        if output is not None:
            out.print(f"wrote {output}", markup=False)
    if found.is_partial:
        if json:
            print_json(report.document())
        raise typer.Exit(Ended.STOPPED)
    if confirm and slo is not None and not json:
        out.print("! --confirm judges both runs by the objectives of the recorded run, not by those of --slo")
    confirmed = _confirm(opened, found, predictor, is_shown=not json) if confirm else None
    if json:
        print_json(report.document() | {"confirmed": confirmed and confirmed.entry})


def _offers(device: str | None, prices: Path | None, recorded_device: str | None) -> Offers | None:
    if device is None and (recorded_device is not None or prices is not None):
        raise InputError("--recorded-device and --prices are for the devices of --device; give that, or leave them out")
    return None if device is None else Offers(device, prices, recorded_device)


def _bought(offers: Offers | None, predictor: "Predictor") -> "dict[str, Change]":
    """Raises ReplayError for a device of which nothing is known."""
    if offers is None:
        return purchases()
    found = offers.purchases()
    for change in found.values():
        predictor.check(change)
    return found


def purchases() -> "dict[str, Change]":
    """What money can buy, as changes of a replay."""
    from sojourn.metrics.prediction import Change

    return {
        "twice the KV memory": Change(kv_scale=2.0),
        "twice the bandwidth (decodes in half the time)": Change(removed={"compute.decode": 0.5}),
        "twice the arithmetic (prompts in half the time)": Change(removed={"compute.prefill": 0.5}),
        "a device twice as fast": Change(device_speed=2.0),
        "a second replica": Change(replicas=2, routing="least-requests"),
    }


def keep(run: "RunDirectory", report: Report) -> None:
    """Leaves the plan in the run, for the curve of a sweep; a disk that does not take it costs nothing but the file.
    Other objectives than the run's own, and another share of requests, would replace what the curve recommends."""
    from sojourn.loadgen.search.curve import PLAN_FILE
    from sojourn.loadgen.search.frontier import REQUIRED_SHARE

    own = run.meta().get("objectives")
    if report.attainment != REQUIRED_SHARE or (own and list(report.objectives) != list(own)):
        return
    try:
        run.write_json(PLAN_FILE, msgspec.to_builtins(report.document()))
    except OSError as error:
        print(f"sojourn: {run.path / PLAN_FILE} cannot be written: {error.strerror}", file=sys.stderr)


def _objectives(run: "RunDirectory", slo: str | None) -> list[Mapping[str, Any]]:
    if (given := slo_objectives(slo, A_REPLAY)) is not None:
        return given
    known = run.meta().get("objectives")
    if not known:
        raise InputError(f"{run.path} has no objectives to plan for; give some: --slo 'ttft:500 tpot:50'")
    return known


def _candidates(run: "RunDirectory", predictor: "Predictor") -> dict[str, list[Any]]:
    """Coarse values of each setting that a replay can change on this machine."""
    from sojourn.metrics.prediction import Change
    from sojourn.metrics.run.directory import engine_settings, section

    meta = run.meta()
    now, core = engine_settings(meta), section(meta, "core")
    wanted: dict[str, list[Any]] = {
        "max_num_seqs": [4, 8, 16, 32, 64, 128],
        "num_kv_blocks": _pools(core, meta),
        "prefix_caching": [True, False],
        "max_num_batched_tokens": ["auto", 64, 128, 256, 512, 1024],
        "max_prefill_chunk_tokens": [64, 256],
        "policy": ["fcfs", "shortest-prefill-first"],
        "block_size": [8, 16, 32],
    }
    found = {}
    for name, values in wanted.items():
        usable = []
        for value in values:
            try:
                predictor.check(Change(settings={name: value}))
            except ReplayError:
                continue
            if value != now.get(name):
                usable.append(value)
        found[name] = usable
    return found


def _pools(core: Mapping[str, Any], meta: Mapping[str, Any]) -> list[int]:
    """Twice and four times the blocks, as far as the machine's memory goes."""
    from sojourn.metrics.run.directory import section, server_hardware

    blocks, size = core.get("num_kv_blocks"), core.get("block_size", 16)
    memory = server_hardware(meta).get("memory_bytes")
    per_token = section(meta, "model_shape").get("kv_bytes_per_token")
    if not blocks or not memory or not per_token or core.get("device") != "cpu":
        return []
    most = int(HOST_SHARE * memory / (per_token * size))
    return [blocks * factor for factor in (2, 4) if blocks * factor <= most]


def _confirm(
    run: "RunDirectory", found: "Planned", predictor: "Predictor", *, is_shown: bool
) -> "Verified | None":  # fmt: skip
    """Repeats the run's scenario with the best settings, and verifies what the replay said of them. None where the
    recorded settings are the best."""
    from sojourn.commands.verify import print_verified, verify_pair
    from sojourn.metrics.run.directory import section
    from sojourn.replay.verdict.ledger import ledger_beside

    if not found.settings:
        if is_shown:
            out.print("\nThe recorded settings are the best that were found, so there is nothing to confirm.")
        return None
    folder = new_run(f"{section(run.meta(), 'scenario').get('name')}-plan")
    with run_progress(folder, is_shown) as progress:
        done = repeat_run(run, found.settings, folder, progress)
    ledger = ledger_beside(run.path)
    confirmed = verify_pair(run, done, ledger, predicted_by="plan", predictor=predictor)
    if is_shown:
        print_verified(confirmed, ledger)
    return confirmed


def _is_closed(predictor: "Predictor") -> bool:
    from sojourn.metrics.prediction import Change

    try:
        predictor.check(Change(arrival_rate=1.1))
    except ReplayError:
        return True
    return False


@contextmanager
def _shown_progress(recorded_rps: float) -> "Iterator[Callable[[Progress], None]]":
    """On stderr: once how long the search will take, then what is replayed, how far it is, and its best so far."""
    console, said = Console(stderr=True, highlight=False), [False]

    with console.status("replays the run as it was") as status:

        def show(now: "Progress") -> None:
            if now.left_s is not None and now.replays > 1 and not said[0]:  # the first one is many at a time
                said[0] = True
                console.print(
                    f"about {now.of_about} replays, {tell_duration(now.left_s)}; Ctrl-C ends with the best so far"
                )
            status.update(tell_progress(now, recorded_rps))

        yield show


def tell_duration(seconds: float) -> str:
    """To be read as an estimate: "40 s", "3 min"."""
    return f"{max(1, round(seconds, -1 if seconds >= 20 else 0)):.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def tell_progress(now: "Progress", recorded_rps: float) -> str:
    left = "" if now.left_s is None else f", {tell_duration(now.left_s)} left"
    best = ""
    if now.best is not None:
        words = " ".join(f"{name}={value}" for name, value in now.best.settings.items()) or "the recorded settings"
        best = f"; best so far {recorded_rps * now.best.rate:.3g} requests/s with {words}"
    return f"replay {now.replays + 1} of about {now.of_about}{left}: {now.doing}{best}"
