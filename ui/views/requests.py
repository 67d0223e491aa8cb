"""Requests: the ledger of each request as a waterfall, and one request in full."""

import streamlit as st

from metrics.errors import RunDataError
from metrics.request.blame import blame_of, gini, offenders, waited_ns
from metrics.request.token_gaps import explain_gap, slowest_gaps, why
from ui import page as frame
from ui.figures import blame as blame_figures
from ui.figures import ledger
from ui.markup import fragments
from ui.tables.blame import TRAITS, blame, slowed_steps, traits, waits_by_reason, worst_offenders
from ui.tables.request import chosen, classes, failures, request_facts
from ui.text import label, markdown, number

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
    "request, grey client. The black tick marks the first token read by the client. **Who delayed whom**: a row "
    "waited, a column is why; a row sums to what its ledger booked as waiting. For a single request the page shows "
    "through whom it waited, and why one of its tokens came late.",
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
st.html(fragments.clocks(run.meta))
if run.has_ledger:
    st.subheader("What they waited for", anchor=False)
    frame.draw(
        blame_figures.waits_by_reason(waits_by_reason(run.requests)),
        "waits",
        "`requests.parquet` `waits`, by the scheduler’s own reason, and `ledger_request_interference_ns`.",
    )
st.subheader("Who delayed whom", anchor=False)
if run.book is None:
    st.info(run.no_book, icon=":material/info:")
else:
    known_traits = traits(run.book)
    trait = st.segmented_control(
        "By", known_traits, default=known_traits[0], format_func=TRAITS.get, required=True, key="trait"
    )
    of = TRAITS[trait] if trait != "worst" else "requests"
    frame.draw(
        blame_figures.heat_map(blame(run.book, trait), f"{of} that waited", f"{of} that they waited for"),
        "blame",
        "Rows sum to `request.queue`, `memory.blocked`, `request.interference` and `memory.preempted` of the ledger; "
        "from `steps.parquet`. *unexplained* is what the steps do not explain.",
    )
    if beware := slowed_steps(run.steps):
        st.warning(beware, icon=":material/warning:")
    worst_table = worst_offenders(run.book)
    uneven = gini(offenders(run.book).caused_ns.to_numpy())
    last = tuple(range(len(worst_table.columns) - 3, len(worst_table.columns)))
    st.html(fragments.table(list(worst_table.columns), worst_table.to_numpy().tolist(), right=last))
    st.caption(
        f"The requests that delayed the others most. Gini coefficient of all: {number(uneven)} (0: all alike, 1: one "
        "request causes everything)."
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
if run.book is not None and (run.book.waits.request_ids == name).any():
    left, right = st.columns(2, gap="large")
    with left:
        st.subheader("Through whom it waited", anchor=False)
        frame.draw(
            blame_figures.offenders(blame_of(run.book, name), float(waited_ns(run.book).loc[name].sum())),
            "offenders",
            "`steps.parquet`: who had what this request waited for.",
        )
    with right:
        st.subheader("Time before each token", anchor=False)
        try:
            slowest = [gap.token for gap in slowest_gaps(run.book, name, 5)]
        except RunDataError as error:
            st.info(markdown(error), icon=":material/info:")
        else:
            tokens = run.book.requests.token_ns[run.book.requests.request_id == name].iloc[0]
            token = st.selectbox(
                "Token", [*slowest, 0], format_func=lambda place: f"token {place}" if place else "the first token",
                key="token",
            )  # fmt: skip
            frame.draw(
                blame_figures.gap_lengths(list(tokens), slowest, token), "gaps", "`requests.parquet` `token_ns`."
            )
            found = explain_gap(run.book, name, token)
            st.markdown(f"**{number(found.length_ns / 1e6, 'ms')}**: {markdown(why(found))}.")
            frame.draw(
                blame_figures.gap(found), "gap", "The accounts of this one gap, from `steps.parquet`; they sum to it."
            )
