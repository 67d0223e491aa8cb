"""Compute: how near to its limits the device worked, on what, and in which kernels."""

import streamlit as st

from sojourn.metrics.compute.group_facts import group_facts
from sojourn.metrics.compute.startup import startups_of
from sojourn.metrics.compute.utilisation import token_numbers
from sojourn.ui.figures import compute, startup
from sojourn.ui.figures.group import experts, ranks
from sojourn.ui.figures.speculation import acceptance_by_position
from sojourn.ui.markup import fragments
from sojourn.ui.page import caption, draw, once, open_page, show_no_steps
from sojourn.ui.tables.compute import (
    flops_by_part,
    kernel_times,
    largest_kernels,
    points,
    token_sentences,
    tokens,
    utilisation,
)
from sojourn.ui.tables.group import collectives, expert_sentence, group_sentence
from sojourn.ui.tables.speculation import acceptance, acceptance_table, draft_sentence

run = open_page(
    "Compute",
    "How near to its measured limits the device came in each step, what the work was, and which kernels it went to.",
    "**Roofline**: a point is a step; the red line is what this device can do at most, measured by `sojourn "
    "calibrate-device`. Left of its bend memory is the bound, right of it arithmetic. A point far below the line is "
    "time that neither explains: launches, small shapes, a slow kernel. **MFU** and **MBU** count the model’s own "
    "FLOPs and bytes; on *wall time* they also hold what the device was idle. **Residual**: whether a step took longer "
    "than its composition explains is on the page Steps.",
)
if run.steps.empty:
    show_no_steps(run, "compute")
    st.stop()
if run.no_ceilings:
    st.info(run.no_ceilings, icon=":material/info:")
draw(
    "Roofline of the steps",
    once(run, "compute.roofline", lambda: compute.roofline(points(run.steps), run.ceilings, run.precision)),
    "`steps.parquet` `flops`, `bytes`, `device_ns`; ceilings: `sojourn calibrate device`. At most 4,000 steps.",
)
left, right = st.columns(2, gap="large")
table = once(run, "utilisation", lambda: utilisation(run.steps, run.ceilings, run.precision))
if run.ceilings is not None:
    with left:
        draw(
            "Utilisation",
            compute.utilisation(table),
            "Wall time has the gaps before steps, too. `steps.parquet` `flops`, `bytes`, `device_ns`; the ceilings.",
        )
with right if run.ceilings is not None else left:
    draw(
        "Work per token",
        once(run, "compute.flops_by_part", lambda: compute.flops_by_part(flops_by_part(run.steps))),
        "`steps.parquet` `flops_attention`, `flops_mlp`, `flops_head` over `new_tokens`.",
    )
with right:
    draw(
        "Tokens by kind",
        once(run, "compute.tokens_by_kind", lambda: compute.tokens_by_kind(tokens(run.requests, run.steps))),
        "`requests.parquet` `computed_tokens`, `cached_tokens`, `recomputed_tokens`, `drafted_tokens`; "
        "`steps.parquet` `padding_tokens`, `overrun_tokens`.",
    )
    if sentences := once(run, "token numbers", lambda: token_sentences(token_numbers(run.steps, run.requests))):
        caption(sentences)
if not (drafts := once(run, "acceptance", lambda: acceptance(run.steps))).empty:
    left, right = st.columns(2, gap="large")
    with left:
        draw(
            "Drafts accepted by position",
            acceptance_by_position(drafts),
            "`steps.parquet` `drafted_by_position`, `accepted_by_position`.",
        )
    with right:
        st.html(fragments.data_table(acceptance_table(drafts)))
        caption(draft_sentence(run.steps, run.requests))
if (group := group_facts(run.meta, run.steps)) is not None:
    left, right = st.columns([2, 3], gap="large")
    with left:
        draw(
            "Ranks of the parallel group",
            ranks(group),
            "`steps.parquet` `rank_busy_ns`, `rank_communication_ns`, `rank_bubble_ns`.",
        )
    with right:
        st.subheader("Exchanges between ranks", anchor=False)
        st.html(fragments.data_table(collectives(group)))
        caption(
            f"{group_sentence(group)} `steps.parquet` `exchanged_bytes`, `exchange_ns`, `exchange_hidden_ns` of rank "
            "0; links: `run.json`."
        )
if (tokens_by_expert := experts(run.steps)) is not None:
    draw(
        "Tokens by expert",
        tokens_by_expert,
        f"{expert_sentence(run.steps)} `steps.parquet` `expert_tokens`, `expert_imbalance_percent`.",
    )
if run.kernels.empty:
    caption("No profile burst was taken in this run: `POST /debug/profile` takes one.")
else:
    draw(
        "Kernels by class",
        compute.kernels_by_class(kernel_times(run.kernels)),
        "The classes sum to the wall time of the profile bursts. `kernels.parquet`.",
    )
largest = largest_kernels(run.kernels)
if not largest.empty:
    st.html(fragments.data_table(largest))
    caption("The kernels that took most of the bursts’ time. `kernels.parquet`.")
draw(
    "The machine",
    once(run, "compute.machine", lambda: compute.machine(run.system, run.begin_ns)),
    "One sample per second; a sensor that this machine lacks is not drawn. `system.parquet`.",
)
draw(
    "Starts of the core",
    startup.startups(startups_of(run.meta)),
    "The phases of each start sum to it. A spare process that takes the place of a core that died had its imports "
    "before. `run.json` `startups`.",
)
