"""Goodput: what users got, against what was promised to them."""

import streamlit as st

from sojourn.ui import drawings
from sojourn.ui.figures import goodput
from sojourn.ui.markup import fragments, results
from sojourn.ui.narrowed import results_of
from sojourn.ui.page import caption, draw_all, once, open_page, stop_with

run = open_page(
    "Goodput",
    "How many requests met their objectives, how latencies lie against them, and at which throughput.",
    "**Throughput against time per output token**: each point is a window of the run. To the right of the dashed line "
    "the average token came too late. The colour tells which share of the window’s tokens went to good requests. "
    "Red left of the line: another objective was missed, such as TTFT. These are windows of one load; the page "
    "**Sweep** has the curve over several rates. "
    "**Distributions**: a curve climbs to the share of served requests that were at least as fast; read where it "
    "crosses the objective’s line. Requests of the declared warm-up are left out; failures count against attainment.",
)
if run.requests.empty:
    stop_with("No request has been recorded.", "hourglass_empty")
st.html(results.goodput_of(run))
measured = once(run, "results", lambda: results_of(run))
if measured is not None:
    st.html(results.steady(measured.steady) + results.load_and_cost(measured))
draw_all(once(run, "goodput", lambda: drawings.of_goodput(run)))
if run.diagnosis is not None:
    st.subheader("Quantiles", anchor=False)
    st.html(fragments.data_table(goodput.quantile_table(run.diagnosis.goodput)))
    caption(
        "`diagnosis.json` goodput `quantiles_ms`, in ms; failed requests count as slower than all others. A dash "
        "stands where there are too few samples."
    )
if measured is not None:
    st.subheader("Deadlines of tokens", anchor=False)
    st.html(results.deadlines(measured.deadlines))
    caption(results.DEADLINES_NOTE)
    st.subheader("All latencies, and what each is", anchor=False)
    st.html(results.latency_table(measured))
    caption(f"`diagnosis.json` results, from `client.parquet`. {results.INTERVAL_NOTE}")
