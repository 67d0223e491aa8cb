"""Overview: the answer in one sentence, the numbers behind it, and where all requests' time went."""

import streamlit as st

from sojourn.ui import drawings
from sojourn.ui.markup import foreign_server as server
from sojourn.ui.markup import fragments
from sojourn.ui.page import caption, draw, open_page

run = open_page(
    "Overview",
    "How much of the load was served within its objectives, and where the requests’ time went.",
    "A request is **good** when it met every objective of its class. **Attainment** is the share of good requests "
    "among all that were sent, failures included. **Goodput** is good requests per second. Times run from the moment "
    "when a request was *meant* to be sent. TTFT is the time to first token, TPOT the time per output token after it. "
    "The bars divide all requests’ time into the four lifecycles: **token** (text ↔ ids ↔ samples), **compute** "
    "(steps on the device), **memory** (KV blocks), **request** (queue, other requests, streaming); **client** is "
    "what happened outside the server.",
)
st.html(fragments.headline(run))
st.html(fragments.tiles(fragments.key_numbers(run)))
caption(
    "A dash stands where too few requests make a quantile a guess. `client.parquet` status, `due_ns`, `last_byte_ns`, "
    "`output_tokens`; `diagnosis.json` goodput."
)
if run.diagnosis is not None:
    if any(group.objectives for group in run.diagnosis.goodput):
        draw(*drawings.attainment(run))
    st.subheader("Limits of this run", anchor=False)
    if run.diagnosis.warnings:
        st.html(fragments.warnings(run.diagnosis))
    else:
        caption("The diagnosis names none.")
st.html(fragments.client_error(run.meta))
view = run.diagnosis.server if run.diagnosis is not None else None
if view is not None:
    draw(*drawings.parts_of_the_time(run))
    with st.expander("What can be seen of this server"):
        st.html(server.introduction(view) + server.spans(view))
        st.html(fragments.tiles(server.tiles_of(view)))
        st.html(server.agreement(view) + server.accounts(view))
        caption("The table of names is in docs/foreign-servers.md. `scrapes.parquet`.")
elif run.diagnosis is not None:
    draw(*drawings.lifecycles(run))
    st.html(fragments.closure(run.diagnosis))
st.html(fragments.clocks(run.meta))
if view is None and run.has_ledger:
    draw(*drawings.accounts(run))
