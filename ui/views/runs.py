"""Runs: all runs of the folder, with what each found. A click opens one."""

import streamlit as st

from sojourn.metrics.run.listing import ListedRun
from sojourn.ui.address import named
from sojourn.ui.markup import fragments
from sojourn.ui.page import caption, stop_with, style
from sojourn.ui.run_list import listed
from sojourn.ui.text import NOTHING, number, percent, prose, safe

ORDERS = {"recorded": "newest", "goodput": "goodput", "attainment": "attainment", "name": "name"}


def text_of(run: ListedRun) -> str:
    """What a search looks into."""
    return " ".join(
        map(str, (run.name, run.scenario, run.source, run.state, run.model, run.headline, run.unreadable, run.note))
    )


def ordered(runs: list[ListedRun], order: str) -> list[ListedRun]:
    """The best first; what has no figure last. Runs are listed newest first."""
    if order == "name":
        return sorted(runs, key=lambda run: run.name)
    if order == "recorded":
        return runs
    name = "goodput_rps" if order == "goodput" else "attainment"
    return sorted(runs, key=lambda run: -1.0 if getattr(run, name) is None else getattr(run, name), reverse=True)


def found_in(run: ListedRun) -> str:
    """As HTML, the first sentence of its verdict; before it, what the run is where it is no load of its own."""
    verdict = "" if run.is_passed_over and run.note else (run.headline or run.unreadable or "").partition(". ")[0]
    return prose(". ".join(part for part in (f"{run.note[:1].upper()}{run.note[1:]}", verdict) if part))


def row_of(run: ListedRun) -> list[str]:
    """As HTML: the run with what it is of, its figures, and its finding."""
    recorded = (run.recorded_at or "")[:16].replace("T", " ")
    parts = [part for part in (recorded, run.scenario or run.source, run.model) if part]
    verdict = run.verdict or ("cannot be read" if run.unreadable else NOTHING if run.note else "not diagnosed")
    whole = ' class="sj-whole"' if len(run.name) <= fragments.LONGEST_ID else ""
    return [
        f"<span{whole}>{fragments.link('overview', {'run': run.name}, run.name)}</span>"
        f'<span class="sj-interval">{safe(" · ".join(parts))}</span>',
        f'{safe(verdict)}<span class="sj-interval">{found_in(run)}</span>', number(run.goodput_rps),
        percent(run.attainment), NOTHING if run.requests is None else f"{run.requests:,}",
    ]  # fmt: skip


style()
st.title("Runs", anchor=False)
st.markdown("All runs of this folder. A name opens its run.")
folder = st.session_state.runs_folder
runs = listed(folder)
if not runs:
    stop_with(st.session_state.get("no_run", "There is no run here."), "folder_off")
wanted = st.text_input("Search", placeholder="name, scenario, model, verdict or finding", key="search",
                       bind="query-params")  # fmt: skip
named("sort", ORDERS, "order")
order = st.segmented_control("Order", list(ORDERS), default="recorded", format_func=ORDERS.get, required=True,
                             key="sort", bind="query-params")  # fmt: skip
found = ordered([run for run in runs if wanted.lower() in text_of(run).lower()], order)
columns = ["run (recorded, UTC)", "verdict", "good req/s", "attainment", "requests"]
st.html(fragments.html_table(columns, list(map(row_of, found)), right=(2, 3, 4)))
caption(f"{len(found):,} of {len(runs):,} runs. `sojourn runs` prints them. `run.json`, `diagnosis.json`.")
