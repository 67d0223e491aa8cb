"""The app: choose a run at the left, read it on its pages. Start it with `sojourn ui`."""

import argparse
from pathlib import Path

import streamlit as st

from sojourn.metrics.errors import RunDataError
from sojourn.ui import address, filter_bar
from sojourn.ui.filters import PARAMETERS
from sojourn.ui.launch import OF_ALL_RUNS, OF_NO_RUN, PAGES, unfilled_pages
from sojourn.ui.run_list import first_name, note_of, run_names
from sojourn.ui.text import markdown


def _address() -> None:
    """Names the chosen run in the address, also where it is the first: a copied address must not depend on that."""
    st.query_params["run"] = st.session_state.run


def _other_run() -> None:
    """A filter and a request are of one run."""
    if st.session_state.run is None:  # the list was emptied: the address still has a run
        return
    for name in (*PARAMETERS, "request"):
        st.query_params.pop(name, None)
    _address()


def _show(name: str) -> None:
    st.session_state.run = name
    _other_run()


def choose_run(runs: Path, first: str | None) -> None:
    """Keeps the chosen run's folder as `run_path`, or says as `no_run` why there is none. `?run=NAME` chooses, too; a
    name that is not there chooses none, on every page until the reader does."""
    names = run_names(runs)
    st.session_state.runs_folder, st.session_state.run_path = runs, None
    if not names:
        st.session_state.no_run = (
            f"There is no run in {markdown(runs)}. Record one with `sojourn run demo`, or name another folder: "
            "`sojourn ui --runs FOLDER`."
        )
        return
    asked = st.query_params.get("run", st.session_state.get("unknown_run"))
    kept = [name for name in (asked, st.session_state.get("run"), first, first_name(runs)) if name in names]
    unknown = st.session_state.unknown_run = asked if asked is not None and asked not in names else None
    st.session_state.run = None if unknown else kept[0]
    with st.sidebar:
        name = st.selectbox(
            "Run", names, index=None if unknown else 0, key="run", on_change=_other_run, placeholder="choose a run",
            help=f"folders in {markdown(runs)}",
        )  # fmt: skip
        count = sum("/" not in name for name in names)  # a fleet's servers are part of its run
        st.caption(f"{count} run{'s' if count > 1 else ''} in {markdown(runs.resolve().name)}/")
        if name is not None and (note := note_of(runs, name)):
            st.caption(f"{markdown(note[0].upper() + note[1:])}.")
        if name is not None and "/" in name:
            fleet = name.partition("/")[0]
            st.caption("One server of a fleet: what routing does shows in the run of all servers.")
            st.button(f"Show {markdown(fleet)}", icon=":material/hub:", on_click=_show, args=(fleet,))
    if unknown:
        st.query_params["run"] = unknown
        st.session_state.no_run = (
            f"There is no run {markdown(unknown)} in {markdown(runs.resolve().name)}/. Choose one at the left."
        )
        return
    _address()
    st.session_state.run_path = runs / name


folder = Path(__file__).parent
st.set_page_config(page_title="Sojourn", page_icon=str(folder / "icon.svg"), layout="wide")
st.logo(str(folder / ("logo-dark.svg" if st.context.theme.type == "dark" else "logo.svg")), size="large")
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder whose folders are runs")
parser.add_argument("--run", default=None, help="name of the run to show first")
parser.add_argument("--read-only", action="store_true", help="start no scenario from the app")
parser.add_argument("--prometheus", default=None, help="address of a Prometheus: adds the page Dashboards")
parser.add_argument("--boards", type=Path, default=None, help="folder of Grafana's dashboards that it draws")
options = parser.parse_args()
st.session_state.is_read_only = options.read_only
st.session_state.prometheus, st.session_state.boards = options.prometheus, options.boards
choose_run(options.runs, options.run)
# In "views", not "pages": Streamlit would serve a folder of that name by itself, past this file, to a deep link.
sections: dict[str, list[st.Page]] = {"Now": [], "This run": [], "All runs": []}
hidden = unfilled_pages(st.session_state.run_path)
for name, icon in PAGES.items():
    section = "Now" if name in OF_NO_RUN else "All runs" if name in OF_ALL_RUNS else "This run"
    sections[section].append(st.Page(
        folder / "views" / f"{name}.py", title=name.capitalize(), icon=f":material/{icon}:", url_path=name,
        default=name == "overview", visibility="hidden" if name in hidden else "visible",
    ))  # fmt: skip
if options.prometheus is not None:
    place = folder / "views" / "dashboards.py"
    sections["Servers"] = [st.Page(place, title="Dashboards", icon=":material/monitoring:", url_path="dashboards")]
page = st.navigation(sections, expanded=True)
filter_bar.carry(page.url_path)
address.check_names()
if st.session_state.get("unknown_run"):
    st.warning(st.session_state.no_run, icon=":material/link_off:")
    if page.url_path not in (*OF_NO_RUN, *OF_ALL_RUNS, "dashboards") or page.url_path == "compare":
        st.stop()
try:
    page.run()
except RunDataError as error:  # of a table that is read when a page asks for it
    st.error(markdown(error), icon=":material/error:")
