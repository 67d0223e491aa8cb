"""What every page of the app shares: the chosen run, read once, and the head of a page."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn, TypeVar

import plotly.graph_objects as go
import streamlit as st

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.server_alone import MARK
from sojourn.ui import address, filter_bar, links
from sojourn.ui.drawings import Drawing
from sojourn.ui.figures import predictions
from sojourn.ui.filters import RunFilter
from sojourn.ui.markup import confidence, fragments
from sojourn.ui.narrowed import narrowed
from sojourn.ui.run_data import RunData, fingerprint, load
from sojourn.ui.text import markdown, split_source
from sojourn.ui.theme import CONFIG, DARK_CSS, in_the_dark

Made = TypeVar("Made")
OF_A_SERVER = "This run is a fleet, and steps are of one server. Open the run of a server:"
NO_STEPS = "The server recorded no step: a foreign server, one without a run directory, or with telemetry=off."


@st.cache_resource(max_entries=4, show_spinner="Reading the run …")  # shared, not copied: nobody may change it
def read(path: str, stamps: tuple[tuple[str, int, int], ...]) -> RunData:
    """A run as it was when its files had these `stamps`."""
    return load(path)


@st.cache_resource(max_entries=8)
def make_ready_beside(key: str, _run: RunData) -> None:
    """Makes what takes long of the chosen run while its first page is read, once."""
    Thread(target=_make_ready, args=(_run,), daemon=True).start()


def _make_ready(run: RunData) -> None:
    with suppress(RunDataError):  # the page that needs it says so
        run.open_steps()
        run.open_book()


@st.cache_resource(max_entries=8, show_spinner="Filtering …")
def _narrowed(key: str, query: tuple[tuple[str, str], ...], _run: RunData) -> RunData:
    return narrowed(_run, RunFilter.of(dict(query)))


def once(run: RunData, name: str, make: Callable[[], Made]) -> Made:
    """What `make` draws or computes of a run, made once for the state of its files, its filter and the theme."""
    return _once(run.key, name, is_dark(), make)


@st.cache_resource(max_entries=160, show_spinner="Drawing …")
def _once(key: str, name: str, is_dark: bool, _make: Callable[[], Any]) -> Any:
    return in_theme(_make(), is_dark)


def style() -> None:
    """The look of all fragments, on light or dark paper."""
    st.html(fragments.CSS_FILE)
    if is_dark():
        st.html(f"<style>{DARK_CSS}</style>")


def is_dark() -> bool:
    return st.context.theme.type == "dark"


def open_page(
    title: str, shows: str, reading: str, *, has_steps: bool = False, is_whole: bool = False, may_be_empty: bool = False
) -> RunData:  # fmt: skip
    """Draws the head of a page and returns the chosen run as the filter leaves it; ends the page with a sentence where
    there is none. With `is_whole` the page is about the whole run, and only its links follow the filter. One that
    `may_be_empty` also shows runs without requests and steps."""
    style()
    st.title(title, anchor=False)
    st.markdown(shows)
    with st.expander("How to read this page"):
        st.markdown(reading)
    path: Path | None = st.session_state.get("run_path")
    if path is None:
        stop_with(st.session_state.get("no_run", "No run is chosen."), "folder_off")
    try:
        run = read(str(path), fingerprint(path))
    except RunDataError as error:
        st.error(markdown(error), icon=":material/error:")
        st.stop()
    make_ready_beside(run.key, run)
    st.html(fragments.about(run))
    if run.server_alone:
        st.info(f"{MARK[0].upper()}{MARK[1:]}.", icon=":material/dns:")
    if run.sampled_of:
        st.info(of_a_sample(run), icon=":material/query_stats:")
    if run.recording:
        st.info(
            "This run is still being recorded, or was cut short: the tables are shown up to the last whole second. "
            "Press R to read it again.",
            icon=":material/hourglass_top:",
        )
    if run.requests.empty and run.steps.empty:
        if may_be_empty:
            return run
        stop_with(f"The run {markdown(run.name)} has recorded no request and no step yet.", "hourglass_empty")
    address.refuse_unknown(run)
    chosen = filter_bar.chosen_filter()
    if not chosen.labels():
        filter_bar.show(run, run, chosen)
        return run
    passed = _narrowed(run.key, tuple(sorted(chosen.query().items())), run)
    filter_bar.show(run, passed, chosen, has_steps=has_steps)
    if is_whole:
        st.caption("A diagnosis is of all requests of a run: this page does not follow the filter.")
        return run
    if passed.requests.empty and passed.steps.empty:
        stop_with("Nothing passes the filter.", "filter_alt_off")
    return passed


def of_a_sample(run: RunData) -> str:
    if not run.is_sample:
        return "This run has many steps. Figures of steps are of a sample of them, and of the longest ones."
    return (
        f"This run has {run.sampled_of:,} requests. Figures are of a sample of {run.sent:,} of them, and of a sample "
        "of its steps. The verdict, the goodput and the quantiles are of all requests, and so are the slowest requests."
    )


def stop_with(sentence: str, icon: str) -> NoReturn:
    """Ends a page with a sentence in place of what it cannot show."""
    st.info(sentence, icon=f":material/{icon}:")
    st.stop()


def show_no_steps(run: RunData, page: str) -> None:
    """Why there are no steps; of a fleet, links to the same page of each server."""
    if run.fleet is None:
        st.info(NO_STEPS, icon=":material/info:")
        return
    st.info(OF_A_SERVER, icon=":material/hub:")
    links.show(links.servers(run, page), key="servers")


def in_theme(made: Any, dark: bool) -> Any:
    """Figures, drawings and lists of them in the reader's theme; anything else as it is."""
    if not dark:
        return made
    if isinstance(made, go.Figure):
        return made if made.layout.meta == "dark" else in_the_dark(made)
    if isinstance(made, Drawing):
        return made._replace(figure=in_theme(made.figure, dark))
    if isinstance(made, list):
        return [in_theme(each, dark) for each in made]
    return {name: in_theme(each, dark) for name, each in made.items()} if type(made) is dict else made


def draw(title: str, figure: go.Figure, text: str) -> None:
    """A figure below its title; `text` says how to read it, and from which tables and columns it was made."""
    if title:
        st.subheader(title, anchor=False)
    st.plotly_chart(in_theme(figure, is_dark()), theme=None, config=CONFIG, key=title or text)
    caption(text)


def caption(text: str) -> None:
    """Small words below a figure or a table; the files and columns in them are behind a mark."""
    words, source = split_source(text)
    st.caption(f"{words} source".strip() if source else words, help=source or None)


def show_finding(run: RunData, place: int, key: str) -> None:
    """A finding as a card, how sure it is, what its fix is predicted to give, and links to what shows it."""
    found = run.diagnosis.findings[place]
    st.html(fragments.finding(place + 1, found))
    if found.prediction is not None:
        left, right = st.columns([3, 2], gap="large", vertical_alignment="center")
        with left:
            draw(
                "",
                predictions.now_fix_rival(run.diagnosis, found),
                f"`diagnosis.json` finding {place + 1}: `prediction`, `rival_prediction`; lines are 80% intervals.",
            )
        right.html(confidence.sentence(run.diagnosis, found))
    else:
        st.html(confidence.sentence(run.diagnosis, found))
    links.show(links.links_of(run, found), key=key)


def draw_all(drawings: list[Drawing]) -> None:
    """One below the other, the last two side by side."""
    for drawing in drawings[:-2]:
        draw(*drawing)
    for column, drawing in zip(st.columns(2, gap="large"), drawings[-2:], strict=True):
        with column:
            draw(*drawing)
