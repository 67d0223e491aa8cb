"""What a ladder shows, as one self-contained HTML file."""

from collections.abc import Iterator
from pathlib import Path

from sojourn.metrics.compare.ladder import Ladder, Step, read_ladder, sentence, steps
from sojourn.metrics.whole_file import write_whole
from sojourn.ui.drawings import Drawing
from sojourn.ui.figures.ladder import accounts_by_rung, throughput_by_rung
from sojourn.ui.markup import fragments
from sojourn.ui.markup.document import document, figure
from sojourn.ui.text import number, percent, safe


def write_ladder_report(folder: Path) -> Path:
    """Writes `ladder.html` into a ladder. Raises RunDataError."""
    return write_whole(folder / "ladder.html", render(read_ladder(folder)))


def render(ladder: Ladder) -> str:
    found = steps(ladder)
    body = summary(ladder, found) + "".join(figure(drawing, "h2") for drawing in drawings(found))
    reasons = "".join(
        f"<h3>{safe(step.rung.name)}</h3><p>{safe(sentence(step))}</p>" for step in found if step.multiplier is not None
    )
    title = f"The ladder of techniques, scenario {ladder.plan['scenario']['name']}"
    return document(title, f"{body}<h2>What each rung gave</h2>{rung_table(found)}<h2>Why</h2>{reasons}")


def summary(ladder: Ladder, found: list[Step]) -> str:
    engine = ladder.plan["scenario"]["engine"] | ladder.plan["overrides"]
    parts = [f"model {engine.get('model')}", ladder.device, f"{ladder.hardware['cores']} cores", ladder.date[:10],
             f"{len(ladder.runs)} runs", ladder.command]  # fmt: skip
    said = "No rung has a valid run."
    if len(found) > 1 and found[0].tokens_per_s and found[-1].tokens_per_s:
        best = max((step for step in found if step.multiplier is not None), key=lambda step: step.multiplier)
        said = (
            f"{found[-1].rung.name.capitalize()} and all below it give "
            f"{found[-1].tokens_per_s / found[0].tokens_per_s:.1f} times the tokens per second of "
            f"{found[0].rung.name}; the largest rung is {best.rung.name}, × {best.multiplier:.2f}."
        )
    return fragments.wrap(
        f'<div class="sj-about">{" · ".join(map(safe, parts))}</div>'
        f'<div class="sj-headline" style="--state:var(--sj-accent)"><div class="sj-state">ladder</div>'
        f'<div class="sj-sentence">{safe(said)}</div></div>'
    )


def drawings(found: list[Step]) -> Iterator[Drawing]:
    yield Drawing(
        "Throughput by rung", throughput_by_rung(found),
        "Median of the repeats; ×: against the rung below in the same repeat.",
    )  # fmt: skip
    yield Drawing(
        "Where the time of a token went", accounts_by_rung(found),
        "From the intended send to the last byte, by output token, mean of the served requests. In a closed loop the "
        "length of a bar is the open requests divided by the tokens per second.",
    )  # fmt: skip


def rung_table(found: list[Step]) -> str:
    head = ["rung", "setting", "tokens/s", "× below", "spread", "article", "good req/s", "kept", "TTFT p50", "TPOT p50"]
    rows = []
    for step in found:
        setting = ", ".join(f"{name}={value}" for name, value in step.rung.on.items())
        ratio = "–" if step.multiplier is None else f"{step.multiplier:.2f}"
        spread = "–" if step.lowest is None else f"{step.lowest:.2f} – {step.highest:.2f}"
        rows.append([
            step.rung.name, setting, number(step.tokens_per_s), ratio, spread, number(step.rung.published),
            number(step.goodput_rps), percent(step.attainment), number(step.ttft_p50_ms, "ms"),
            number(step.tpot_p50_ms, "ms"),
        ])  # fmt: skip
    return fragments.table(head, rows, right=tuple(range(2, len(head))))
