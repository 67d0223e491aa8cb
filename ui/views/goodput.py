"""Goodput: what users got, against what was promised to them."""

import streamlit as st

from metrics.request.goodput import goodput_by_tpot
from metrics.request.objectives import OBJECTIVE_NAMES
from metrics.results.load import latency_origin
from ui import page as frame
from ui.figures import goodput
from ui.markup import fragments, results

run = frame.open_page(
    "Goodput",
    "How many requests met their objectives, how latencies lie against them, and at which throughput.",
    "**Throughput against time per output token**: each point is a window of the run; to the right of the dashed line "
    "the average token came too late, and the colour tells which share of the window’s tokens went to good requests. "
    "A server that can do more lies further up and left. It cannot show the frontier at loads that were not offered. "
    "**Distributions**: a curve climbs to the share of served requests that were at least as fast; read where it "
    "crosses the objective’s line. Requests of the declared warm-up are left out; failures count against attainment.",
)
if run.requests.empty:
    st.info("No request has been recorded.", icon=":material/hourglass_empty:")
    st.stop()
objectives = run.meta.get("objectives") or []
measured = run.diagnosis.results if run.diagnosis is not None else None
if measured is not None:
    st.html(results.steady(measured.steady) + results.load_and_cost(measured))
st.subheader("Throughput against time per output token", anchor=False)
frame.draw(
    goodput.throughput_against_tpot(
        goodput_by_tpot(run.requests, objectives), goodput.bounds(run.requests, objectives, "tpot_ms")
    ),
    "throughput",
    "`client.parquet` `chunk_ns`, `chunk_tokens`; `run.json` objectives. Size of a point: open streams.",
)
if run.diagnosis is not None:
    st.subheader("Attainment", anchor=False)
    frame.draw(
        goodput.attainment(run.diagnosis.goodput),
        "attainment",
        "`diagnosis.json` goodput, from `client.parquet` `status`, `due_ns`, `first_token_ns`, `last_byte_ns`. "
        "A line on a bar is its 95 % interval.",
    )
left, right = st.columns(2, gap="large")
for column, latency in ((left, "ttft_ms"), (right, "tpot_ms")):
    with column:
        st.subheader(OBJECTIVE_NAMES[latency].capitalize(), anchor=False)
        frame.draw(
            goodput.latency_distribution(run.requests, latency, goodput.bounds(run.requests, objectives, latency)),
            latency,
            f"`client.parquet`: `{latency}` of served requests, {latency_origin(run.meta)}.",
        )
if run.diagnosis is not None:
    st.subheader("Quantiles", anchor=False)
    table = goodput.quantile_table(run.diagnosis.goodput)
    st.html(fragments.table(list(table.columns), table.to_numpy().tolist(), right=tuple(range(2, len(table.columns)))))
    st.caption(
        "`diagnosis.json` goodput `quantiles_ms`, in ms; failed requests count as slower than all others. A dash "
        "stands where there are too few requests for the claim."
    )
if measured is not None:
    st.subheader("Deadlines of tokens", anchor=False)
    st.html(results.deadlines(measured.deadlines))
    st.caption(results.DEADLINES_NOTE)
    st.subheader("All latencies, and what each is", anchor=False)
    st.html(results.latency_table(measured))
    st.caption(f"`diagnosis.json` results, from `client.parquet`. {results.INTERVAL_NOTE}")
