"""The plan of one run, as a document and on a terminal."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sojourn.commands.cli import out, program_name, table
from sojourn.commands.curve_file import print_curves

if TYPE_CHECKING:
    from sojourn.commands.plan_devices import Offers
    from sojourn.loadgen.search.curve import Curve
    from sojourn.metrics.prediction import Change
    from sojourn.metrics.run.directory import RunDirectory
    from sojourn.replay.verdict.plan import Planned, Point
    from sojourn.replay.verdict.walls import Wall


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
        self.recorded_rps = offered_rps(run)
        self.offers: Offers | None = None  # of --device
        self.sentences: list[str] = []  # on what the time of each rests
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

    @property
    def curves(self) -> "list[Curve]":
        from sojourn.loadgen.search.predicted import planned_curves

        own, prices = self._own_count, {"": self.dollars_per_hour}
        devices: dict[str, int | None] = {"": own}
        for name in self.found.purchases:
            if self.offers is not None:
                devices[name], prices[name] = self.offers.count_and_price(name, self._recorded_count())
            else:
                devices[name] = None if own is None else own * self._replicas(name)
        return planned_curves(
            self.found, self.objectives, self.attainment, self.recorded_rps, devices, prices
        )  # fmt: skip

    @property
    def _own_count(self) -> int | None:
        """Devices of the run."""
        from sojourn.metrics.run.devices import num_devices

        return self._recorded_count() if self.offers is not None else num_devices(self._meta)

    def _replicas(self, name: str) -> int:
        """Of a purchase."""
        return max((each.prediction.change.replicas for each in self.found.tried.get(name, [])), default=1)

    def document(self) -> dict[str, Any]:
        from sojourn.loadgen.search.curve import curve_rows

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
                name: (shown(point, has_walls=False) or {}) | self._offered(name, point) or None
                for name, point in found.purchases.items()
            },
            "replays": found.replays, "closed_loop": found.is_closed, "doubts": self.doubts,
            "curve": curve_rows(self.curves),
        }  # fmt: skip

    def _offered(self, name: str, point: "Point | None") -> dict[str, Any]:
        if self.offers is None or point is None:
            return {}
        return self.offers.figures(name, point, self._recorded_count())

    def _recorded_count(self) -> int:
        from sojourn.replay.device.recorded_steps import recorded_deployment

        return recorded_deployment(self._meta).num_devices

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
        if any(curve.points for curve in self.curves):
            print_curves(self.curves)
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
        if self.offers is not None:
            count = self._recorded_count()
            self.offers.print(self.found.purchases, self.recorded_rps, count, limit.rate, self.sentences)
            return
        out.print("\n[bold]what more hardware would buy[/bold]")
        rows = table("purchase", "requests/s", "gain", text=["purchase"])
        for name, point in self.found.purchases.items():
            if point is None:
                rows.add_row(name, "–", "–")
            else:
                rows.add_row(name, f"{self.recorded_rps * point.rate:.3g}", f"{point.rate / limit.rate - 1:+.0%}")
        out.print(rows)


def offered_rps(run: "RunDirectory") -> float:
    """Requests per second that the run sent."""
    from sojourn.metrics.request.goodput import measured, rate_window
    from sojourn.metrics.results.load import declared_window_s
    from sojourn.metrics.run.directory import kept_share

    meta = run.meta()
    rows = measured(run.requests(), meta)
    return rate_window(rows, declared_window_s(meta), kept_share(meta)).due_rps or 0.0


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
