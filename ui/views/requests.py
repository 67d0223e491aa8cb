"""Requests: the ledger of each request as a waterfall, and one request in full."""

import streamlit as st

from sojourn.interop.imported.otlp import read_joined
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.request.blame import blame_of, gini, offenders, waited_ns
from sojourn.metrics.request.token_gaps import explain_gap, slowest_gaps, why
from sojourn.metrics.run.directory import RunDirectory
from sojourn.ui import drawings
from sojourn.ui.address import named, refuse
from sojourn.ui.figures import blame as blame_figures
from sojourn.ui.figures import ledger
from sojourn.ui.figures import spans as spans_figure
from sojourn.ui.markup import fragments
from sojourn.ui.page import caption, draw, once, open_page, stop_with
from sojourn.ui.tables.blame import TRAITS, slowed_steps, traits, worst_offenders
from sojourn.ui.tables.request import failure_reasons, failures, request_facts
from sojourn.ui.text import label, markdown, number

ORDERS = {
    "e2e_ms": "slowest",
    "ttft_ms": "slow first token",
    "tpot_ms": "slow tokens",
    "due_ns": "as sent",
}
UNTIL = {"ledger": "last byte", "ttft": "first token"}
ROWS = [20, 40, 80]

run = open_page(
    "Requests",
    "Where the time of each single request went, account by account, and one request in full.",
    "A row is a request; its accounts stand end to end in the order in which a request meets them, so the length of "
    "a row is its latency. Accounts are sums: decode steps and interruptions alternate in reality, and the **clock** "
    "panel of a single request shows when. Colours are the lifecycles: orange token, blue compute, green memory, pink "
    "request, grey client. The black tick marks the first token read by the client. **Who delayed whom**: a row "
    "waited, a column is why; a row sums to what its ledger booked as waiting. For a single request the page shows "
    "which requests delayed it, and why one of its tokens came late.",
)
if run.requests.empty:
    stop_with("No request has been recorded.", "hourglass_empty")
named("order", ORDERS, "order")
named("shown", UNTIL, "end")
named("rows", ROWS, "number of rows")
wanted = st.query_params.get("request", "")
if wanted and run.request(wanted) is None:
    where = "No request that passes the filter is" if len(run.requests) < run.sent else "This run has no request"
    refuse(f"{where} {markdown(wanted)}.", "request")
if not run.has_ledger:
    st.info("No server recorded these requests: only the client’s own times are shown.", icon=":material/info:")

with st.container(horizontal=True, gap="medium"):
    order = st.segmented_control(
        "Order",
        list(ORDERS),
        default="e2e_ms",
        format_func=ORDERS.get,
        required=True,
        key="order",
        bind="query-params",
    )
    until = st.segmented_control(
        "Until",
        list(UNTIL),
        default="ledger",
        format_func=UNTIL.get,
        required=True,
        key="shown",
        bind="query-params",
    )
    count = st.segmented_control("Rows", ROWS, default=20, required=True, key="rows", bind="query-params")
rows = run.ordered(order, count)
draw(
    f"{len(rows)} of {run.num_requests:,} requests",
    once(run, f"waterfall {order} {until} {count}", lambda: ledger.waterfall(rows, until)),
    f"`client.parquet` joined with `requests.parquet` by `request_id`: `{until}_*_ns` and what is left over.",
)
st.html(fragments.clocks(run.meta))
spans = read_joined(RunDirectory(st.session_state.run_path))
if spans is not None:
    shown = spans.set_index("request_id").reindex(rows.request_id).dropna(subset="e2e_ns").reset_index()
    draw(
        f"Of these, the server’s spans tell of {len(shown)}",
        spans_figure.parts_of_requests(shown),
        "`spans.parquet`. Evidence level: request spans. What other requests, the host and sampling cost lies in "
        "prefill and decode; waits for KV blocks lie in the queue.",
    )
if run.has_ledger:
    draw(*once(run, "waits", lambda: drawings.waits(run)))
st.subheader("Who delayed whom", anchor=False)
if run.book is None:
    st.info(run.no_book, icon=":material/info:")
else:
    choices = traits(run.book)
    named("trait", choices, "trait")
    trait = st.segmented_control(
        "By", choices, default=choices[0], format_func=TRAITS.get, required=True, key="trait", bind="query-params"
    )
    draw(*once(run, f"blame {trait}", lambda: drawings.blame_matrix(run, trait)._replace(title="")))
    if beware := once(run, "slowed steps", lambda: slowed_steps(run.steps)):
        st.warning(beware, icon=":material/warning:")
    st.html(once(run, "offenders", lambda: fragments.data_table(worst_offenders(run.book))))
    st.caption(
        "The requests that delayed all others most. Gini coefficient of all: "
        + once(run, "gini", lambda: number(gini(offenders(run.book).caused_ns.to_numpy())))
        + " (0: all alike, 1: one request causes everything)."
    )
failed = failures(run.requests)
if not failed.empty:
    st.subheader(f"{(run.requests.status != 'ok').sum():,} requests were not served", anchor=False)
    st.html(fragments.data_table(failure_reasons(run.requests)))
    with st.expander(f"The first {len(failed)} of them"):
        st.html(fragments.data_table(failed))
    caption("`client.parquet` `status`, `error`, `due_ns`.")
known = rows.request_id.tolist()
if wanted and wanted not in known:
    known = [wanted, *known]  # a link may name any request of the run
if not known:
    st.stop()
st.subheader("One request", anchor=False)
name = st.selectbox("Request", known, key="request", bind="query-params")
request = run.request(name)
st.html(fragments.pairs(request_facts(request), "sj-facts"))
draw(
    "",
    ledger.one_request(request, run.steps_of(request)),
    f"Request {markdown(label(name))}: `ledger_*_ns`; `steps.parquet` `request_ids`, `kinds`, `new_tokens`; "
    "`requests.parquet` `token_ns`; `client.parquet` `chunk_ns`.",
)
if run.book is not None and (run.book.waits.request_ids == name).any():
    left, right = st.columns(2, gap="large")
    with left:
        draw(
            "Requests that delayed it",
            blame_figures.offenders(blame_of(run.book, name), float(waited_ns(run.book).loc[name].sum())),
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
            draw("", blame_figures.gap_lengths(list(tokens), slowest, token), "`requests.parquet` `token_ns`.")
            found = explain_gap(run.book, name, token)
            st.markdown(f"**{number(found.length_ns / 1e6, 'ms')}**: {markdown(why(found))}.")
            draw("", blame_figures.gap(found), "The accounts of this one gap, which sum to it. `steps.parquet`.")
