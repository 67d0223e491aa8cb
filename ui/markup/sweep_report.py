"""What a sweep shows, in the app and as one self-contained HTML file."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sojourn.loadgen.search.bisection import SESSIONS
from sojourn.loadgen.search.curve import Curve, differences, read_curves
from sojourn.loadgen.search.frontier import REQUIRED_SHARE
from sojourn.loadgen.search.points import (
    Frontier,
    Rate,
    Search,
    by_rate,
    frontier,
    largest_rate,
    objectives_ms,
    rate_sentence,
    read_search,
    search_file,
    unit_of,
)
from sojourn.metrics.request.objectives import CLIENT_OBJECTIVES, OBJECTIVE_NAMES
from sojourn.metrics.whole_file import write_whole
from sojourn.ui.drawings import Drawing
from sojourn.ui.figures import sweep as figures
from sojourn.ui.markup import fragments, tradeoff
from sojourn.ui.markup.document import document, figure
from sojourn.ui.text import number, percent, safe


@dataclass(frozen=True, slots=True)
class SweepData:
    name: str
    search: Search
    objectives_ms: dict[str, float]
    rates: list[Rate]
    best: list[Frontier]


def load_sweep(folder: Path) -> SweepData:
    """Raises RunDataError where there is none."""
    search = read_search(search_file(folder))
    rates, bounds_ms = by_rate(search.points), objectives_ms(search.plan)
    return SweepData(folder.resolve().name, search, bounds_ms, rates, frontier(rates, bounds_ms))


def summary(data: SweepData) -> str:
    """The scenario, how much of it is measured, and the largest rate that keeps the objectives."""
    plan = data.search.plan
    of = f" of {len(plan['rates_rps']) * plan['repeats']}" if data.search.kind == "sweep" else ""
    most = rate_sentence(largest_rate(data.rates), unit_of(data.rates))
    bounds = ", ".join(f"{OBJECTIVE_NAMES[name]} ≤ {number(ms, 'ms')}" for name, ms in data.objectives_ms.items())
    found = "most sessions" if unit_of(data.rates) == SESSIONS else "largest rate"
    where = plan["target"]["base_url"] or "our engine, started for each run"
    parts = [
        f"{data.search.kind} {data.name}", f"scenario {plan['scenario']['name']}", where,
        f"{len(data.search.points)}{of} runs",
        bounds or "objectives per class",
    ]  # fmt: skip
    return fragments.wrap(
        f'<div class="sj-about">{" · ".join(map(safe, parts))}</div>'
        f'<div class="sj-headline" style="--state:var(--sj-accent)"><div class="sj-state">{found}</div>'
        f'<div class="sj-sentence">{safe(most[0].upper() + most[1:])}.</div></div>'
    )


def drawings(data: SweepData) -> Iterator[Drawing]:
    yield Drawing(
        "Goodput against the rate", figures.goodput_against_rate(data.rates),
        "`sweep.json` points: requests that met every objective, per second; failed ones are not good.",
    )  # fmt: skip
    yield Drawing(
        "Attainment against the rate", figures.attainment_against_rate(data.rates, REQUIRED_SHARE),
        "`sweep.json` points: Wilson’s 95% interval, for the effective number of independent requests.",
    )  # fmt: skip
    yield Drawing(
        "Frontier: goodput against the objectives", figures.frontier_against_objectives(data.best),
        "The best of the measured rates, judged again under stricter and looser objectives. Open: the largest rate "
        "with a valid run, so a larger one might give more.",
    )  # fmt: skip
    for latency, name in OBJECTIVE_NAMES.items():
        if latency in CLIENT_OBJECTIVES and latency not in data.objectives_ms:
            continue  # that of all but reasoning models is another one's
        yield Drawing(
            name.capitalize(), figures.latency_against_rate(data.rates, latency, data.objectives_ms.get(latency)),
            "From the intended send; failed requests count as slower than all others.",
        )  # fmt: skip


def rate_table(data: SweepData) -> str:
    head = [
        unit_of(data.rates),
        "runs",
        "invalid",
        "counted",
        "kept",
        "95% interval",
        "good req/s",
        "good tok/s",
        "tok/s",
    ]
    rows = []
    for rate in data.rates:
        known = rate.attainment is not None
        interval = f"{percent(rate.attainment_low)} – {percent(rate.attainment_high)}" if known else "–"
        cells = [f"{rate.rate_rps:g}", str(rate.points), str(rate.invalid), f"{rate.sent:,}"]
        cells += [percent(rate.attainment) if known else "–", interval]
        cells += [number(value) for value in (rate.goodput_rps, rate.goodput_tokens_per_s, rate.tokens_per_s)]
        rows.append(cells)
    return fragments.table(head, rows, right=tuple(range(len(head))))


def remarks(data: SweepData) -> str:
    """What the figures leave out."""
    growing = [rate.rate_rps for rate in data.rates if rate.growing]
    notes = [
        f"{rps:g} {unit_of(data.rates)}: latencies grew to the end; a longer run would be worse." for rps in growing
    ]
    notes += [note for point in data.search.points for note in point.notes]
    return fragments.wrap("".join(f'<div class="sj-warning">{safe(note)}</div>' for note in notes))


def write_sweep_report(folders: Sequence[Path], output: Path | None = None, found: Sequence[Curve] = ()) -> Path:
    """Writes the page of the first sweep, by default `sweep.html` into it, with these curves; by default those of the
    sweeps alone. Raises RunDataError."""
    sweeps = [load_sweep(folder) for folder in folders]
    return write_whole(output or folders[0] / "sweep.html", render(sweeps, found or read_curves(folders)))


def render(sweeps: Sequence[SweepData], found: Sequence[Curve]) -> str:
    """The curves of all sweeps, then the figures of the first."""
    data = sweeps[0]
    name = data.name
    if len(data.rates) > 1:
        first, last = data.rates[0].rate_rps, data.rates[-1].rate_rps
        name = f"{len(data.rates)} rates from {first:g} to {last:g} {unit_of(data.rates)}"
    both = "".join(
        figure(tradeoff.drawing(found, per_user=per_user), "h2")
        for per_user in (False, True)
        if not per_user or any(curve.devices for curve in found)
    )
    others = "".join(figure(drawing, "h2") for drawing in drawings(data))
    beside = tradeoff.table(found) + tradeoff.sentences(found, differences([each.search for each in sweeps]))
    return document(
        f"Sweep of {data.search.plan['scenario']['name']}: {name}",
        f"{summary(data)}{both}{beside}{remarks(data)}{others}<h2>Rates</h2>{rate_table(data)}",
    )
