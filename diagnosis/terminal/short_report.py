"""A diagnosis on one screen: verdict, findings with fix and prediction, figures, where the time went, what to do next.

Parts stand in the order of a reader, and have a rank. What does not fit into the lines is left out by rank, and the
last line says how much and where it stands. A part is shown whole or not at all.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from sojourn.diagnosis.foreign_server import ACCOUNT_SEPARATOR
from sojourn.diagnosis.limits import WARMED
from sojourn.diagnosis.repeat import START
from sojourn.diagnosis.terminal.report import draw_met, headline_panel, percent_bounds, tell_ms
from sojourn.diagnosis.terminal.time_spent import lifecycles, ruled_table
from sojourn.diagnosis.verdict import (
    SERVED_PREFIX,
    Diagnosis,
    Finding,
    label_fix,
    tell_confidence,
    tell_missed,
    without_finding,
)
from sojourn.metrics.ledger import COLOURS, UNACCOUNTED
from sojourn.metrics.request.goodput import ClassGoodput
from sojourn.metrics.request.objectives import short

MOST_LINES = 34  # of a screen of 40: a verb has lines of its own before and after
SMALLEST_SHARE = 0.05  # of all time, that an account in the one line below the bar has
MOST_ACCOUNTS = 3
MOSTLY = 0.5  # of all time, in the named accounts together: with less they are not what it is mostly
ALWAYS = 0
LABEL_CELLS = 12
LAST_LINES = 3  # for the row that says where everything stands, and what was left out
FIGURES = ("ttft_ms", "ttfa_ms", "tpot_ms", "e2e_ms")


@dataclass(frozen=True, slots=True, eq=False)  # a part equals only itself
class Part:
    """Some lines, and how early they are left out: the highest rank first, `ALWAYS` never."""

    shown: RenderableType
    rank: int
    counted_as: str = ""  # what the last line calls it where it is left out; "" where nothing is missed
    of: "Part | None" = None  # without which it says nothing


class ShortReport:
    """Renders at most `most_lines` lines, whatever the width. `ends` are labels and texts below the report, such as
    the run directory; `rest` is the command that prints everything."""

    def __init__(
        self, diagnosis: Diagnosis, rest: str, ends: Sequence[tuple[str, str]] = (), most_lines: int = MOST_LINES
    ) -> None:
        self._parts = [*_parts(diagnosis), *_ends(ends)]
        self._rest, self._most = rest, most_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        lines = [len(console.render_lines(part.shown, options, pad=False)) for part in self._parts]
        left, shown = self._most - LAST_LINES, set()
        for place in sorted(range(len(lines)), key=lambda at: (self._parts[at].rank, at)):
            part = self._parts[place]
            is_alone = part.of is not None and self._parts.index(part.of) not in shown
            if part.rank == ALWAYS or (lines[place] <= left and not is_alone):
                shown.add(place)
                left -= lines[place]
        yield from (part.shown for place, part in enumerate(self._parts) if place in shown)
        without = [part.counted_as for place, part in enumerate(self._parts) if place not in shown]
        yield _row("everything", f"{self._rest}{_told(filter(None, without))}")


def _told(left_out: Iterable[str]) -> str:
    """What is left out, counted: "  (2 more warnings, 1 more cause)"."""
    counts: dict[str, int] = {}
    for name in left_out:
        counts[name] = counts.get(name, 0) + 1
    named = ", ".join(f"{count} more {name}{'s' if count > 1 else ''}" for name, count in counts.items())
    return f"  ({named})" if named else ""


def _row(label: str | Text, *texts: RenderableType) -> RenderableType:
    """A label, and texts one below the other; all labels of a report have one width."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, width=LABEL_CELLS)
    grid.add_column(overflow="fold")
    grid.add_row(label, Group(*texts))
    return grid


def _ends(ends: Sequence[tuple[str, str]]) -> list[Part]:
    return [Part(_row(label, Text(text)), 6 if label == "workload" else 1) for label, text in ends]


def _parts(diagnosis: Diagnosis) -> list[Part]:
    causes = [each for each in diagnosis.findings if each.role == "cause"]
    others = [each for each in diagnosis.findings if each.role == "alternative"]
    parts = [Part(headline_panel(diagnosis), ALWAYS)]
    for place, found in enumerate(causes, start=1):
        parts += _cause(place, found)
    named = {each.key for each in causes}
    parts += [Part(_alternative(each, named), 7, "possible cause") for each in others]
    if sentence := without_finding(diagnosis):
        parts.append(Part(Text(sentence), 1))
    titles = " · ".join(each.title for each in diagnosis.findings)
    parts += [Part(Text.assemble(("● ", "bold yellow"), f"{check.title}: {check.reason}"), 7, "symptom")
              for check in diagnosis.checks if check.status == "present" and check.title not in titles]  # fmt: skip
    parts += _figures(diagnosis)
    if diagnosis.ledger_share:
        parts.append(Part(_time(diagnosis), 2))
    parts += [Part(Text(line), 4, "device") for line in diagnosis.devices]
    parts += [Part(_warning(text), 2, "warning") for text in diagnosis.left_out]
    return parts + [Part(_warning(text), 1 if text.startswith(WARMED) else 5, "warning") for text in diagnosis.warnings]


def _cause(place: int, found: Finding) -> list[Part]:
    """A cause in three parts: what it is and how to mend it, how to prove it, and its strongest evidence."""
    colour = COLOURS.get(found.lifecycles[0] if found.lifecycles else "client", COLOURS["client"])
    costs = ", ".join(filter(None, (tell_missed(found), found.objective.removeprefix(SERVED_PREFIX).strip())))
    about = [
        Text(found.cause, style="bold"),
        Text("; ".join(filter(None, (costs, tell_confidence(found)))), style="dim"),
    ]
    about += [_warning(found.unsafe)] if found.unsafe else []
    kind = "estimate" if found.gain_is_estimate else "replayed"
    mends = Text.assemble((found.fix.change, "bold"), f": {found.fix.gain} ({kind})")
    proof = _proof(found)
    first = place == 1
    head = Part(_row(Text(f"{place}", style=f"bold {colour}"), *about), 1 if first else 3, "" if first else "cause")
    parts = [
        head,
        Part(_row(f"  {label_fix(found.fix)}", mends), 1 if first else 3, of=head),
        Part(_row("  prove it", Text(proof)), 2 if first else 5, of=head),
    ]
    strongest = max((each for each in found.evidence if each.supports), key=lambda each: each.weight, default=None)
    if strongest is not None:
        parts.insert(1, Part(_row("  evidence", Text(strongest.statement)), 4 if first else 8, of=head))
    return parts


def _proof(found: Finding) -> str:
    """The command, and before it what to change where the command alone would repeat the same run."""
    command, measurement = found.probe.command, found.probe.measurement
    if not command:
        return measurement
    if needs_first := measurement.partition(f": {START}")[2]:
        return f"{START}{needs_first}\n$ {command}"
    words = shlex.split(command)
    changed = [value for option, value in pairwise(words) if option == "--set" and value in measurement]
    return f"$ {command}" if changed else f"{measurement}:\n$ {command}"


def _alternative(found: Finding, named: set[str]) -> RenderableType:
    told = f" ({label_fix(found.fix)}: {found.fix.change}; confidence {found.confidence:.0%})"
    return _row("follows" if named & {*found.follows} else "or else", Text.assemble(found.cause, (told, "dim")))


def _warning(text: str) -> Text:
    return Text.assemble(("! ", "bold yellow"), text)


def _figures(diagnosis: Diagnosis) -> list[Part]:
    """Goodput, and the three latencies beside their objectives; then the classes, where there are several."""
    if not diagnosis.goodput:
        return []
    overall, *classes = diagnosis.goodput
    parts = [Part(Text(""), 7), Part(_goodput(overall), 1)]
    if missed := _missed(overall):
        parts.append(Part(_row("missed", Text(missed)), 1))
    latency = ruled_table(("ms", "left"), ("p50", "right"), ("p90", "right"), ("p99", "right"), ("SLO", "right"),
                          ("met", "right"))  # fmt: skip
    for name in FIGURES:
        quantiles = overall.quantiles_ms.get(name)
        if quantiles is None or quantiles["max"] is None:
            continue
        bound = overall.objectives.get(name)
        latency.add_row(short(name).upper(), *(tell_ms(quantiles[label]) for label in ("p50", "p90", "p99")),
                        "–" if bound is None else f"≤ {bound:,.0f}", draw_met(overall, name))  # fmt: skip
    if latency.row_count:
        parts.append(Part(_row("latency", latency), 2))
    if len(classes) > 1:
        each = ", ".join(f"{row.klass} {row.attainment:.0%} of {row.sent}" for row in classes if row.sent)
        parts.append(Part(_row("by class", f"meet their SLO: {each}"), 3, "figure"))
    return parts


def _goodput(row: ClassGoodput) -> RenderableType:
    if not row.sent:
        return _row("goodput", "no request was sent")
    bounds = f" ({percent_bounds(row.attainment_interval)})" if row.attainment_interval is not None else ""
    tokens = "" if row.goodput_tokens_per_s is None else f", {row.goodput_tokens_per_s:,.0f} tokens/s"
    offered = row.window.due_rps if row.window is not None else None
    of = "" if offered is None else f" of {offered:.3g} offered"
    return _row("goodput", f"{row.goodput_rps:.3g} requests/s{of}{tokens}; {row.good:,} of {row.sent:,} requests "
                f"meet their SLO, {row.attainment:.0%}{bounds}")  # fmt: skip


def _missed(row: ClassGoodput) -> str:
    """Each objective that requests miss, and failures, with count and share."""

    def share(count: int) -> str:
        return f"{count:,} ({count / row.sent:.0%})"

    told, several = [], sum(map(bool, row.missed_by_objective.values())) > 1
    for name, count in row.missed_by_objective.items():
        if count:
            bound = f" ≤ {row.objectives[name]:g} ms" if name in row.objectives else ""
            alone = row.missed_alone.get(name, 0)
            only = f", {alone:,} of them only this" if alone and several else ""
            told.append(f"{short(name).upper()}{bound}: {share(count)}{only}")
    failed = row.sent - row.completed
    return " · ".join([*told, *([f"not served: {share(failed)}"] if failed else [])])


def _time(diagnosis: Diagnosis) -> RenderableType:
    """One bar of all time by lifecycle, and the largest accounts in it."""
    known = {name: share for name, share in diagnosis.ledger_share.items() if name != UNACCOUNTED}
    largest = sorted(known, key=lambda name: -known[name])[:MOST_ACCOUNTS]
    told = [f"{name} {known[name]:.0%}" for name in largest
            if known[name] >= SMALLEST_SHARE and ACCOUNT_SEPARATOR not in name]  # fmt: skip
    named = sum(known[name] for name in largest if known[name] >= SMALLEST_SHARE and ACCOUNT_SEPARATOR not in name)
    words = "mostly" if named > MOSTLY else "of it"
    return _row("time", lifecycles(diagnosis), *([Text(f"{words} {', '.join(told)}", style="dim")] if told else []))
