"""Diagnose: each symptom with its lifecycle, its cause, what proves it, and what to change."""

import streamlit as st

from sojourn.diagnosis.verdict import without_finding
from sojourn.ui.markup import fragments
from sojourn.ui.page import caption, open_page, show_finding
from sojourn.ui.text import markdown

run = open_page(
    "Diagnose",
    "Which symptoms this run shows, which lifecycle and cause explain them, what would prove it, and what to change.",
    "Each card reads from left to right: the **symptom**, the **lifecycle** that is responsible, the **object** in "
    "it, and the **cause**. A cause is *capacity* (more hardware or less load), *policy* (a setting), the *workload*, "
    "the *client*, or a *fault*. Evidence speaks for (**+**) or against (**−**) the cause; each fact names "
    "the table it came from. The probe is the cheapest measurement that tells the cause from its nearest rival, with "
    "the outcome that each of them predicts. All six symptoms are checked below, also those that do not show.",
    is_whole=True,
)
st.html(fragments.headline(run))
diagnosis = run.diagnosis
if diagnosis is None:
    st.stop()
st.subheader("Findings", anchor=False)
if not diagnosis.findings:
    st.markdown(without_finding(diagnosis))
for place, found in enumerate(diagnosis.findings):
    if found.role == "cause":
        show_finding(run, place, key=f"links-{place}")
    else:
        with st.expander(f"Or else: {markdown(found.cause)}", icon=":material/alt_route:"):
            show_finding(run, place, key=f"links-{place}")
if diagnosis.findings:
    caption("Most important first; each fact names the table and columns it came from. `diagnosis.json` findings.")
st.subheader("The six symptoms", anchor=False)
st.html(fragments.checks(diagnosis.checks))
caption("`diagnosis.json` checks. The last two need a second run: `sojourn diagnose RUN --against RUN`.")
if diagnosis.devices:
    st.subheader("Devices, by their sensors", anchor=False)
    st.html(fragments.lines(diagnosis.devices))
    caption("`sensors.parquet`, while requests were in flight.")
if diagnosis.warnings:
    st.subheader("What limits this diagnosis", anchor=False)
    st.html(fragments.warnings(diagnosis))
    caption("`diagnosis.json` warnings.")
