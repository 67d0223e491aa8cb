"""Dashboards: the panels of Grafana's dashboards, drawn here from the same Prometheus and the same queries."""

import math

import streamlit as st

from sojourn.metrics.errors import SojournError
from sojourn.ui.address import named, refuse
from sojourn.ui.figures.panels import panel_figure, unit_of, written
from sojourn.ui.page import is_dark, stop_with, style
from sojourn.ui.panel_source import Choices, PanelSource, read_boards, variables
from sojourn.ui.text import markdown
from sojourn.ui.theme import CONFIG, in_the_dark

REFRESH_SECONDS = 5
RANGES = {"5 minutes": 300, "15 minutes": 900, "1 hour": 3600, "6 hours": 21_600, "1 day": 86_400}
FIRST = "sojourn-saturation"
LABELS = {"job": "Job", "model_name": "Model", "instance": "Server", "klass": "Class", "tenant": "Tenant"}


def keep() -> None:
    """Writes the choices into the address, so that a link shows the same."""
    st.query_params["board"] = st.session_state.board
    st.query_params["range"] = st.session_state.shown_range
    for name in LABELS:
        st.query_params[f"var-{name}"] = st.session_state.get(f"var-{name}", [])


def open_board(uid: str) -> None:
    """Another dashboard with the same variables and time."""
    st.session_state.board = uid
    keep()


def choose(source: PanelSource, board: dict) -> Choices:
    """The controls in a line above the panels."""
    st.session_state.setdefault("shown_range", st.query_params.get("range", "5 minutes"))
    if st.session_state.shown_range not in RANGES:
        st.session_state.shown_range = "5 minutes"
    names = variables(board)
    columns = st.columns([2, *([2] * len(names))])
    columns[0].selectbox("Time shown", list(RANGES), key="shown_range", on_change=keep)
    choices = Choices(RANGES[st.session_state.shown_range])
    for column, name in zip(columns[1:], names, strict=True):
        key = f"var-{name}"
        known = source.label_values(board, name, choices)
        asked = st.session_state.get(key, st.query_params.get_all(key))
        if key not in st.session_state and (missing := [value for value in asked if value not in known]):
            refuse(f"There is no {LABELS.get(name, name).lower()} {markdown(', '.join(missing))} here.", key)
        st.session_state[key] = [value for value in asked if value in known]
        column.multiselect(LABELS.get(name, name), known, key=key, on_change=keep, placeholder="all")
        choices.values[name] = tuple(st.session_state[key])
    return choices


def show_alerts(source: PanelSource) -> None:
    firing = [alert for alert in source.alerts() if alert["state"] == "firing"]
    for alert in firing:
        told = alert["annotations"]
        words = f"**{alert['labels']['alertname']}**: {markdown(told['summary'])}"
        if told.get("runbook_url", "").startswith("http"):
            words += f" · [symptom]({told['runbook_url']})"
        (st.error if alert["labels"].get("severity") == "critical" else st.warning)(words, icon=":material/alarm:")
    if not firing:
        st.caption(":material/check: No alert is firing.")


def show_number(panel: dict, lines: list) -> None:
    if not lines:
        st.metric(panel["title"], "no data", help=panel["description"], label_visibility="collapsed")
    for line in lines:
        last = next((value for value in reversed(line.values) if not math.isnan(value)), math.nan)
        st.metric(line.name, written(last, unit_of(panel)))


def show_panel(source: PanelSource, panel: dict, choices: Choices, key: str, events: list) -> None:
    """Its title with its words behind a mark, its picture, and where it leads."""
    title, link = st.columns([5, 1], vertical_alignment="center", gap="small")
    title.markdown(f"**{markdown(panel['title'])}**", help=panel["description"])
    for each in panel.get("links", ()):
        uid = each["url"].removeprefix("/d/").partition("?")[0]
        link.button(
            "", icon=":material/arrow_forward:", key=f"open-{key}", help=f"Open {uid}", type="tertiary",
            on_click=open_board, args=(uid,),
        )  # fmt: skip
    lines = source.lines(panel, choices)
    if panel["type"] == "stat":
        show_number(panel, lines)
    elif any(math.isfinite(value) for line in lines for value in line.values):
        figure = panel_figure(panel, lines, events)
        st.plotly_chart(in_the_dark(figure) if is_dark() else figure, theme=None, config=CONFIG, key=f"panel-{key}")
    else:
        st.caption(panel["fieldConfig"]["defaults"].get("noValue", "no data"))


def show_line(source: PanelSource, panels: list[dict], choices: Choices, events: list) -> None:
    """Panels side by side; a repeated one once for each server."""
    for panel in [each for each in panels if each.get("repeat")]:
        servers = choices.values["instance"] or tuple(
            source.label_values(boards[st.session_state.board], "instance", choices)
        )
        for column, server in zip(st.columns(max(1, len(servers))), servers, strict=True):
            with column:
                one = Choices(choices.range_s, choices.values | {"instance": (server,)})
                titled = panel | {"title": panel["title"].replace("$instance", server)}
                show_panel(source, titled, one, f"{panel['id']}-{server}", events)
    plain = [each for each in panels if not each.get("repeat")]
    if plain:
        for column, panel in zip(st.columns([each["gridPos"]["w"] for each in plain]), plain, strict=True):
            with column:
                show_panel(source, panel, choices, str(panel["id"]), events)


@st.fragment(run_every=REFRESH_SECONDS)
def show(board: dict, choices: Choices) -> None:
    """All panels, drawn anew every few seconds."""
    try:
        source = PanelSource(st.session_state.prometheus)
        show_alerts(source)
        events = source.events(board, choices)
        lines: list[list[dict]] = []
        for panel in board["panels"]:
            if panel["type"] == "row":
                if lines:
                    show_line(source, lines.pop(), choices, events)
                st.subheader(panel["title"], anchor=False)
            elif lines and lines[-1][0]["gridPos"]["y"] == panel["gridPos"]["y"]:
                lines[-1].append(panel)
            else:
                if lines:
                    show_line(source, lines.pop(), choices, events)
                lines.append([panel])
        if lines:
            show_line(source, lines.pop(), choices, events)
    except SojournError as error:
        st.error(markdown(error), icon=":material/error:")


style()
st.title("Dashboards", anchor=False)
st.markdown(
    f"The panels of Grafana’s dashboards, from the Prometheus at {markdown(st.session_state.prometheus)}. "
    "The arrow beside a title opens the dashboard with more detail, with the same choices."
)
try:
    boards = read_boards(st.session_state.boards)
    if not boards:
        stop_with(f"There is no dashboard in {markdown(st.session_state.boards)}.", "folder_off")
    named("range", RANGES, "time")
    asked = st.session_state.get("board", named("board", boards, "dashboard") or FIRST)
    st.session_state.board = asked if asked in boards else next(iter(boards))
    order = sorted(boards, key=lambda uid: (uid not in (FIRST, "sojourn-drilldown"), uid != FIRST, uid))
    st.segmented_control(
        "Dashboard", order, key="board", format_func=lambda uid: uid.removeprefix("sojourn-").capitalize(),
        on_change=keep, label_visibility="collapsed", required=True,
    )  # fmt: skip
    board = boards[st.session_state.board]
    st.caption(board["description"])
    chosen = choose(PanelSource(st.session_state.prometheus), board)
except SojournError as error:
    st.error(markdown(error), icon=":material/error:")
    st.stop()
show(board, chosen)
