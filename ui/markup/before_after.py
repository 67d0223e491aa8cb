"""Two runs beside each other in a report: the verdict, the ledgers, goodput and latencies by class, what differs."""

from sojourn.metrics.compare.runs import compare_runs
from sojourn.metrics.compare.samples import samples_from
from sojourn.metrics.compare.settings import alike, load_differences, setting_differences
from sojourn.metrics.compare.sides import class_comparisons, ledger_difference
from sojourn.metrics.errors import SojournError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.ui.drawings import Drawing
from sojourn.ui.figures import compare as figures
from sojourn.ui.markup import fragments
from sojourn.ui.markup.document import caption, figure
from sojourn.ui.run_data import RunData
from sojourn.ui.tables.compare import MEANING, VERDICTS, class_rows, goodput_rows, ledger_rows, metric_rows
from sojourn.ui.text import prose

STATES = {"no worse": "healthy", "worse": "overloaded", "cannot tell": "inconclusive"}


def before_and_after(run: RunData, other: RunData) -> str:
    """A is the run of the report, B the other. Where no verdict can be had, a sentence says why."""
    a, b = (samples_from(RunDirectory(each.path), each.requests, each.meta.get("objectives")) for each in (run, other))
    parts = [_verdict(run, other), "<h3>What differs</h3>", _settings(run, other)]
    for prefix, title in (("ledger", "To the last byte"), ("ttft", "To the first token")):
        found = ledger_difference(a, b, prefix)
        if found is None:
            parts.append("<p>A ledger needs the server's records, and a run has none.</p>")
            break
        drawn = figures.aligned_ledgers(found, (run.name, other.name))
        parts.append(figure(Drawing(title, drawn, f"mean of `{prefix}_*_ns`; A above, B below")))
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
    except SojournError as error:
        return fragments.state("inconclusive", "no verdict", str(error))
    sentence = f"{MEANING[found.verdict]} Margin {100 * found.margin:.3g}%, confidence {found.confidence:.0%}."
    head = fragments.state(STATES[found.verdict], VERDICTS[found.verdict], sentence)
    return head + fragments.data_table(metric_rows(found.metrics, found.confidence))


def _settings(run: RunData, other: RunData) -> str:
    found = [*setting_differences(run.meta, other.meta).lines(), *load_differences(run.meta, other.meta).lines()]
    rows = found or [alike(run.meta, other.meta)]
    return fragments.wrap("".join(f'<p class="sj-small">{prose(each)}</p>' for each in rows))
