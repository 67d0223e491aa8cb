"""`sojourn plan`: which settings serve most within the objectives, found by replays of one run."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    program_name,
    run_progress,
    slo_objectives,
    table,
)
from sojourn.commands.repeat_run import check_repeatable, repeat_run
from sojourn.metrics.errors import InputError, ReplayError
from sojourn.metrics.exit_codes import Ended

if TYPE_CHECKING:
    from sojourn.metrics.prediction import Change, Predictor
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.replay.verdict.plan import Planned, Point, Progress
    from sojourn.replay.verdict.verify import Verified
    from sojourn.replay.verdict.walls import Wall

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
    confirm: Annotated[
        bool, typer.Option("--confirm", help="make one real run with the best settings, and verify the prediction")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="print one JSON document instead of tables; progress goes to stderr")
    ] = False,
) -> None:
    """Search the settings that serve most requests within the objectives, by replays of a recorded run.

    Prints the best settings, their frontier from low load to overload, the walls that bind there, and what twice the
    memory, the bandwidth, the arithmetic or the replicas would buy. Starts no server, except with --confirm.
    """
    from sojourn.metrics.machine.host import usable_cores
    from sojourn.metrics.run.fleet import refuse_fleet
    from sojourn.replay.predictor import predictor_of
    from sojourn.replay.verdict.plan import Search
    from sojourn.replay.verdict.run_walls import RunWalls, recorded_load

    opened = open_run(run)
    refuse_fleet(opened, "a plan")
    objectives = _objectives(opened, slo)
    if confirm:
        check_repeatable(opened)
    predictor = predictor_of(opened, processes=usable_cores())
    walls = RunWalls(opened)
    with _shown_progress(_recorded_rps(opened)) as progress:
        load = None if _is_closed(predictor) else recorded_load(opened)
        search = Search(predictor, objectives, attainment, load, progress)
        found = search.run(_candidates(opened, predictor), purchases())
    report = Report(opened, found, walls, predictor.pool_tokens, objectives, attainment, dollars_per_hour, slo)
    if not found.is_partial:  # else a whole plan that lies there is the better one
        keep(opened, report)
    if not json:
        report.print()
    if found.is_partial:
        if json:
            print_json(report.document())
        raise typer.Exit(Ended.STOPPED)
    if confirm and slo is not None and not json:
        out.print("! --confirm judges both runs by the objectives of the recorded run, not by those of --slo")
    confirmed = _confirm(opened, found, predictor, is_shown=not json) if confirm else None
    if json:
        print_json(report.document() | {"confirmed": confirmed and confirmed.entry})


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


class Report:
    """The plan of one run as a document, and on a terminal."""

    def __init__(
        self, run: "RunDirectory", found: "Planned", walls: Any, pool_tokens: "Callable[[Change], int]",
        objectives: Sequence[Mapping[str, Any]], attainment: float, dollars_per_hour: float | None,
        slo: str | None = None,
    ) -> None:  # fmt: skip
        self.found, self.attainment, self.dollars_per_hour = found, attainment, dollars_per_hour
        self.objectives = objectives
        self._run, self._walls, self._pool_tokens = run, walls, pool_tokens
        self._meta = run.meta()
        given = {"--slo": slo, "--dollars-per-hour": dollars_per_hour, "--attainment": attainment}
        self._options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        self.recorded_rps = _recorded_rps(run)
        self.doubts = (found.best_limit or found.best[0]).prediction.doubts if found.best else []

    def settings_of(self, point: "Point") -> dict[str, Any]:
        from sojourn.metrics.run.directory import engine_settings

        return engine_settings(self._meta) | point.settings

    def walls_at(self, point: "Point") -> "list[Wall]":
        settings, pool_tokens = self.settings_of(point), self._pool_tokens(point.prediction.change)
        tpot = min((each["tpot_ms"] for each in self.objectives if each.get("tpot_ms")), default=None)
        e2e_ms = point.prediction.e2e_ms["p50"].median
        return self._walls.at(settings, pool_tokens, self.recorded_rps * point.rate, e2e_ms, tpot)

    def cost(self, point: "Point") -> float | None:
        from sojourn.replay.verdict.plan import usd_per_million_tokens

        if self.dollars_per_hour is None:
            return None
        return usd_per_million_tokens(self.dollars_per_hour, point.prediction.output_tokens_per_s * point.attainment)

    def document(self) -> dict[str, Any]:
        def shown(point: "Point | None", *, has_walls: bool = True) -> dict[str, Any] | None:
            if point is None:
                return None
            walls = self.walls_at(point) if has_walls else []
            return {
                "settings": point.settings, "rate_rps": self.recorded_rps * point.rate, "rate": point.rate,
                "usd_per_million_good_output_tokens": self.cost(point), "prediction": point.prediction,
            } | ({"walls": walls, "binding": _binding(walls)} if has_walls else {})  # fmt: skip

        found = self.found
        return {
            "run": self._run.name, "objectives": list(self.objectives), "attainment": self.attainment,
            "settings": found.settings, "recorded_limit": shown(found.recorded_limit),
            "best_limit": shown(found.best_limit), "recorded": [shown(point) for point in found.recorded],
            "best": [shown(point) for point in found.best],
            "purchases": {
                # Bought hardware has other walls than those of this machine.
                name: shown(point, has_walls=False) for name, point in found.purchases.items()
            },
            "replays": found.replays, "closed_loop": found.is_closed, "doubts": self.doubts,
        }  # fmt: skip

    def print(self) -> None:
        found = self.found
        out.print(f"objective      {_bounds(self.objectives)} for {self.attainment:.0%} of the requests", markup=False)
        out.print(f"recorded       {self._limit(found.recorded_limit)}", markup=False)
        words = " ".join(f"{name}={value}" for name, value in found.settings.items())
        out.print(
            f"best           {self._limit(found.best_limit)}, with {words or 'the recorded settings'}", markup=False
        )
        stopped = ", stopped with Ctrl-C: the best so far" if found.is_partial else ""
        out.print(f"found by       {found.replays} replays of {self._run.name}{stopped}\n", markup=False)
        self._print_frontier("recorded settings", found.recorded)
        if found.settings:
            self._print_frontier("best settings", found.best)
        at = found.best_limit or (found.best[0] if found.best else None)
        if at is not None:
            self._print_walls(at)
        self._print_purchases()
        for doubt in self.doubts:
            out.print(f"! the replays are not trusted: {doubt}", markup=False)
        if found.is_closed:
            out.print("! the load is a closed loop, so settings are compared at its concurrency, not at a rate")
        if words:
            command = shlex.join(["plan", str(self._run.path), *self._options, "--confirm"])
            out.print(f"\nconfirm it     {program_name()} {command}", markup=False, soft_wrap=True)

    def _limit(self, point: "Point | None") -> str:
        if point is None:
            return "no rate that was replayed keeps the objectives"
        cost = self.cost(point)
        price = "" if cost is None else f", $ {cost:.3g} per million good output tokens"
        rate = "" if self.found.is_closed else f"{self.recorded_rps * point.rate:.3g} requests/s, "
        return f"{rate}goodput {point.goodput_rps:.3g}/s ({point.rate:.2f} times the recorded rate){price}"

    def _print_frontier(self, title: str, points: "Sequence[Point]") -> None:
        heads = ["req/s", "good/s", "kept", "80%", "TTFT p90", "TPOT p90", "tok/s"]
        heads += ["$/M"] * (self.dollars_per_hour is not None) + ["wall"]
        rows = table(*heads, text=["wall"])
        for point in points:
            said = point.prediction
            nearest = _binding(self.walls_at(point))
            cells = [
                f"{self.recorded_rps * point.rate:.3g}", f"{point.goodput_rps:.3g}", f"{point.attainment:.0%}",
                "unpredicted" if said.is_open else f"{said.attainment.low:.0%}–{said.attainment.high:.0%}",
                _ms(said.ttft_ms), _ms(said.tpot_ms),
                f"{said.output_tokens_per_s:,.0f}",
            ]  # fmt: skip
            if self.dollars_per_hour is not None:
                cost = self.cost(point)
                cells.append("–" if cost is None else f"{cost:.3g}")
            rows.add_row(*cells, nearest or "unknown")
        out.print(f"[bold]{title}[/bold]")
        out.print(rows)

    def _print_walls(self, point: "Point") -> None:
        walls = self.walls_at(point)
        nearest = _binding(walls)
        out.print(f"\n[bold]walls at {self.recorded_rps * point.rate:.3g} requests/s[/bold]")
        for wall in walls:
            allows = "unknown" if wall.requests_per_s is None else f"{wall.requests_per_s:,.3g} requests/s"
            if wall.concurrent is not None:
                allows += f", {wall.concurrent:,.0f} at a time"
            mark = "  ← nearest" if wall.name == nearest else ""
            out.print(f"{wall.name:<10} {allows}{mark}\n           {wall.formula}", markup=False)

    def _print_purchases(self) -> None:
        limit = self.found.best_limit
        if not self.found.purchases or limit is None:
            return
        out.print("\n[bold]what more hardware would buy[/bold]")
        rows = table("purchase", "requests/s", "gain", text=["purchase"])
        for name, point in self.found.purchases.items():
            if point is None:
                rows.add_row(name, "–", "–")
            else:
                rows.add_row(name, f"{self.recorded_rps * point.rate:.3g}", f"{point.rate / limit.rate - 1:+.0%}")
        out.print(rows)


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
    if (given := slo_objectives(slo)) is not None:
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


def _recorded_rps(run: "RunDirectory") -> float:
    """Requests a second that the run sent."""
    from sojourn.metrics.request.goodput import measured, rate_window
    from sojourn.metrics.results.load import declared_window_s
    from sojourn.metrics.run.directory import kept_share

    meta = run.meta()
    rows = measured(run.requests(), meta)
    return rate_window(rows, declared_window_s(meta), kept_share(meta)).due_rps or 0.0


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


def _binding(walls: "Sequence[Wall]") -> str | None:
    from sojourn.replay.verdict.walls import binding

    return getattr(binding(walls), "name", None)


def _bounds(objectives: Sequence[Mapping[str, Any]]) -> str:
    from sojourn.metrics.request.objectives import OBJECTIVES, short

    return "; ".join(
        " ".join(f"{short(name).upper()} ≤ {each[name]:g} ms" for name in OBJECTIVES if each.get(name))
        + ("" if each.get("klass", "all") == "all" else f" of {each['klass']}")
        for each in objectives
    )


def _ms(quantiles: Mapping[str, Any]) -> str:
    value = quantiles["p90"].median
    return "–" if value != value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
