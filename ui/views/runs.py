"""Runs: all runs of the folder, with what each found. A click opens one."""

import pandas as pd
import streamlit as st

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.listing import ListedRun, list_runs
from sojourn.ui.page import caption, stop_with, style
from sojourn.ui.text import markdown

COLUMNS = {
    "run": st.column_config.TextColumn(pinned=True),
    "recorded": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm", help="UTC"),
    "goodput (req/s)": st.column_config.NumberColumn(format="%.2f"),
    "attainment": st.column_config.ProgressColumn(min_value=0.0, max_value=1.0, format="percent"),
    "requests": st.column_config.NumberColumn(format="localized"),
}


@st.cache_data(max_entries=8)
def listed(folder: str, stamps: tuple[tuple[str, int], ...], _runs: object) -> list[ListedRun]:
    return list_runs(_runs)


def stamps_of(folder) -> tuple[tuple[str, int], ...]:
    """Name and time of change of the documents that a row is read from."""
    files = [*folder.glob("*/run.json"), *folder.glob("*/diagnosis.json"), *folder.glob("*/client.parquet")]
    return tuple(sorted((str(file), file.stat().st_mtime_ns) for file in files))


def table_of(runs: list[ListedRun]) -> pd.DataFrame:
    return pd.DataFrame({
        "run": [run.name for run in runs],
        "recorded": pd.to_datetime([run.recorded_at for run in runs], utc=True),
        "scenario": [run.scenario or run.source or "–" for run in runs],
        "verdict": [run.state or ("cannot be read" if run.unreadable else "not diagnosed") for run in runs],
        "goodput (req/s)": [run.goodput_rps for run in runs],
        "attainment": [run.attainment for run in runs],
        "requests": [run.requests for run in runs],
        "model": [run.model or "–" for run in runs],
        "finding": [run.headline or run.unreadable for run in runs],
    })  # fmt: skip


style()
st.title("Runs", anchor=False)
st.markdown("All runs of this folder, newest first. Choose a row to open its run.")
folder = st.session_state.runs_folder
try:
    runs = listed(str(folder), stamps_of(folder), folder)
except RunDataError as error:
    st.error(markdown(error), icon=":material/error:")
    st.stop()
if not runs:
    stop_with(st.session_state.get("no_run", "There is no run here."), "folder_off")
wanted = st.text_input("Search", placeholder="name, scenario, model, verdict or finding", key="search",
                       bind="query-params")  # fmt: skip
table = table_of(runs)
if wanted:
    text = table[["run", "scenario", "verdict", "model", "finding"]].astype(str).agg(" ".join, axis=1)
    table = table[text.str.contains(wanted, case=False, regex=False)].reset_index(drop=True)
event = st.dataframe(
    table, hide_index=True, column_config=COLUMNS, key="chosen-run", on_select="rerun", selection_mode="single-row",
    height=min(38 * (len(table) + 1), 900),
)  # fmt: skip
caption(f"{len(table):,} of {len(runs):,} runs. `sojourn runs` prints them. `run.json`, `diagnosis.json`.")
if rows := event["selection"]["rows"]:
    st.switch_page("views/overview.py", query_params={"run": str(table.run.iloc[rows[0]])})
