"""Steps: what the engine did from step to step."""

import streamlit as st

from sojourn.ui import drawings
from sojourn.ui.markup import fragments
from sojourn.ui.page import caption, draw, draw_all, once, open_page, show_no_steps, stop_with
from sojourn.ui.tables.request import longest_steps

run = open_page(
    "Steps",
    "What each step computed, which requests waited and why, who owned the KV blocks, and where its time went.",
    "All panels share one clock. **Tokens**: what a batch held, by kind, below the token budget. **Waiting requests**: "
    "by the reason why the scheduler did not admit them; the lines are how many waited and ran. "
    "**KV blocks** sum to the pool. **Time of a step**: the host’s stages, which sum to the wall time; *wait* is the "
    "host waiting for the device. The red line is what the step model expects of the device for that composition: a "
    "step above it is slower than its work explains. With a filter of requests these are the steps that "
    "computed one of them.",
    has_steps=True,
)
if run.steps.empty and run.count_steps():
    stop_with("No step passes the filter.", "filter_alt_off")
if run.steps.empty:
    show_no_steps(run, "steps")
    if not run.server.empty:
        draw(*drawings.scraped_metrics(run))
    st.stop()
draw_all(once(run, "steps", lambda: drawings.of_steps(run)))
st.subheader("Longest steps", anchor=False)
table = once(run, "longest steps", lambda: longest_steps(run.steps, run.begin_ns))
st.html(fragments.data_table(table.map(lambda value: f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")))
caption(
    "Residual: measured less expected device time. `steps.parquet` `begin_ns`, `end_ns`, `device_ns`, `predicted_ns`."
)
