"""Compute: how near to its limits the device worked, on what, and in which kernels."""

import streamlit as st

from metrics.compute.utilisation import token_numbers
from ui import page as frame
from ui.figures import compute
from ui.markup import fragments
from ui.tables.compute import flops_by_part, in_words, kernel_times, largest_kernels, points, tokens, utilisation

run = frame.open_page(
    "Compute",
    "How near to its measured limits the device came in each step, what the work was, and which kernels it went to.",
    "**Roofline**: a point is a step; the red line is what this device can do at most, measured by `sojourn "
    "calibrate-device`. Left of its bend memory is the bound, right of it arithmetic. A point far below the line is "
    "time that neither explains: launches, small shapes, a slow kernel. **MFU** and **MBU** count the model’s own "
    "FLOPs and bytes; on *wall time* they also hold what the device was idle. **Residual**: whether a step took longer "
    "than its composition explains is on the page Steps.",
)
if run.steps.empty:
    st.info(
        "The server recorded no step: a foreign server, one without a run directory, or with telemetry=off.",
        icon=":material/info:",
    )
    st.stop()
if run.no_ceilings:
    st.info(run.no_ceilings, icon=":material/info:")
st.subheader("Roofline of the steps", anchor=False)
frame.draw(
    compute.roofline(points(run.steps, run.begin_ns), run.ceilings, run.precision),
    "roofline",
    "`steps.parquet` `flops`, `bytes`, `device_ns`; ceilings: `sojourn calibrate-device`. At most 4,000 steps.",
)
left, right = st.columns(2, gap="large")
table = utilisation(run.steps, run.ceilings, run.precision)
with left:
    st.subheader("Utilisation", anchor=False)
    frame.draw(
        compute.utilisation(table),
        "utilisation",
        "`steps.parquet` `flops`, `bytes`, `device_ns` against the ceilings; wall time has the gaps before steps, too.",
    )
with right:
    st.subheader("Work for a token", anchor=False)
    frame.draw(
        compute.flops_by_part(flops_by_part(run.steps)),
        "parts",
        "`steps.parquet` `flops_attention`, `flops_mlp`, `flops_head` over `new_tokens`.",
    )
    st.subheader("Tokens by kind", anchor=False)
    frame.draw(
        compute.tokens_by_kind(tokens(run.requests, run.steps)),
        "tokens",
        "`requests.parquet` `computed_tokens`, `cached_tokens`, `recomputed_tokens`, `drafted_tokens`; "
        "`steps.parquet` `padding_tokens`, `overrun_tokens`.",
    )
    if said := in_words(token_numbers(run.steps, run.requests)):
        st.caption(said)
st.subheader("Kernels by class", anchor=False)
frame.draw(
    compute.kernels_by_class(kernel_times(run.kernels)),
    "kernels",
    "`kernels.parquet` of profile bursts; the classes sum to the bursts’ wall time.",
)
largest = largest_kernels(run.kernels)
if not largest.empty:
    st.html(fragments.table(list(largest.columns), largest.to_numpy().tolist(), right=(2, 3, 4)))
    st.caption("`kernels.parquet`: the kernels that took most of the bursts’ time.")
st.subheader("The machine", anchor=False)
frame.draw(
    compute.machine(run.system, run.begin_ns),
    "machine",
    "`system.parquet`, once a second; a sensor that this machine lacks is not drawn.",
)
