"""The preview draws a panel from what Prometheus answers, with Grafana's variables filled in as Grafana does."""

import json
import math

import pandas as pd
import pytest

from sojourn.dashboards.build import contents
from sojourn.ui.figures.panels import panel_figure, written
from sojourn.ui.figures.spans import parts_of_requests
from sojourn.ui.panel_source import Choices, Line, PanelSource, read_boards, variables

BOARDS = {name: json.loads(text) for name, text in contents().items() if name.endswith(".json")}
SATURATION = BOARDS["sojourn-saturation.json"]


def panel(title: str, board: dict = SATURATION) -> dict:
    return next(each for each in board["panels"] if each["title"] == title)


def test_all_values_of_a_variable_are_any_value():
    assert Choices(300).filled('x{job=~"$job"}', 5) == 'x{job=~".+"}'


def test_chosen_values_are_a_pattern_that_matches_only_them():
    choices = Choices(300, {"instance": ("127.0.0.1:8000", "b")})
    assert choices.filled('x{instance=~"$instance"}', 5) == 'x{instance=~"127\\\\.0\\\\.0\\\\.1:8000|b"}'


@pytest.mark.parametrize(("range_s", "scrape_s", "expected"), [(300, 5, "20s"), (86_400, 5, "365s"), (300, 15, "60s")])
def test_rate_interval_holds_four_scrapes_and_a_step(range_s, scrape_s, expected):
    assert Choices(range_s).filled("[$__rate_interval]", scrape_s) == f"[{expected}]"


def test_every_expression_of_every_board_is_filled():
    for board in BOARDS.values():
        for each in board["panels"]:
            for target in each.get("targets", ()):
                assert "$" not in Choices(300).filled(target["expr"], 5)


def test_boards_are_read_with_their_variables(tmp_path):
    for name, text in contents().items():
        (tmp_path / name).write_text(text)
    boards = read_boards(tmp_path)
    assert set(boards) == {board["uid"] for board in BOARDS.values()}
    assert variables(boards["sojourn-saturation"]) == ["job", "model_name", "instance", "klass", "tenant"]


def line(name: str, values: list[float], **labels: str) -> Line:
    return Line(name, {"refId": "A"} | labels, [10.0 * place for place in range(len(values))], values)


def test_objective_is_dashed_and_series_without_a_figure_are_left_out():
    lines = [
        line("a", [0.1, 0.2]), line("b", [math.nan, math.nan]), Line("objective", {"refId": "B"}, [0, 10], [0.5, 0.5])
    ]  # fmt: skip
    figure = panel_figure(panel("Time to first token, p90"), lines)
    assert [(trace.name, trace.line.dash) for trace in figure.data] == [("a", "solid"), ("objective", "dash")]
    assert figure.layout.yaxis.ticksuffix == "s"


def test_limits_are_drawn_where_the_figure_comes_near():
    far, near = (panel_figure(panel("KV cache in use"), [line("a", [value])]) for value in (0.1, 0.8))
    assert len(far.layout.shapes) == 0 and len(near.layout.shapes) == 2


def test_stacked_panel_is_stacked():
    figure = panel_figure(panel("Tokens generated"), [line("a", [1.0]), line("b", [2.0])])
    assert {trace.stackgroup for trace in figure.data} == {"all"}


def test_an_alert_is_a_bar_while_it_fires_and_an_event_a_line_with_its_words():
    fired = line("SojournStuck (critical)", [1.0, math.nan, 1.0])
    figure = panel_figure(
        panel("Firing alerts and findings"), [fired], [(10.0, "a:1 restarted. Its counter", "#CC79A7")]
    )
    assert list(figure.data[0].y) == ["SojournStuck (critical)", None, "SojournStuck (critical)"]
    assert figure.layout.shapes[0].line.color == "#CC79A7"
    assert figure.layout.annotations[0].hovertext == "a:1 restarted. Its counter"


def test_an_event_is_told_when_it_begins(monkeypatch):
    now = 1_000_000.0
    monkeypatch.setattr("sojourn.ui.panel_source.time.time", lambda: now)
    source = object.__new__(PanelSource)
    source.scrape_s = 5.0
    step = Choices(300).step_s
    since = [now - 300 + number * step for number in range(100)]
    answers = {"ALERTS": [(second, "1") for second in [*since[:3], *since[20:23], *since[40:42]]]}

    def answer(path: str, asked: dict) -> dict:
        values = next((found for word, found in answers.items() if asked["query"].startswith(word)), [])
        series = [{"metric": {"alertname": "SojournStuck", "instance": "a:1"}, "values": values}]
        return {"result": series if values else []}

    monkeypatch.setattr(source, "_get", answer, raising=False)
    found = source.events(SATURATION, Choices(300))
    assert [second for second, _, _ in found] == [since[20], since[40]]
    assert found[0][1].startswith("SojournStuck. Fires for") and "a:1" in found[0][1]


def test_heatmap_shows_each_bucket_without_those_below():
    buckets = [line(le, [count], le=le) for le, count in (("0.1", 1.0), ("1", 4.0), ("10", 4.0), ("+Inf", 5.0))]
    title = "Inter-token latency: where the gaps lie"
    figure = panel_figure(panel(title, BOARDS["sojourn-request.json"]), buckets)
    assert list(figure.data[0].y) == [0.1, 1.0] and [row[0] for row in figure.data[0].z] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [(0.25, "s", "250 ms"), (2.0, "s", "2.00 s"), (0.5, "percentunit", "50.0%"), (3.0, "suffix: servers", "3 servers")],
)
def test_number_has_its_unit(value, unit, expected):
    assert written(value, unit) == expected


def test_bar_of_a_request_is_as_long_as_its_latency_and_unseen_parts_are_left_out():
    rows = pd.DataFrame({
        "request_id": ["a", "b"], "client_lag_ns": [1e6, 2e6], "outside_ns": [3e6, 3e6], "queue_ns": [None, None],
        "prefill_ns": [10e6, 20e6], "decode_ns": [50e6, 60e6], "server_rest_ns": [5e6, 5e6],
    })  # fmt: skip
    figure = parts_of_requests(rows)
    assert "queue" not in {trace.name for trace in figure.data} and len(figure.data) == 5
    assert [sum(trace.x[place] for trace in figure.data) for place in (0, 1)] == [69.0, 90.0]
