"""Symptoms: from a complaint in a user's words over lifecycles and objects to the finding and the next measurement."""

import streamlit as st
from streamlit.components import v1 as components

from sojourn.diagnosis.symptom_tree.complaints import BY_SYMPTOM, COMPLAINTS
from sojourn.diagnosis.symptom_tree.tree import LifecycleBranch, ObjectBranch
from sojourn.ui.address import named
from sojourn.ui.markup import fragments, symptoms
from sojourn.ui.page import open_page, show_finding
from sojourn.ui.symptom_trees import trees_of

run = open_page(
    "Symptoms",
    "Start from what you see. Three clicks lead to the cause in this run, and to the measurement that proves it.",
    "Choose a complaint, then a lifecycle, then an object. A **bar** is the lifecycle’s share of the time that the "
    "complaint is about, by account. **Leads here**: the diagnosis names a cause in it. **Not ruled out**: time goes "
    "there, and no finding is in it. **Ruled out**: the number beside it excludes it. **Cannot be known**: the "
    "evidence that is missing stands beside it. The address holds what you chose, so a link shows the same.",
    is_whole=True,
)


def choose(**parameters: str) -> None:
    """Keeps a choice in the address, and forgets what depended on an earlier one."""
    for name in ("symptom", "lifecycle", "object"):
        st.query_params.pop(name, None)
    st.query_params.update({name: value for name, value in parameters.items() if value})
    st.session_state.was_clicked = True


def heading(words: str, part: str, is_last: bool) -> None:
    """Of a part that a click opens. The last one comes into view, since it may stand below the window."""
    with st.container(key=part):
        st.subheader(words, anchor=False)
    if is_last and st.session_state.pop("was_clicked", False):
        components.html(
            f"<script>parent.document.querySelector('.st-key-{part}')"
            "?.scrollIntoView({block: 'start', behavior: 'smooth'});</script>",
            height=1,
        )


def draw_complaints(chosen: str | None) -> None:
    st.subheader("1 · What do you see?", anchor=False)
    checks = {each.symptom: each for each in run.diagnosis.checks}
    for start in (0, 3):
        for column, complaint in zip(st.columns(3), COMPLAINTS[start : start + 3], strict=True):
            with column:
                st.button(
                    complaint.words, key=f"complaint-{complaint.symptom}", width="stretch", help=complaint.title,
                    type="primary" if complaint.symptom == chosen else "secondary", on_click=choose,
                    kwargs={"symptom": complaint.symptom},
                )  # fmt: skip
                check = checks[complaint.symptom]
                st.html(symptoms.shows(check.status, check.reason))


def draw_lifecycles(symptom: str, branches: list[LifecycleBranch], chosen: str | None) -> None:
    for branch in branches:
        left, right = st.columns([5, 1], vertical_alignment="center")
        left.html(symptoms.lifecycle(branch, branch.lifecycle == chosen))
        right.button(
            "Look here", key=f"lifecycle-{branch.lifecycle}", width="stretch", on_click=choose,
            type="primary" if branch.lifecycle == chosen else "secondary",
            kwargs={"symptom": symptom, "lifecycle": branch.lifecycle},
        )  # fmt: skip


def draw_objects(symptom: str, branch: LifecycleBranch, chosen: str | None) -> None:
    heading(f"3 · Which object in {branch.lifecycle}?", "step-objects", is_last=chosen is None)
    open_ = [each for each in branch.objects if each.status in ("leads_here", "possible") or each.key == chosen]
    for each in open_:
        left, right = st.columns([5, 1], vertical_alignment="center")
        left.html(symptoms.thing(each, branch.lifecycle, each.key == chosen))
        right.button(
            "Finding" if each.finding is not None else "Details", key=f"object-{each.key}",
            width="stretch", on_click=choose, type="primary" if each.key == chosen else "secondary",
            kwargs={"symptom": symptom, "lifecycle": branch.lifecycle, "object": each.key},
        )  # fmt: skip
    if rest := [each for each in branch.objects if each not in open_]:
        unknown = sum(each.status == "unknown" for each in rest)
        counts = [f"{count} {words}" for count, words in
                  ((len(rest) - unknown, "ruled out"), (unknown, "cannot be known")) if count]  # fmt: skip
        with st.expander(f"Other objects: {', '.join(counts)}", expanded=not open_):
            st.html(symptoms.listed(rest))


def draw_end(each: ObjectBranch) -> None:
    if each.finding is None:
        heading(f"Where to look: {each.name}", "step-end", is_last=True)
        st.html(symptoms.wrap(symptoms.measure(each.measurement, each.command)))
        st.caption("No finding of this run is in this object, so no request or step can be named.")
        return
    heading("The finding", "step-end", is_last=True)
    show_finding(run, each.finding, key="links")


st.html(fragments.headline(run))
if run.diagnosis is None:
    st.stop()
symptom = named("symptom", BY_SYMPTOM, "symptom")
draw_complaints(symptom)
if symptom is None:
    st.stop()
tree = trees_of(run)[symptom]
lifecycle = named("lifecycle", [branch.lifecycle for branch in tree.branches], "lifecycle")
heading("2 · Which lifecycle?", "step-lifecycles", is_last=lifecycle is None)
st.caption(f"The bars are shares of {tree.basis}.")
draw_lifecycles(symptom, tree.branches, lifecycle)
if lifecycle is None:
    st.stop()
branch = next(each for each in tree.branches if each.lifecycle == lifecycle)
thing = named("object", [each.key for each in branch.objects], "object")
draw_objects(symptom, branch, thing)
if thing is not None:
    draw_end(next(each for each in branch.objects if each.key == thing))
elif tree.next_measurement:
    st.subheader("The measurement to make next", anchor=False)
    st.html(symptoms.next_measurement(tree))
