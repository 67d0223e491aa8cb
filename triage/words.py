"""What is shown of each piece of evidence, and the figures that a headline carries."""

from collections.abc import Sequence

from sojourn.interop.held.held import BenchmarkFigures, Held
from sojourn.interop.held.logs.pages import TOOL as PAGE
from sojourn.triage.document import Seen
from sojourn.triage.summary_rules import ms

MOMENTS = {"vLLM log": "lines with load", "SGLang log": "batch lines"}  # of a log's means
FIGURES = (
    ("requests_per_s", "rate", "requests/s"), ("output_tokens_per_s", "rate", "tokens/s"), ("ttft_ms", "mean", "TTFT"),
    ("ttft_ms", "median", "TTFT p50"), ("tpot_ms", "mean", "TPOT"), ("e2e_ms", "mean", "E2E"),
    ("response_ms", "mean", "response"),
)  # fmt: skip


def seen_of(held: Held) -> Seen:
    figures = held.figures
    shown: list[str] = []
    if figures is not None:
        shown = list(filter(None, [figures_in_words(figures)]))
    elif held.requests is not None:
        shown = [f"{len(held.requests.rows):,} requests"]
    if held.series:
        shown.append(f"{len({row['ns'] for row in held.series}):,} moments")
    if held.sensors:
        shown.append(f"{len(held.sensors):,} readings")
    if held.events:
        shown.append(f"{len(held.events):,} events")
    settings = [f"{name} {value}" for name, value in held.settings.items()]
    version = [f"{held.server} {held.version}"] if held.server and held.version else []
    label = figures.label if figures is not None else ""
    if held.kind == PAGE and figures is not None and not label:
        label = "means since its start"
    return Seen(name=held.name, kind=held.kind, label=label,
                shows=", ".join([*shown, *version, *settings]))  # fmt: skip


def figures_in_words(figures: BenchmarkFigures) -> str:
    stated = ((figures.value(name, statistic), name, word) for name, statistic, word in FIGURES)
    shown = [f"{word} {ms(value)}" if name.endswith("_ms") else f"{value:,.4g} {word}"
             for value, name, word in stated if value is not None]  # fmt: skip
    shown += filter(None, (_gauge(figures, name) for name in ("running", "waiting")))
    others = [f"{each.name} {each.value:,.4g}{f' ({each.statistic})' * (each.statistic != 'total')}"
              for each in figures.figures[:3]]  # fmt: skip
    return ", ".join(shown or others)


def _gauge(figures: BenchmarkFigures, name: str) -> str:
    """Its mean, over which moments, and its last value."""
    mean, last, tool = figures.value(name), figures.value(name, "last"), figures.tool
    over = f" over {MOMENTS[tool]}" if tool in MOMENTS else ""
    told = [f"{mean:,.4g} on average{over}"] if mean is not None else []
    told += [f"{last:,.4g} {'at the end' if 'log' in tool else 'at its moment'}"] if last is not None else []
    return f"{name} {' and '.join(told)}" if told else ""


def with_figures(headline: str, held: Sequence[Held]) -> str:
    """With what no reader should have to look for: tokens/s and KV use of the one log, requests that failed."""
    logs = [each.figures for each in held if each.figures is not None and each.figures.tool in MOMENTS]
    said = [] if len(logs) != 1 else _load_of(logs[0])
    for each in held:
        lost = each.figures.value("failed", "total") if each.figures is not None else None
        if lost and len(held) == 1 and "failed" not in headline:
            made = each.figures.value("requests", "total") or lost + (each.figures.value("succeeded", "total") or 0.0)
            said.append(f"{lost:,.0f} of {made:,.0f} requests failed")
    return f"{headline} ({', '.join(said)})" if said else headline


def _load_of(figures: BenchmarkFigures) -> list[str]:
    tokens, running = figures.value("output_tokens_per_s"), figures.value("running")
    kv = figures.value("kv_use", "max")
    said = [f"{tokens:,.4g} tokens/s on average"] if tokens is not None and tokens > 0 else []
    if said and running is not None and running > 1:
        said = [f"{said[0]}, {tokens / running:,.3g} per request"]
    return [*said, f"KV use {kv:.0%} at most"] if kv is not None and said else said
