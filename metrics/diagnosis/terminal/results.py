"""What the client measured, on the terminal: each latency with its interval, and whether the run was steady."""

from rich.console import RenderableType
from rich.text import Text

from metrics.diagnosis.terminal.bars import ruled_table
from metrics.request.deadlines import FLUID_SHARE
from metrics.request.latencies import DEFINITIONS, Estimate
from metrics.results.load import CLOSED_ORIGIN
from metrics.results.prices import cost_line
from metrics.results.summary import Results
from metrics.statistics.intervals import Interval
from metrics.statistics.steadiness import Steadiness

SHOWN_QUANTILES = ("p50", "p90", "p99")
ORIGINS = {
    "intended send": "intended", "actual send": "sent", "the token before": "token",
    "the chunk before": "chunk",
}  # fmt: skip
VERDICT_STYLES = {"steady": "green", "no steady state": "bold yellow", "cannot tell": "dim"}


def render_results(results: Results) -> list[RenderableType]:
    """The table of latencies with 95 % intervals, then a line each for steadiness, deadlines and cost."""
    parts: list[RenderableType] = []
    if results.latencies:
        origins = ORIGINS | ({"intended send": "turn"} if results.closed else {})
        table = ruled_table(("latency, ms", "left"), ("from", "left"), ("n", "right"),
                            *((name, "right") for name in SHOWN_QUANTILES))  # fmt: skip
        for row in results.latencies:
            definition = DEFINITIONS[row.name]
            table.add_row(
                definition.title.removesuffix(" from send"), origins[definition.origin], f"{row.samples:,}",
                *(_estimate(row.quantiles[name]) for name in SHOWN_QUANTILES),
            )  # fmt: skip
        begin = (
            f"{CLOSED_ORIGIN} (closed loop), the actual send" if results.closed else "the intended send, the actual one"
        )
        note = f"from {begin}, the token or the chunk before; beside it the 95 % interval"
        parts += [Text(""), table, Text(note, style="dim")]
    parts.append(_steady(results.steady))
    for each in results.deadlines:
        parts.append(Text(
            f"Deadlines of {each.klass}: fluidity {each.fluidity:.1%}"
            f"{f' ({share_bounds(each.fluidity_interval)})' if each.fluidity_interval is not None else ''}, "
            f"{each.fluid} of {each.sent} met {FLUID_SHARE:.0%} of theirs; smooth goodput "
            f"{each.smooth_goodput_tokens_per_s:,.1f} of {each.output_tokens_per_s:,.1f} tokens/s"
        ))  # fmt: skip
    return [*parts, Text(f"Cost: {cost_line(results.cost)}")] if results.cost is not None else parts


def share_bounds(interval: Interval) -> str:
    """`81–92 %`."""
    low, high = (None if bound is None else 100 * min(1.0, max(0.0, bound)) for bound in (interval.low, interval.high))
    return f"{'?' if low is None else f'{low:.0f}'}–{'?' if high is None else f'{high:.0f}'} %"


def _steady(steady: Steadiness) -> Text:
    words = Text.assemble(("Steady state: ", ""), (steady.verdict, VERDICT_STYLES[steady.verdict]))
    return words.append(f" ({steady.reason})", style="dim")


def _estimate(estimate: Estimate) -> Text:
    if estimate.value is None:
        return Text("–", style="dim")
    text = Text(_ms(estimate.value))
    if estimate.interval is not None:
        low, high = estimate.interval.low, estimate.interval.high
        text.append(f" {'?' if low is None else _ms(low)}–{'?' if high is None else _ms(high)}", style="dim")
    return text


def _ms(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
