"""The filter bar: one for all pages. The address holds the filter; a page that is left hands it to the next one."""

from dataclasses import replace

import pandas as pd
import streamlit as st

from sojourn.metrics.request.objectives import OBJECTIVE_NAMES, OBJECTIVES
from sojourn.ui.filters import ANY, NO_NAME, PARAMETERS, SERVED, RunFilter
from sojourn.ui.run_data import RunData
from sojourn.ui.text import markdown

MISSED = {"": "all requests", ANY: "misses any objective", SERVED: "was not served"} | {
    name: f"misses its {OBJECTIVE_NAMES[name]}" for name in OBJECTIVES
}
COLUMNS = {"class": ("klass", "klasses"), "tenant": ("tenant", "tenants"), "status": ("status", "statuses")}
TITLES = {"class": "Class", "tenant": "Tenant", "status": "Status"}
MOST_NAMES = 1000  # of tenants, that a list offers


def carry(page: str) -> None:
    """Puts the filter of the page before into the address, where a click on another page has left it out. A filter
    that the address names replaces it, and another run begins without one."""
    asked = {name: st.query_params[name] for name in PARAMETERS if name in st.query_params}
    run, before = st.session_state.get("run"), st.session_state.get("carried")
    if not asked and before is not None and before["run"] == run and before["page"] != page:
        asked = before["filter"]
        st.query_params.update(asked)
    st.session_state.carried = {"run": run, "page": page, "filter": asked}


def chosen_filter() -> RunFilter:
    return RunFilter.of(st.query_params.to_dict())


def show(whole: RunData, run: RunData, chosen: RunFilter, *, has_steps: bool = False) -> None:
    """The bar of a page: how many requests of `whole` are in `run`, each part of the filter with a button that takes
    it away, and the choices."""
    labels = chosen.labels()
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key="filter"):
        with st.popover("Filter", icon=":material/filter_alt:", type="primary" if labels else "secondary"):
            _choices(whole, chosen)
        st.markdown(_count(run, labels, has_steps), width="content")
        for part, words in labels.items():
            st.button(
                markdown(words), key=f"without-{part}", icon=":material/close:", on_click=_keep,
                args=(chosen.without(part),), help="take this part of the filter away",
            )  # fmt: skip
        if labels:
            st.button("Clear", key="clear-filter", type="tertiary", on_click=_keep, args=(RunFilter(),))


def _count(run: RunData, labels: dict[str, str], has_steps: bool) -> str:
    if not labels:
        return f"{run.num_requests:,} requests"
    if run.is_sample:
        return f"**{len(run.requests):,} of the {run.sent:,} requests of the sample**"
    steps = f", {len(run.steps):,} of {run.count_steps():,} steps" if has_steps and run.count_steps() else ""
    return f"**{len(run.requests):,} of {run.sent:,} requests{steps}**"


def _choices(whole: RunData, chosen: RunFilter) -> None:
    """What is set here is written to the address at once. Widgets show what the address says."""
    for part, (column, field) in COLUMNS.items():
        names = whole.requests[column].fillna("").value_counts()
        held = getattr(chosen, field)
        if len(names) < 2 and not held:
            continue
        key = f"filter-{part}"
        st.session_state[key] = list(held)
        options = list(dict.fromkeys([*map(str, names.index[:MOST_NAMES]), *held]))
        st.multiselect(
            TITLES[part], options, key=key, format_func=lambda name: markdown(name or NO_NAME),
            placeholder="all", on_change=_from_widget, args=(chosen, field, key),
        )  # fmt: skip
    st.session_state["filter-missed"] = chosen.missed
    st.selectbox(
        "Objective", list(MISSED), key="filter-missed", format_func=MISSED.get, on_change=_from_widget,
        args=(chosen, "missed", "filter-missed"),
    )  # fmt: skip
    if (end := _end_s(whole)) > 0:
        low = min(max(chosen.from_s or 0.0, 0.0), end)
        st.session_state["filter-time"] = (low, min(max(end if chosen.to_s is None else chosen.to_s, low), end))
        st.slider(
            "Time since the start of the run (s)", 0.0, end, step=_step(end), key="filter-time",
            on_change=_from_slider, args=(chosen, end),
        )  # fmt: skip
    st.caption(
        "A request counts by the moment at which it was due, a step by its begin. Links from findings set a filter, "
        "too. The address keeps it."
    )


def _end_s(run: RunData) -> float:
    """The end of the run in seconds, rounded up to a step of the slider."""
    last = run.requests.due_ns.max() if len(run.requests) else run.steps.begin_ns.max()
    end = (float(last) - run.begin_ns) / 1e9 if pd.notna(last) else 0.0
    step = _step(end)
    return round((end // step + 1) * step, 3) if end > 0 else 0.0


def _step(end_s: float) -> float:
    return 0.1 if end_s <= 60 else 1.0


def _from_widget(chosen: RunFilter, field: str, key: str) -> None:
    value = st.session_state[key]
    _keep(replace(chosen, **{field: tuple(value) if isinstance(value, list) else value}))


def _from_slider(chosen: RunFilter, end: float) -> None:
    low, high = st.session_state["filter-time"]
    _keep(replace(chosen, from_s=low if low > 0 else None, to_s=high if high < end else None))


def _keep(after: RunFilter) -> None:
    for name in PARAMETERS:
        st.query_params.pop(name, None)
    st.query_params.update(after.query())
