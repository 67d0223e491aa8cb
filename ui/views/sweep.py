"""Sweep: throughput against time per output token, goodput over a grid of rates, and the frontier of the objectives."""

import streamlit as st

from sojourn.loadgen.search.curve import curve_csv, curve_json, differences, read_curves
from sojourn.loadgen.search.points import sweeps
from sojourn.metrics.errors import RunDataError
from sojourn.ui.address import refuse
from sojourn.ui.markup import sweep_report, tradeoff
from sojourn.ui.page import caption, draw, stop_with, style
from sojourn.ui.text import markdown

AXES = {"tokens/s against TPOT": False, "tokens/s per device against tokens/s per user": True}
style()
st.title("Sweep", anchor=False)
st.markdown("How throughput, goodput and latency change with the offered rate, from one run at each.")
with st.expander("How to read this page"):
    st.markdown(
        "**Throughput against time per output token**: a larger batch gives more tokens per second, and each reader "
        "waits longer for the next one. The **goodput** (diamond) is the largest rate at which 90% of the requests "
        "keep every objective. The cross shows where the curve meets the TPOT objective alone. **Goodput against the "
        "rate**: as long as the line follows the dashed one, all that is offered is good. **Attainment** is the same "
        "as a share, with its interval. The **frontier** judges every run again under stricter and looser objectives "
        "and takes the best rate of each. A run that is not valid counts in none of them."
    )
folders = {folder.name: folder for folder in sweeps(st.session_state.runs_folder)}
if not folders:
    stop_with(
        f"There is no sweep in {markdown(st.session_state.runs_folder)}. Make one with "
        "`sojourn capacity SCENARIO --rates 1,2,4,8`.",
        "folder_off",
    )
asked = st.query_params.get_all("sweep")
if unknown := [name for name in asked if name not in folders]:
    refuse(f"There is no sweep {markdown(', '.join(unknown))} here.", "sweep")
names = st.multiselect(
    "Sweeps, one curve each; the first one in detail below", list(folders),
    default=asked or [next(iter(folders))], key="sweeps",
)  # fmt: skip
if not names:
    stop_with("Choose a sweep.", "ssid_chart")
st.query_params["sweep"] = names
axes = st.radio("Axes", list(AXES), key="axes", horizontal=True)
left, middle, right = st.columns(3)
slo_ms = left.number_input(
    "SLO: TPOT at most (ms)", min_value=0.1, value=None, placeholder="of the sweep", key="tpot_slo"
)
price = middle.number_input(
    "Price of the machine ($ per hour)", min_value=0.01, value=None, placeholder="of the scenario", key="price"
)
devices = right.number_input(
    "Devices, where the server does not report them", min_value=1, value=None, placeholder="unknown", key="devices"
)
try:
    found = [sweep_report.load_sweep(folders[name]) for name in names]
    curves = read_curves([folders[name] for name in names], slo_ms=slo_ms, usd_per_hour=price, devices=devices)
except RunDataError as error:
    st.error(markdown(error), icon=":material/error:")
    st.stop()
data = found[0]
st.html(sweep_report.summary(data))
draw(*tradeoff.drawing(curves, per_user=AXES[axes]))
st.html(tradeoff.table(curves))
st.html(tradeoff.sentences(curves, differences([each.search for each in found])))
st.html(sweep_report.remarks(data))
with st.container(horizontal=True):
    st.download_button("Curve as CSV", curve_csv(curves), "curve.csv", "text/csv", icon=":material/download:")
    st.download_button("Curve as JSON", curve_json(curves), "curve.json", "application/json",
                       icon=":material/download:")  # fmt: skip
for drawing in sweep_report.drawings(data):
    draw(*drawing)
st.subheader("Rates", anchor=False)
st.html(sweep_report.rate_table(data))
caption("`sweep.json` points; each has its run directory beside it.")
