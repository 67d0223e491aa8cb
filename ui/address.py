"""What the address of a page names. A link to what is not there says so, and shows nothing in its place."""

from collections.abc import Iterable
from typing import NoReturn

import pandas as pd
import streamlit as st

from sojourn.ui.filters import PARAMETERS, unknown_values
from sojourn.ui.run_data import RunData
from sojourn.ui.text import markdown

# What pages keep in the address beside the run and its filter. Each page judges the values of its own.
OF_PAGES = (
    "board", "force", "lifecycle", "object", "order", "range", "request", "rows", "scenario", "search", "shown",
    "slo", "sort", "swapped", "sweep", "symptom", "trait", "url", "with",
)  # fmt: skip
MOST_OFFERED = 12  # names that a sentence lists


def refuse(sentence: str, *parameters: str) -> NoReturn:
    """Ends a page with why its link cannot be followed, and a button that takes the parameters away."""
    st.warning(sentence, icon=":material/link_off:")
    words = "Leave this out of the link" if len(parameters) == 1 else "Leave these out of the link"
    st.button(words, key="leave-out", on_click=_leave_out, args=parameters)
    st.stop()


def _leave_out(*parameters: str) -> None:
    for name in parameters:
        st.query_params.pop(name, None)
        st.session_state.pop(name, None)


def check_names() -> None:
    """Ends the page where its address has a parameter that no page knows: a filter that is spelled wrongly would show
    the figures of the whole run."""
    unknown = [name for name in st.query_params if name not in ("run", *PARAMETERS, *OF_PAGES) and name[:4] != "var-"]
    if unknown:
        names = ", ".join(map(markdown, unknown))
        refuse(f"This link names {names}, which no page knows. Filters are {', '.join(PARAMETERS)}.", *unknown)


def named(parameter: str, known: Iterable[object], what: str) -> str | None:
    """The value that the address gives to a parameter, or None. Ends the page where it is none of those `known`."""
    value, names = st.query_params.get(parameter), list(map(str, known))
    if value is not None and value not in names:
        offered = f"; there are {', '.join(map(markdown, names))}" if 0 < len(names) <= MOST_OFFERED else ""
        refuse(f"There is no {what} {markdown(value)} here{offered}.", parameter)
    return value


def refuse_unknown(run: RunData) -> None:
    """Ends the page where its filter names what the run does not have."""
    rows = run.requests if run.extremes is None else pd.concat([run.requests, run.extremes])
    found = unknown_values(st.query_params.to_dict(), rows, "the sample" if run.is_sample else "this run")
    if found:
        refuse(" ".join(map(markdown, found.values())), *found)
