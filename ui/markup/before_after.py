"""Two runs beside each other in a report: the verdict, the ledgers, goodput and latencies by class, what differs."""

import shlex

from sojourn.metrics.compare.runs import NotComparable, compare_runs
from sojourn.metrics.compare.samples import samples_from
from sojourn.metrics.compare.settings import NOT_KNOWN, alike, load_differences, setting_differences
from sojourn.metrics.compare.sides import class_comparisons, ledger_difference
from sojourn.metrics.errors import SojournError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.listing import before_and_after
from sojourn.ui.drawings import Drawing
from sojourn.ui.figures import compare as figures
from sojourn.ui.markup import fragments
from sojourn.ui.markup.document import caption, figure
from sojourn.ui.run_data import RunData
from sojourn.ui.tables.compare import MEANING, class_rows, fold, goodput_rows, ledger_rows, metric_rows
from sojourn.ui.text import prose, safe

COLUMNS = ["setting", "A, before", "B, after"]
STATES = {"no worse": "healthy", "worse": "overloaded", "cannot tell": "inconclusive"}


def in_order(run: RunData, other: RunData) -> tuple[RunData, RunData]:
    """A and B: the run that was recorded first, and the other."""
    return (run, other) if before_and_after(run.path, other.path)[0] == run.path else (other, run)


def side_by_side(run: RunData, other: RunData) -> str:
    """Of A and B. Where no verdict can be had, a sentence says why."""
    a, b = (samples_from(RunDirectory(each.path), each.requests, each.meta.get("objectives")) for each in (run, other))
    parts = [f"<p>A: {safe(run.name)}. B: {safe(other.name)}.</p>", _verdict(run, other)]
    parts += ["<h3>What differs</h3>", settings_table(run, other)]
    for prefix, title in (("ledger", "To the last byte"), ("ttft", "To the first token")):
        found = ledger_difference(a, b, prefix)
        if found is None:
            parts.append("<p>A ledger needs the server's records, and a run has none.</p>")
            break
        drawn = figures.aligned_ledgers(found, (run.name, other.name))
        parts.append(figure(Drawing(title, drawn, f"mean of `{prefix}_*_ns`; A above, B below")))
        if prefix == "ledger":
            note = "width: the longer of A and B; red: B is longer; blue: it is shorter; pale: alike, or not certain"
            parts.append(
                figure(Drawing("What differs, account by account", figures.icicle_of_differences(found), note))
            )
        parts.append(fragments.data_table(ledger_rows(found)))
    parts.append("<h3>Goodput and latencies by class</h3>")
    if run.diagnosis is not None and other.diagnosis is not None:
        parts.append(fragments.data_table(goodput_rows(run.diagnosis.goodput, other.diagnosis.goodput)))
    parts.append(fragments.data_table(class_rows(class_comparisons(a, b))))
    parts.append(caption("Ranges are 95% intervals."))
    return "".join(parts)


def _verdict(run: RunData, other: RunData) -> str:
    try:
        found = compare_runs([RunDirectory(run.path)], [RunDirectory(other.path)])
    except NotComparable as error:
        command = "`sojourn compare {} {} --force`".format(*(shlex.quote(str(each.path)) for each in (run, other)))
        return fragments.state("inconclusive", "no verdict", f"{error}: {command}")
    except SojournError as error:
        return fragments.state("inconclusive", "no verdict", str(error))
    sentence = f"{MEANING[found.verdict]} Margin {100 * found.margin:.3g}%, confidence {found.confidence:.0%}."
    head = fragments.state(STATES[found.verdict], found.verdict, sentence)
    notes = "".join(caption(note) for note in fold(found))
    return head + fragments.data_table(metric_rows(found.metrics, found.confidence)) + notes


def settings_table(a: RunData, b: RunData) -> str:
    """The settings that differ, each with its value before and after; folded those that one run alone names."""
    load, own = (find(a.meta, b.meta).rows() for find in (load_differences, setting_differences))
    if not load and not own:
        return fragments.wrap(f"<p>{prose(alike(a.meta, b.meta))}</p>")
    parts = []
    for title, found in (("Settings and versions", own), ("Load, model and machine", load)):
        both = [row for row in found if NOT_KNOWN not in row]
        one = [row for row in found if NOT_KNOWN in row]
        parts += [fragments.wrap(f"<h4>{title}</h4>")] if found else []
        parts += [fragments.table(COLUMNS, both)] if both else []
        parts += (
            [fragments.folded(f"{len(one)} that one run alone names", fragments.table(COLUMNS, one))] if one else []
        )
    return "".join(parts)
