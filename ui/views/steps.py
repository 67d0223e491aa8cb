"""Steps: what the engine did from step to step."""

import streamlit as st

from ui import page as frame
from ui.figures import server, steps
from ui.tables.request import longest_steps

run = frame.open_page(
    "Steps",
    "What each step of the engine computed, what it held back, who owned the KV blocks, and where its time went.",
    "All panels share one clock. **Tokens**: what a batch held, by kind, below the token budget. **Held back**: "
    "waiting requests by the reason why the scheduler did not admit them; the lines are how many waited and ran. "
    "**KV blocks** sum to the pool. **Time of a step**: the host’s stages, which sum to the wall time; *wait* is the "
    "host waiting for the device. The red line is what the step model expects of the device for that composition: a "
    "step above it is slower than its work explains.",
)
if run.steps.empty:
    st.info(
        "The server recorded no step: a foreign server, one without a run directory, or with telemetry=off.",
        icon=":material/info:",
    )
    if not run.server.empty:
        st.subheader("What its own metrics showed", anchor=False)
        frame.draw(
            server.over_time(run.server, run.begin_ns),
            "server",
            "`scrapes.parquet`, one point a scrape: gauges are samples, tokens are what counters grew by.",
        )
    st.stop()
lasting = (run.steps.end_ns.max() - run.begin_ns) / 1e9
st.subheader(f"{len(run.steps):,} steps in {lasting:,.1f} s", anchor=False)
frame.draw(
    steps.over_time(run.steps, run.begin_ns),
    "over_time",
    "`steps.parquet`: `new_tokens` by `kinds`, `budget`; `refusals`, `waiting`, `preempted_ids`; `blocks_*`; "
    "`stage_*_ns`, `predicted_ns`. With more than 200 steps, a bar is the mean of the steps that began in its span.",
)
left, right = st.columns(2, gap="large")
with left:
    st.subheader("Expected and measured", anchor=False)
    frame.draw(
        steps.expected_against_actual(run.steps, run.begin_ns),
        "expected",
        "`steps.parquet` `device_ns` against `predicted_ns`; above the line a step took longer than its work explains.",
    )
with right:
    st.subheader("Stages of all steps", anchor=False)
    frame.draw(
        steps.stage_breakdown(run.steps),
        "stages",
        "`steps.parquet` `stage_*_ns`: share of the wall time, and mean of a step.",
    )
st.subheader("Longest steps", anchor=False)
table = longest_steps(run.steps, run.begin_ns)
formats = {
    name: st.column_config.NumberColumn(format="%.2f") for name in table.columns if name.endswith(("(ms)", "(s)"))
}
st.dataframe(table, hide_index=True, column_config=formats)
st.caption("`steps.parquet` by `end_ns − begin_ns`. Residual: `device_ns − predicted_ns`.")
