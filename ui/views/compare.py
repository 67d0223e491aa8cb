"""Compare: two runs side by side, what differs, and whether the second is worse."""

from pathlib import Path

import streamlit as st

from sojourn.metrics.compare.runs import compare_runs
from sojourn.metrics.compare.samples import RunSamples, samples_from
from sojourn.metrics.compare.settings import states_settings
from sojourn.metrics.compare.sides import class_comparisons, ledger_difference, side_by_side
from sojourn.metrics.compare.verdict import Comparison
from sojourn.metrics.errors import RunDataError, SojournError
from sojourn.metrics.request.objectives import OBJECTIVE_NAMES
from sojourn.metrics.run.directory import RunDirectory
from sojourn.ui.address import named
from sojourn.ui.figures import compare as figures
from sojourn.ui.filter_bar import chosen_filter
from sojourn.ui.markup import fragments
from sojourn.ui.markup.before_after import in_order, settings_table
from sojourn.ui.narrowed import narrowed
from sojourn.ui.page import draw, once, open_page, read, stop_with
from sojourn.ui.run_data import RunData, fingerprint
from sojourn.ui.run_list import name_beside, run_names
from sojourn.ui.tables.compare import (
    MEANING,
    class_rows,
    fold,
    goodput_rows,
    ledger_rows,
    metric_rows,
    pair_rows,
)
from sojourn.ui.text import distinct, markdown, prose, safe

UNTIL = {"ledger": "last byte", "ttft": "first token"}
STATES = {"no worse": "healthy", "worse": "overloaded", "cannot tell": "inconclusive"}


def samples_of(run: RunData) -> RunSamples:
    def made() -> tuple[RunSamples]:
        return (samples_from(RunDirectory(run.path), run.requests, run.meta.get("objectives")),)

    return once(run, "compare.samples", made)[0]


@st.cache_data(max_entries=16, show_spinner="Comparing the runs …")
def verdict(key: str, is_forced: bool, _runs: tuple[RunData, RunData]) -> tuple[Comparison | None, str]:
    """Of the whole runs; or None and why there is none."""
    if any(run.is_sample for run in _runs):
        return None, (
            f"A run here has {max(run.sampled_of for run in _runs):,} requests, of which the app holds a sample. "
            "sojourn compare gives the verdict of all of them"
        )
    samples = {run.path: samples_of(run) for run in _runs}
    a, b = map(RunDirectory, samples)
    try:
        return compare_runs([a], [b], force=is_forced, read=lambda run: samples[run.path]), ""
    except SojournError as error:
        return None, str(error)


def choose_other(run: RunData) -> Path:
    """The run beside the chosen one: by the address, else the one before it."""
    folder = st.session_state.runs_folder
    names = [name for name in run_names(folder) if name != st.session_state.run]
    if not names:
        stop_with("There is only one run here. Record a second one, such as the fix that a finding names.", "info")
    if st.query_params.get("with") == st.session_state.run:  # chosen at the left meanwhile
        del st.query_params["with"]
    asked = named("with", names, "other run")
    st.session_state.compared = asked or name_beside(folder, st.session_state.run, names)

    def keep() -> None:
        st.query_params["with"] = st.session_state.compared

    with st.container(horizontal=True, vertical_alignment="bottom"):
        chosen = st.selectbox("Compared with", names, key="compared", on_change=keep)
        st.toggle("Swap A and B", key="swapped", bind="query-params",
                  help="A is the run that was recorded first, unless they are swapped")  # fmt: skip
    st.query_params["with"] = chosen
    return folder / chosen


def show_verdict(found: Comparison | None, reason: str, *, can_verify: bool) -> None:
    if found is None:
        st.html(fragments.state("inconclusive", "no verdict", reason))
        verify = "`sojourn verify A B` says whether B did what was predicted of its settings." if can_verify else ""
        st.markdown(f"The figures below are of the runs as they are. {verify}")
        return
    sentence = f"{MEANING[found.verdict]} Margin {100 * found.margin:.3g}%, confidence {found.confidence:.0%}."
    st.html(fragments.state(STATES[found.verdict], found.verdict, sentence))
    st.html(fragments.data_table(metric_rows(found.metrics, found.confidence)))
    for note in fold(found):
        st.html(fragments.wrap(f'<p class="sj-small sj-muted">{prose(note)}</p>'))
    st.caption("As `sojourn compare A B`, of all requests. Each bound holds by itself.")


def show_settings(a: RunData, b: RunData) -> None:
    st.subheader("What differs between the runs", anchor=False)
    st.html(settings_table(a, b))


def show_ledgers(a: RunSamples, b: RunSamples, names: tuple[str, str], both: RunData) -> None:
    st.subheader("Ledgers side by side", anchor=False)
    prefix = st.segmented_control(
        "Until", list(UNTIL), default="ledger", required=True, key="shown", bind="query-params", format_func=UNTIL.get,
    )  # fmt: skip
    found = once(both, f"ledgers {prefix}", lambda: (ledger_difference(a, b, prefix),))[0]
    if found is None:
        st.info("A ledger needs the server's records, and a run has none.", icon=":material/info:")
        return
    draw("", once(both, f"aligned {prefix}", lambda: figures.aligned_ledgers(found, names)),
         f"`client.parquet` joined with `requests.parquet`: mean of `{prefix}_*_ns`.")  # fmt: skip
    draw(
        "", once(both, f"differences {prefix}", lambda: figures.differences(found)),
        "B − A by account. A line is the 95% interval.",
    )  # fmt: skip
    st.html(fragments.data_table(ledger_rows(found)))
    pairs = "Requests of the same place in the schedule are taken in pairs." if found.paired else (
        "The schedules differ, so both runs are sampled on their own."
    )  # fmt: skip
    reason = f"There is no interval: {found.no_interval}." if found.no_interval else (
        "The interval holds what differs within a run, not what differs from run to run."
    )  # fmt: skip
    st.caption(f"{pairs} {reason}")


def show_classes(a: RunSamples, b: RunSamples, runs: tuple[RunData, RunData], both: RunData) -> None:
    st.subheader("Goodput and latencies by class", anchor=False)
    goodput = [run.diagnosis.goodput if run.diagnosis is not None else [] for run in runs]
    if all(goodput):
        st.html(fragments.data_table(goodput_rows(*goodput)))
        st.caption("Good requests met every objective of their class. In brackets the 95% interval of the share.")
    found = once(both, "classes", lambda: class_comparisons(a, b))
    if len(table := class_rows(found)):
        st.html(fragments.data_table(table))
        reasons = list(dict.fromkeys(f"{group.klass}: {group.no_interval}" for group in found if group.no_interval))
        st.caption(
            "From the intended send; a failed request counts as slower than all others. Bounds of B / A hold each with "
            f"95%. {' '.join(f'{markdown(reason)}.' for reason in reasons)}"
        )
    left, right = st.columns(2, gap="large")
    for column, latency in zip((left, right), ("ttft_ms", "tpot_ms"), strict=True):
        with column:
            draw(
                OBJECTIVE_NAMES[latency].capitalize(),
                once(both, f"distribution {latency}",
                     lambda latency=latency: figures.distributions(a.requests, b.requests, latency)),
                f"`client.parquet`: `{latency}` of served requests.",
            )  # fmt: skip


def show_pairs(a: RunSamples, b: RunSamples, names: tuple[str, str], both: RunData) -> None:
    st.subheader("Requests side by side", anchor=False)
    table = once(both, "pairs", lambda: side_by_side(a, b))
    if table.empty:
        st.info("The runs did not send the same requests at the same moments, so requests have no pairs.",
                icon=":material/info:")  # fmt: skip
        return
    draw("", once(both, "pairs figure", lambda: figures.pairs(table)),
         "A point is a request of the schedule that both runs share. At most 4,000 are drawn.")  # fmt: skip
    rows = pair_rows(table)
    short = distinct(list(rows.A), 14)
    cells = rows.drop(columns=["A", "B"]).map(safe)
    cells.insert(0, "request", [
        f"{name} " + " ".join(
            fragments.link("requests", {"run": run, "ids": request, "request": request}, side)
            for side, run, request in zip("AB", names, pair, strict=True)
        )
        for name, pair in zip(map(safe, short), zip(rows.A, rows.B, strict=True), strict=True)
    ])  # fmt: skip
    if set(cells.status) == {"ok"}:
        cells = cells.drop(columns="status")
    st.html(fragments.html_table(list(cells.columns), cells.to_numpy().tolist(), right=(2, 3, 4, 5, 7), ids=(0,)))
    st.caption("The 20 requests whose latency differs most. A letter opens the request in its run.")


run = open_page(
    "Compare",
    "Two runs side by side: whether B is worse than A, where the time of a request differs, and in which requests.",
    "**A** is the run that was recorded first, *before*, and **B** the later one, *after*. The **verdict** is that of "
    "`sojourn compare A B`: *no worse* says that B is no worse than A within the margin, *worse* that it is worse "
    "beyond it, *cannot tell* that these runs show neither. **Ledgers**: the mean request of both runs, account by "
    "account; where an interval leaves out 0, the difference is more than chance within the runs. A filter applies to "
    "both runs, and not to the verdict.",
)
named("force", ("true", "false"), "choice")
named("swapped", ("true", "false"), "choice")
named("shown", UNTIL, "end")
other_path = choose_other(run)
try:
    whole = read(str(other_path), fingerprint(other_path))
except RunDataError as error:
    st.error(markdown(error), icon=":material/error:")
    st.stop()
filter_ = chosen_filter()
other = narrowed(whole, filter_) if filter_.labels() else whole
first = read(str(run.path), fingerprint(run.path))
a_run, b_run, a_whole, b_whole = *in_order(run, other), *in_order(first, whole)
if st.session_state.swapped:
    a_run, b_run, a_whole, b_whole = b_run, a_run, b_whole, a_whole
st.markdown(f"**A**, before: {markdown(a_run.name)} · **B**, after: {markdown(b_run.name)}")
is_forced = st.toggle(
    "Compare all the same", key="force", bind="query-params",
    help="give a verdict also on runs that are not valid, or that differ in load, model or machine",
)  # fmt: skip
place = st.container()  # filled last: figures need not wait for it
show_settings(a_run, b_run)
if run.requests.empty or other.requests.empty:
    stop_with("A run has no request that passes, so there is nothing to set side by side.", "info")
both = a_run.beside(b_run)
a, b = samples_of(a_run), samples_of(b_run)
names = (a_run.name, b_run.name)
show_ledgers(a, b, names, both)
show_classes(a, b, (a_run, b_run), both)
show_pairs(a, b, names, both)
with place:
    found = verdict(a_whole.beside(b_whole).key, is_forced, (a_whole, b_whole))
    show_verdict(*found, can_verify=all(states_settings(each.meta) and each.has_ledger for each in (a_whole, b_whole)))
