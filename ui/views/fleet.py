"""Fleet: the servers of one run side by side, their sum, and what routing cost."""

import streamlit as st

from sojourn.ui import links
from sojourn.ui.drawings import of_fleet
from sojourn.ui.markup import fragments
from sojourn.ui.page import caption, draw, open_page, stop_with
from sojourn.ui.tables.fleet import cache_table, latency_table, load_table, regretted, verdict
from sojourn.ui.text import markdown

run = open_page(
    "Fleet",
    "Several servers behind one router: what each was sent, how it fared, and what the router’s choice cost.",
    "**Small multiples**: a column is a server, and all columns share their axes. Means over time, so an idle server "
    "is at 0. **Tokens over mean**: prompt and output tokens of a server over those of the mean server; 1 is even. "
    "**Routing regret**: a prompt is set against what each server had computed when it got its first place. What its "
    "own server had computed and gave up is *lost by eviction*; what only another server had is *lost by routing*. "
    "The *pooled infinite cache* has what any server ever computed. Seconds are lost tokens times the mean prefill "
    "time of a computed prompt token. Evictions on the other servers are not known: small caches may have lost "
    "there, too, what is counted as lost by routing.",
)
view = run.fleet
if view is None:
    stop_with(
        "This run is of one server. Several servers are one run with `sojourn run SCENARIO --replicas 2`.", "info"
    )
st.html(fragments.headline(run))
st.markdown(f"**{markdown(verdict(view))}**")
links.show_servers(run)
drawings = of_fleet(run, view)
draw(*drawings["small multiples"])
st.subheader("Load by server", anchor=False)
st.html(fragments.data_table(load_table(view)))
caption(
    "`client.parquet` and `requests.parquet` by `server`; `server-N/steps.parquet` `device_ns`, `waiting`. Goodput of "
    "a server: good requests that it served over the time of the run."
)
st.subheader("Latency by server (ms)", anchor=False)
st.html(fragments.data_table(latency_table(view)))
caption(
    f"{view.remark[0].upper()}{view.remark[1:]}." if view.remark else
    "As clients saw it; a dash where too few requests make a quantile a guess. Routing: `ledger_request_routing_ns`."
)  # fmt: skip
left, right = st.columns(2, gap="large")
with left:
    draw(*drawings["ttft"])
with right:
    draw(*drawings["e2e"])
st.subheader("Routing regret", anchor=False)
if view.pooled is None:
    stop_with(view.no_pooled, "info")
left, right = st.columns(2, gap="large")
with left:
    draw(*drawings["prompt tokens"])
with right:
    draw(*drawings["regret"])
st.html(fragments.data_table(cache_table([view.pooled.fleet, *view.pooled.servers])))
caption(
    "`requests.parquet` `prompt_block_hashes`, `output_block_hashes`, `prefix_outcomes`, `infinite_hit_tokens`; "
    "prefill: `ledger_compute_prefill_ns` over the prompt tokens that were computed."
)
table = regretted(view.pooled.requests, run.begin_ns)
if not table.empty:
    st.markdown("**The requests that another server would have helped most**")
    st.html(fragments.data_table(table))
