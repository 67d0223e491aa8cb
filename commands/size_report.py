"""What a server was sized to, as a document and on a terminal."""

import math
import textwrap
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.table import Table

from sojourn.commands.cli import out, rounded, table
from sojourn.commands.curve_file import print_curves
from sojourn.metrics.compute.memory_plan import amount, counted

if TYPE_CHECKING:
    from sojourn.loadgen.search.curve import Curve
    from sojourn.metrics.compute.model_sizes import ModelSizes
    from sojourn.replay.sizing.answer import Question, Sized
    from sojourn.replay.sizing.limit import Trial
    from sojourn.replay.sizing.load import SizedLoad

LABEL = 13
WIDTH = 80


class SizeReport:
    """The answers of one question, of one or several deployments."""

    def __init__(
        self, sizes: "ModelSizes", load: "SizedLoad", question: "Question", answers: "Sequence[Sized]"
    ) -> None:
        self.sizes, self.load, self.question, self.answers = sizes, load, question, answers

    @cached_property
    def curves(self) -> "list[Curve]":
        from sojourn.loadgen.search.predicted import sized_curves

        return sized_curves(self.answers, self.question.objectives, self.question.share)

    def document(self) -> dict[str, Any]:
        from sojourn.loadgen.search.curve import curve_rows

        sizes, load = self.sizes, self.load
        return {
            "model": {
                "name": sizes.name, "parameters": sizes.parameters, "active_parameters": sizes.active_parameters,
                "layers": sizes.num_layers, "weights": sizes.stored.name,
            },
            "load": {
                "name": load.name, "mean_prompt_tokens": load.mean_prompt, "mean_output_tokens": load.mean_output,
                "rate_rps": None if math.isnan(load.rate_rps) else load.rate_rps, "slots": load.slots,
            },
            "objectives": list(self.question.objectives), "attainment": self.question.share,
            "answers": [self._answer(each) for each in self.answers], "curve": curve_rows(self.curves),
        }  # fmt: skip

    def _answer(self, answer: "Sized") -> dict[str, Any]:
        best = answer.best
        return {
            "deployment": answer.deployment, "refused": answer.refused or None,
            "memory": answer.plan, "kv_tokens": answer.kv_tokens,
            "largest": best, "low": answer.low, "high": answer.high,
            "own_rate": answer.own, "walls": answer.walls, "binding": answer.binding,
            "split": answer.split and {
                "prefill_rps": answer.split.prefill_rps, "decode_rps": answer.split.decode_rps,
                "transfer_ms": answer.split.transfer_ms,
                "decodes_per_prefill": answer.split.decodes_per_prefill,
            },
            "fleet": answer.fleet, "usd_per_hour": answer.usd_per_hour, "price_source": answer.price_source,
            "usd_per_million_output_tokens": answer.usd_per_million, "provenance": answer.provenance,
            "known_error": answer.error, "correction": answer.correction, "doubts": answer.doubts,
        }  # fmt: skip

    def print(self) -> None:
        sizes, load = self.sizes, self.load
        active = "" if sizes.experts is None else f", {counted(sizes.active_parameters)} of them for each token"
        _line("model", f"{sizes.name}: {counted(sizes.parameters)} parameters{active}, {sizes.num_layers} layers")
        rate = ""
        if load.slots is not None:
            rate = f"{load.slots} slots of a closed loop, "
        elif load.has_own_rate and not math.isnan(load.rate_rps):
            rate = f"{load.rate_rps:.3g} requests/s, "
        _line("load", f"{load.name}: {rate}prompts {load.mean_prompt:,.0f}, answers {load.mean_output:,.0f} tokens")
        _line("objective", f"{bounds(self.question.objectives)} for {self.question.share:.0%} of the requests")
        if len(self.answers) > 1:
            self._print_table()
        for answer in self.answers:
            if answer.refused:
                out.print(f"\n[bold]{_escaped(title(answer))}[/bold]")
                _paragraph(f"! {answer.refused}", "  ")
            elif len(self.answers) == 1:
                self._print_one(answer)
        if len(self.answers) > 1:
            if any(curve.points for curve in self.curves):
                print_curves(self.curves)
            self._print_doubts()

    def _print_table(self) -> None:
        has_fleet = any(answer.fleet is not None for answer in self.answers)
        has_bounds = any(answer.low is not None for answer in self.answers)
        heads = ["device", "slots" if self.load.slots is not None else "req/s", *(["80%"] if has_bounds else []),
                 "at once", "TTFT", "TPOT", "tok/s/GPU", "$/M", *(["fleet"] if has_fleet else []), "wall"]  # fmt: skip
        shown = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for head in heads:
            shown.add_column(head, justify="left" if head in ("device", "wall") else "right", no_wrap=True)
        for answer in self.answers:
            best, devices = answer.best, answer.deployment.num_devices
            name = f"{devices}×{answer.deployment.device}"
            if answer.refused or best is None:
                shown.add_row(name, *["–"] * (len(heads) - 2), "refused" if answer.refused else "none kept")
                continue
            fleet = answer.fleet.replicas if answer.fleet is not None else None
            shown.add_row(
                name, load_of(best), *([interval(answer)] if has_bounds else []), f"{best.in_flight:,.0f}",
                rounded(best.ttft_ms["p90"]), rounded(best.tpot_ms["p90"]),
                f"{best.output_tokens_per_s / devices:,.0f}",
                "–" if answer.usd_per_million is None else f"{answer.usd_per_million:.3g}",
                *(["–" if fleet is None else f"{fleet}"] if has_fleet else []), answer.binding or "unknown",
            )  # fmt: skip
        out.print()
        out.print(shown)
        _paragraph("TTFT and TPOT: p90 in ms at the largest load. $/M: per million output tokens within the objective."
                   + (" 80%: by the known error of the times." if has_bounds else ""), "")  # fmt: skip

    def _print_one(self, answer: "Sized") -> None:
        deployment = answer.deployment
        _line("deployment", title(answer))
        _line("times", answer.provenance)
        if answer.correction is None or answer.error is not None:
            _line("known error", known_error(answer))
        if answer.correction is not None:
            _line("calibrated", answer.correction.sentence)
        if answer.plan is not None:
            each = "" if deployment.num_devices == 1 else f", of each of {deployment.num_devices} devices"
            out.print(f"\n[bold]memory{each}[/bold]")
            for line in answer.plan.lines:
                _line(line.name, line.formula, f"{amount(line.value, line.unit):>11}  ")
        self._print_load(answer)
        self._print_walls(answer)
        self._print_money(answer)
        if any(curve.points for curve in self.curves):
            print_curves(self.curves)
        self._print_doubts()

    def _print_load(self, answer: "Sized") -> None:
        best = answer.best
        out.print("\n[bold]largest load within the objective[/bold]")
        if best is None:
            early = answer.limit is not None and answer.limit.ends_early
            _line("", "not known, the load has too few requests" if early else "none that was tried keeps it")
        else:
            what = "slots" if best.slots is not None else "requests/s"
            bounds_text = "" if answer.low is None and answer.high is None else f" (80%: {interval(answer)})"
            _line(
                "", f"{load_of(best)} {what}{bounds_text}; {best.in_flight:,.0f} at a time on average, at most "
                f"{best.most_running:,}",
            )  # fmt: skip
        what = "slots" if best is not None and best.slots is not None else "req/s"
        rows = table("ms", what, "kept", "TTFT p50", "p90", "p99", "TPOT p50", "p90", "p99", "tok/s", text=("ms",))
        trials = [("largest", best), ("above", answer.limit.missed if answer.limit else None), ("its own", answer.own)]
        for name, trial in trials:
            if trial is not None:
                rows.add_row(
                    name, load_of(trial), f"{trial.attainment:.0%}",
                    *(rounded(found[quantile]) for found in (trial.ttft_ms, trial.tpot_ms)
                      for quantile in ("p50", "p90", "p99")),
                    f"{trial.output_tokens_per_s:,.0f}",
                )  # fmt: skip
        out.print(rows)

    def _print_walls(self, answer: "Sized") -> None:
        if not answer.walls:
            return
        out.print("\n[bold]walls[/bold]")
        for wall in answer.walls:
            allows = "unknown" if wall.requests_per_s is None else f"{figure(wall.requests_per_s)} requests/s"
            if wall.concurrent is not None:
                allows += f", {wall.concurrent:,.0f} at a time"
            mark = "  ← nearest" if wall.name == answer.binding else ""
            _line(wall.name, allows + mark)
            _line("", wall.formula)

    def _print_money(self, answer: "Sized") -> None:
        best, fleet = answer.best, answer.fleet
        if best is None:
            return
        out.print()
        if answer.usd_per_hour is not None:
            million = answer.usd_per_million
            price = "" if million is None else f"; $ {million:.3g} per million output tokens within it"
            _line("price", f"$ {answer.usd_per_hour:,.2f} per hour{price} ({answer.price_source})")
        if answer.split is not None:
            split = answer.split
            took, ratio = rounded(split.transfer_ms), f"{split.decodes_per_prefill:,.2g}"
            moves = "" if math.isnan(split.transfer_ms) else f"; KV of a prompt moves in {took} ms"
            _line(
                "split", f"a prefill server serves {figure(split.prefill_rps)} requests/s, a decode server "
                f"{figure(split.decode_rps)}: {ratio} decode servers for one of prefill{moves}",
            )  # fmt: skip
        if fleet is not None:
            self._print_fleet(answer)

    def _print_fleet(self, answer: "Sized") -> None:
        fleet = answer.fleet
        assert fleet is not None
        if fleet.replicas is None:
            _line("fleet", f"no fleet that was tried serves {figure(fleet.rate_rps)} requests/s within the objective")
            return
        devices = _plural(fleet.replicas * answer.deployment.num_devices, "device")
        cost = "" if answer.usd_per_hour is None else f", $ {fleet.replicas * answer.usd_per_hour:,.2f} per hour"
        kept = "" if fleet.enough is None else f", which keep {fleet.enough.attainment:.0%}"
        fewer = "" if fleet.too_few is None else f"; {fleet.too_few.replicas} keep {fleet.too_few.attainment:.0%}"
        _line(
            "fleet", f"{_plural(fleet.replicas, 'replica')} ({devices}{cost}) for {figure(fleet.rate_rps)} requests/s"
            f"{kept}{fewer}",
        )  # fmt: skip

    def _print_doubts(self) -> None:
        told: dict[str, list[str]] = {}
        for answer in self.answers:
            for doubt in answer.doubts:
                told.setdefault(doubt, []).append(f"{answer.deployment.num_devices}×{answer.deployment.device}")
        for doubt, names in told.items():
            of = "" if len(names) == len(self.answers) else f"{', '.join(names)}: "
            _paragraph(f"! {of}{doubt}", "  ")


def title(answer: "Sized") -> str:
    deployment = answer.deployment
    experts = "" if deployment.expert_parallel == 1 else f", experts over {deployment.expert_parallel}"
    return (
        f"{deployment.num_devices} × {deployment.device}{experts}, {deployment.backend}, weights "
        f"{deployment.weight_format}, KV {deployment.kv_format}"
    )


def bounds(objectives: Sequence[Any]) -> str:
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
    found = []
    for each in objectives:
        parts = [f"{title} ≤ {each[name]:g} ms" for name, title in names.items() if each.get(name)]
        klass = "" if each.get("klass", "all") == "all" else f"{each['klass']}: "
        found.append(klass + ", ".join(parts))
    return "; ".join(found)


def load_of(trial: "Trial") -> str:
    return f"{trial.slots}" if trial.rate_rps is None else figure(trial.rate_rps)


def figure(value: float) -> str:
    """Three digits, and never an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.3g}"


def interval(answer: "Sized") -> str:
    """Of the largest rate, or of slots. A bound that keeps no load is 0; a high one that is not known is "?"."""
    if answer.low is None and answer.high is None:
        return "–"
    low = "0" if answer.low is None else figure(answer.low)
    return f"{low}–{'?' if answer.high is None else figure(answer.high)}"


def known_error(answer: "Sized") -> str:
    error = answer.error
    if error is None:
        return "not judged by public measurements"
    what = f" ({error.measurements} measurements)" if error.measurements else ""
    return f"TPOT median {error.median:.0%}, p90 {error.p90:.0%}, bias {error.bias:+.0%} for {error.cell}{what}"


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _line(label: str, text: str, value: str = "") -> None:
    _paragraph(f"{label:<{LABEL}} {value}{text}", " " * (LABEL + 1 + len(value)))


def _paragraph(text: str, indent: str) -> None:
    """Wrapped at the width of a terminal; what stands before the text stays free."""
    wrapped = textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    out.print(wrapped, markup=False, soft_wrap=True)


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")
