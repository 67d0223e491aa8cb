"""Sweep: goodput over a grid of rates, and the frontier of goodput against the objectives."""

import streamlit as st

from sojourn.loadgen.search.points import sweeps
from sojourn.metrics.errors import RunDataError
from sojourn.ui.markup import sweep_report
from sojourn.ui.page import caption, draw, stop_with, style
from sojourn.ui.text import markdown

style()
st.title("Sweep", anchor=False)
st.markdown("How goodput and latency change with the offered rate, from one run at each.")
with st.expander("How to read this page"):
    st.markdown(
        "**Goodput against the rate**: as long as the line follows the dashed one, all that is offered is good; where "
        "it falls, users pay for the load. **Attainment** is the same as a share, with its interval. The **frontier** "
        "judges every run again under stricter and looser objectives and takes the best rate of each: the price of a "
        "promise. A run that is not valid counts in none of them."
    )
folders = {folder.name: folder for folder in sweeps(st.session_state.runs_folder)}
if not folders:
    stop_with(
        f"There is no sweep in {markdown(st.session_state.runs_folder)}. Make one with "
        "`sojourn capacity SCENARIO --rates 1,2,4,8`.",
        "folder_off",
    )
chosen = st.selectbox("Sweep", list(folders), key="sweep")
try:
    data = sweep_report.load_sweep(folders[chosen])
except RunDataError as error:
    st.error(markdown(error), icon=":material/error:")
    st.stop()
st.html(sweep_report.summary(data))
st.html(sweep_report.remarks(data))
for drawing in sweep_report.drawings(data):
    draw(*drawing)
st.subheader("Rates", anchor=False)
st.html(sweep_report.rate_table(data))
caption("`sweep.json` points; each has its run directory beside it.")
