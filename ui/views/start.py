"""Start: a scenario as a process of the app, its progress, and a link to its run."""

import shlex
import time

import streamlit as st

from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import meanings
from sojourn.ui.address import named
from sojourn.ui.page import stop_with, style
from sojourn.ui.scenario_process import Launcher, Started, bundled, command_of, why_not
from sojourn.ui.text import markdown

OURS, RUNNING = "Sojourn's engine", "a server that runs already"


@st.cache_resource
def launcher() -> Launcher:
    """One for all who look at the app: scenarios would disturb each other."""
    return Launcher()


def start(command: list[str], run) -> None:
    try:
        launcher().start(command, run)
    except InputError as error:
        st.session_state.start_refused = str(error)


def choose() -> None:
    scenarios = bundled()
    named("scenario", scenarios, "scenario")
    left, right = st.columns(2, gap="large")
    with left:
        scenario = st.selectbox("Scenario", list(scenarios), key="scenario", bind="query-params")
        st.caption(markdown(scenarios[scenario]))
        name = st.text_input(
            "Name of the run", f"{scenario}-{time.strftime('%Y%m%d-%H%M%S')}", key=f"name-{scenario}"
        )  # fmt: skip
        seed = st.number_input("Seed", min_value=0, value=None, step=1, placeholder="of the scenario", key="seed")
    with right:
        has_engine = not why_not("run")
        where = st.radio("Against", [OURS, RUNNING], index=0 if has_engine else 1, horizontal=True, key="against")
        url = settings = ""
        if where == RUNNING:
            url = st.text_input("Address", placeholder="http://127.0.0.1:8000", key="url").strip()
            st.caption("The key of the server comes from the environment variable `SOJOURN_API_KEY` of the app.")
        model = st.text_input("Model", placeholder="of the scenario, or the server's first one", key="model").strip()
        if where == OURS:
            settings = st.text_area("Engine settings", placeholder="max_num_seqs=16", key="settings", height=90,
                                    help="KEY=VALUE, one per line")  # fmt: skip
    verb = "load" if where == RUNNING else "run"
    if reason := why_not(verb):
        st.warning(reason, icon=":material/extension_off:")
        return
    if where == RUNNING and not url:
        st.button("Start", icon=":material/play_arrow:", disabled=True, help="give the address of the server")
        return
    run = st.session_state.runs_folder / name.strip()
    try:
        command = command_of(scenario, run, base_url=url, model=model, settings=settings or "", seed=seed)
    except InputError as error:
        st.warning(markdown(f"{error}."), icon=":material/warning:")
        return
    st.code(shlex.join(["sojourn", *command[3:]]), language=None, wrap_lines=True)
    st.button("Start", type="primary", icon=":material/play_arrow:", on_click=start, args=(command, run), key="start")
    if refused := st.session_state.pop("start_refused", ""):
        st.warning(markdown(f"{refused}."), icon=":material/warning:")


def show(started: Started) -> None:
    code = started.exit_code
    done, total = started.requests()
    running = "stopping" if started.is_stopping else started.stage()
    words = f"{markdown(started.run.name)}: {running}" if code is None else markdown(started.run.name)
    st.subheader(words, anchor=False)
    if code is None:
        share = done / total if total else 0.0
        st.progress(share, f"{done:,} of {total:,} requests ended, {started.seconds:,.0f} s" if total
                    else f"{started.seconds:,.0f} s")  # fmt: skip
        st.button("Stop", icon=":material/stop:", on_click=started.stop, disabled=started.is_stopping, key="stop",
                  help="ends the load and its server; what was recorded stays")  # fmt: skip
    else:
        sentence = f"It has ended with exit code {code}: {meanings('load').get(code, 'see its last line')}."
        (st.success if code == 0 else st.warning)(f"{sentence} It took {started.seconds:,.0f} s.")
    st.code("\n".join(started.lines()) or "…", language=None)
    if code is not None and (started.run / "run.json").exists():
        with st.container(horizontal=True):
            for page, icon in (("overview", "speed"), ("diagnose", "troubleshoot"), ("compare", "compare_arrows")):
                st.page_link(f"views/{page}.py", label=f"Open its {page} page", icon=f":material/{icon}:",
                             query_params={"run": started.run.name})  # fmt: skip


@st.fragment(run_every=1.0)
def follow(started: Started) -> None:
    """Each second until it has ended; then the whole page once more, so that another one can be started."""
    if started.exit_code is not None:
        st.rerun()
    show(started)


style()
st.title("Start", anchor=False)
st.markdown("Run a scenario from here: against Sojourn's own engine, or against a server that runs already.")
if st.session_state.get("is_read_only"):
    stop_with("This app starts no scenario: it was started with `sojourn ui --read-only`.", "lock")
with st.expander("How to read this page"):
    st.markdown(
        "The app starts the command that is shown as a process on this machine. Its run appears in this folder. One "
        "scenario runs at a time, since two would disturb each other. A run goes on while you look at other pages, and "
        "stops with the app. The app takes a part of the CPU: on a small machine leave its pages alone meanwhile."
    )
latest = launcher().latest
if launcher().is_busy:
    follow(latest)
else:
    if latest is not None:
        show(latest)
    choose()
