"""Requests: the ledger of each request as a waterfall, and one request in full."""

import streamlit as st

from ui import fragments, frame
from ui.figures import ledger
from ui.tables import chosen, classes, failures, request_facts
from ui.wording import label, markdown

ORDERS = {
    "e2e_ms": "slowest",
    "ttft_ms": "slow first token",
    "tpot_ms": "slow tokens",
    "due_ns": "as sent",
}
UNTIL = {"ledger": "last byte", "ttft": "first token"}

run = frame.open_page(
    "Requests",
    "Where the time of each single request went, account by account, and one request in full.",
    "A row is a request; its accounts stand end to end in the order in which a request meets them, so the length of "
    "a row is its latency. Accounts are sums: decode steps and interruptions alternate in reality, and the **clock** "
    "panel of a single request shows when. Colours are the lifecycles: orange token, blue compute, green memory, pink "
    "request, grey client. The black tick marks the first token read by the client.",
)
if run.requests.empty:
    st.info("No request has been recorded.", icon=":material/hourglass_empty:")
    st.stop()
if not run.has_ledger:
    st.info("No server recorded these requests: only the client’s own times are shown.", icon=":material/info:")

names = classes(run.requests)
with st.container(horizontal=True, gap="medium"):
    order = st.segmented_control(
        "Order", list(ORDERS), default="e2e_ms", format_func=ORDERS.get, required=True, key="order"
    )
    until = st.segmented_control(
        "Until", list(UNTIL), default="ledger", format_func=UNTIL.get, required=True, key="until"
    )
    count = st.segmented_control("Rows", [20, 40, 80], default=20, required=True, key="rows")
    picked = names
    if len(names) > 1:
        picked = st.pills("Classes", names, selection_mode="multi", default=names, key="classes", format_func=markdown)
rows = chosen(run.requests[run.requests.klass.fillna("").isin(picked)], order, count)
st.subheader(f"{len(rows)} of {len(run.requests):,} requests", anchor=False)
frame.draw(
    ledger.waterfall(rows, until),
    "waterfall",
    f"`client.parquet` joined with `requests.parquet` by `request_id`: `{until}_*_ns` and what is left over.",
)
failed = failures(run.requests)
if not failed.empty:
    st.subheader(f"{(run.requests.status != 'ok').sum():,} requests were not served", anchor=False)
    st.html(fragments.table(list(failed.columns), failed.to_numpy().tolist(), right=(2,)))
    st.caption("`client.parquet` `status`, `error`, in the order of `due_ns`; the first 20.")
if rows.empty:
    st.stop()
st.subheader("One request", anchor=False)
name = st.selectbox("Request", rows.request_id.tolist(), key="request", bind="query-params")
request = rows[rows.request_id == name].iloc[0]
st.html(fragments.pairs(request_facts(request), "sj-facts"))
frame.draw(
    ledger.one_request(request, run.steps),
    "one_request",
    f"Request {markdown(label(name))}: `ledger_*_ns`; `steps.parquet` `request_ids`, `kinds`, `new_tokens`; "
    "`requests.parquet` `token_ns`; `client.parquet` `chunk_ns`.",
)
