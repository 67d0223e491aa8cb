"""A lens on the terminal: a page to leave open, and a report."""

from collections.abc import Sequence
from itertools import pairwise

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from sojourn.diagnosis.terminal.time_spent import bar, ruled_table, section
from sojourn.live.kv_lens.document import TIMES, CurvePoint, KvLens, Second
from sojourn.live.watch.terminal import sparkline

HIT_COLOUR, MISS_COLOUR = "green", "red"
BAR_CELLS = 20
SHOWN_TAKERS, SHOWN_POOLS = 6, 8
SHOWN_SIZES = (0.5, 1.0, 2.0, 4.0, 8.0, None)
DASH = "–"
LONGEST_NAME = 26
SOURCES = {
    "records": "the records of its requests",
    "events": "its KV events",
    "events and metrics": "its KV events and /metrics",
}


def report(lens: KvLens) -> RenderableType:
    """What a recorded run, or `--once`, prints."""
    return Group(*_parts(lens, 80))


def page(lens: KvLens, seconds: Sequence[Second], size: ConsoleDimensions) -> RenderableType:
    """The page of this second; what does not fit below is cut by the terminal."""
    head, *rest = _parts(lens, size.width)
    return Group(head, _rates(seconds), *rest, Text("Ctrl-C ends it", style="dim"))


def line(lens: KvLens, seconds: Sequence[Second]) -> str:
    """For a log: what is held now, and what happened in the last seconds."""
    last = seconds[-1] if seconds else Second(0, 0, 0, 0, 0)
    return f"{lens.seconds:.0f} s: {last.held:,} blocks held, {last.stored:,} stored. {lens.headline}"


def _parts(lens: KvLens, width: int) -> list[RenderableType]:
    pool = "" if lens.pool_blocks is None else f" · {_pool(lens)}"
    about = f"{lens.name} · {lens.seconds:,.0f} s of {SOURCES[lens.source]}{pool}"
    parts: list[RenderableType] = [
        Panel(Group(Text(lens.headline), Text(about, style="dim")), title=" KV cache ", title_align="left",
              border_style=HIT_COLOUR, padding=(0, 1), width=min(width, 100))
    ]  # fmt: skip
    if lens.curve:
        parts += [section("What another size would hit"), _curve(lens)]
        parts += [Text(_enough(lens), style="dim")] if lens.enough and lens.pool_blocks else []
    if lens.worth is not None:
        parts += [section("What twice the memory is worth"), Text(lens.worth.sentence)]
        doubts = dict.fromkeys([*lens.worth.before.doubts, *lens.worth.after.doubts])
        parts += [Text.assemble(("! ", "bold yellow"), doubt) for doubt in doubts]
    if lens.outcomes:
        parts += [section("What became of the prompt tokens"), _outcomes(lens)]
    if lens.times:
        parts += [section("Lives of blocks"), _times(lens)]
        if lens.reuse is not None:
            parts.append(Text(_reuse(lens), style="dim"))
    if lens.takers:
        parts += [section("Who needed the room of evicted blocks"), _takers(lens)]
    if lens.pools:
        parts += [section("What is held"), _pools(lens)]
    if lens.unknown:
        parts += [section("What this cannot tell"), *(Text(f"? {each}", style="dim") for each in lens.unknown)]
    return [*parts, *(Text.assemble(("! ", "bold yellow"), each) for each in lens.warnings)]


def _pool(lens: KvLens) -> str:
    size = f"pool of {lens.pool_blocks:,} blocks of {lens.block_size} tokens"
    return f"{size}, the most that were held at once" if lens.pool_is_peak else size


def _curve(lens: KvLens) -> Table:
    rows = ruled_table(("memory", "left"), ("blocks", "right"), ("hit rate", "right"), ("", "left"),
                       ("95%", "right"), ("tokens saved", "right"))  # fmt: skip
    for point in lens.curve:
        if point.ratio not in SHOWN_SIZES:
            continue
        name = "no eviction" if point.ratio is None else f"{point.ratio:g}x"
        style = "bold" if point.ratio == 1 else ""
        rows.add_row(
            Text(name, style=style), DASH if point.blocks is None else f"{point.blocks:,}", _percent(point.hit_rate),
            bar(point.hit_rate, HIT_COLOUR, BAR_CELLS) if point.hit_rate is not None else Text(DASH), _bounds(point),
            DASH if point.saved_tokens is None else f"{point.saved_tokens:+,}" if point.saved_tokens else "0",
        )  # fmt: skip
    return rows


def _bounds(point: CurvePoint) -> str:
    return DASH if point.low is None or point.high is None else f"{point.low:.0%} to {point.high:.0%}"


def _enough(lens: KvLens) -> str:
    parts = [f"{each.share:.0%} with {each.blocks:,} blocks ({each.ratio:.2g}x)" for each in lens.enough if each.ratio]
    return f"Of the hits of a cache without eviction: {', '.join(parts)}."


def _outcomes(lens: KvLens) -> Table:
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left"):
        grid.add_column(justify=justify, no_wrap=True)
    for name, share in lens.outcomes.items():
        if share >= 0.0005:
            colour = HIT_COLOUR if name.startswith("hit") else MISS_COLOUR
            grid.add_row(name.replace("_", " "), _percent(share), bar(share, colour, BAR_CELLS))
    return grid


def _times(lens: KvLens) -> Table:
    rows = ruled_table(("", "left"), ("p10", "right"), ("p50", "right"), ("p90", "right"), ("blocks", "right"))
    for name in TIMES:
        if (times := lens.times.get(name)) is not None:
            values = (_seconds(value) for value in (times.p10_s, times.p50_s, times.p90_s))
            rows.add_row(name.replace("_", " "), *values, f"{times.blocks:,}")
    return rows


def _reuse(lens: KvLens) -> str:
    found = lens.reuse
    assert found is not None, "the caller looks"
    return (
        f"{found.read_again_share:.0%} of {found.blocks:,} different blocks were read again; the tenth that was read "
        f"most had {found.hottest_tenth_share:.0%} of the reads."
    )


def _takers(lens: KvLens) -> Table:
    rows = ruled_table(("who", "left"), ("evicted", "right"), ("needed again", "right"), ("by", "left"))
    for each in lens.takers[:SHOWN_TAKERS]:
        blocks = DASH if each.evicted_blocks is None else f"{each.evicted_blocks:,} blocks"
        name = f"class {each.name}" if each.kind == "class" else each.name
        victims = each.victims[0] if each.victims else DASH
        more = f" and {len(each.victims) - 1} more" if len(each.victims) > 1 else ""
        rows.add_row(_short(name), blocks, f"{each.missed_tokens:,} tokens", f"{_short(victims)}{more}")
    return rows


def _pools(lens: KvLens) -> Table:
    rows = ruled_table(("server", "left"), ("medium", "left"), ("held", "right"), ("most", "right"),
                       ("stored", "right"), ("again", "right"), ("evicted", "right"))  # fmt: skip
    for each in lens.pools[:SHOWN_POOLS]:
        counts = (each.held, each.peak, each.stored, each.stored_again, each.removed)
        rows.add_row(each.server or DASH, each.medium, *(f"{count:,}" for count in counts))
    return rows


def _rates(seconds: Sequence[Second]) -> Table:
    """What happened in each second, newest last."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_row("held", f"{seconds[-1].held:,} blocks" if seconds else DASH, _spark([each.held for each in seconds]))
    for label, field in (("stored", "stored"), ("stored again", "stored_again"), ("evicted", "removed")):
        rates = [
            (getattr(after, field) - getattr(before, field)) * 1e9 / max(after.ns - before.ns, 1)
            for before, after in pairwise(seconds)
        ]
        recent = rates[-10:]
        shown = f"{sum(recent) / len(recent):,.1f} blocks/s" if recent else DASH
        grid.add_row(label, shown, _spark(rates))
    return grid


def _spark(values: Sequence[float]) -> Text:
    return Text(sparkline(values), style="blue")


def _percent(share: float | None) -> str:
    return DASH if share is None else f"{share:.1%}"


def _seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 0.1 else f"{value * 1e3:.3g} ms"


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"
