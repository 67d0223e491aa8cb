"""The generated dashboards are up to date, without the faults that the lint knows, and show the whole catalogue."""

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml

from sojourn.dashboards.build import GENERATED, build_dashboards, contents
from sojourn.dashboards.content import DASHBOARDS
from sojourn.dashboards.rules import rules
from sojourn.dashboards.views import metrics_of
from sojourn.metrics.catalog.catalog import METRIC_BY_NAME
from sojourn.metrics.ledger import ACCOUNTS, COLOURS, LIFECYCLES
from tests.dashboards.lint import expressions, faults, shown_panels

BOARDS = {name: json.loads(text) for name, text in contents().items() if name.endswith(".json")}


def test_generated_files_are_what_the_catalogue_gives(tmp_path):
    built = build_dashboards(tmp_path)
    assert {path.name for path in built} == {path.name for path in GENERATED.iterdir()}
    for path in built:
        assert path.read_text(encoding="utf-8") == (GENERATED / path.name).read_text(encoding="utf-8"), (
            f"{path.name} is out of date: run `python -m sojourn.dashboards.build`"
        )


ACROSS = ("sojourn-fleet.json", "sojourn-saturation.json", "sojourn-drilldown.json")  # of metrics that others show


def test_there_is_one_dashboard_a_lifecycle_one_of_a_fleet_and_two_tiers_for_every_engine():
    names = (*LIFECYCLES, "fleet", "saturation", "drilldown")
    assert {board["uid"] for board in BOARDS.values()} == {f"sojourn-{name}" for name in names}


def test_servers_stand_side_by_side_and_every_other_panel_of_the_fleet_tells_them_apart():
    shown = shown_panels(BOARDS["sojourn-fleet.json"])
    repeated = [panel for panel in shown if panel.get("repeat") == "instance"]
    assert len(repeated) == 4 and all("$instance" in panel["title"] for panel in repeated)
    for panel in shown:
        if panel not in repeated and panel["title"] != "Good requests":
            assert any("instance)" in target["expr"] for target in panel["targets"]), panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_dashboard_has_no_fault(name):
    assert faults(BOARDS[name]) == []


def test_every_metric_stands_on_exactly_one_dashboard():
    shown = Counter()
    for name, board in BOARDS.items():
        if name in ACROSS:
            continue
        on_board = {metric.name for _, expr in expressions(board) for metric in metrics_of(expr)}
        shown.update(on_board)
    assert not [name for name, boards in shown.items() if boards > 1]
    assert set(shown) == set(METRIC_BY_NAME)


def test_metric_stands_on_the_dashboard_of_its_lifecycle():
    for lifecycle, rows in DASHBOARDS.items():
        owners = {metric.lifecycle for row in rows for panel in row.panels for metric in panel.metrics}
        assert owners - {"telemetry"} == {lifecycle}


def test_accounts_wear_the_colours_of_their_lifecycles():
    panels = shown_panels(BOARDS["sojourn-request.json"])
    ledgers = [panel for panel in panels if panel["title"].startswith("Ledger")]
    assert len(ledgers) == 2
    for panel in ledgers:
        colours = {
            override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
            for override in panel["fieldConfig"]["overrides"]
        }
        assert colours == {f"/^{lifecycle}\\./": COLOURS[lifecycle] for lifecycle in LIFECYCLES}
        assert panel["targets"][0]["legendFormat"] == "{{account}}"
    assert all(info.name.startswith(f"{info.lifecycle}.") for info in ACCOUNTS)


def _first(board: dict, shape: str = "timeseries") -> dict:
    return next(panel for panel in board["panels"] if panel["type"] == shape)


def _quantile(board: dict) -> dict:
    targets = (target for panel in shown_panels(board) for target in panel["targets"])
    return next(target for target in targets if "histogram_quantile" in target["expr"])


def _replace(target: dict, old: str, new: str) -> None:
    assert old in target["expr"]
    target["expr"] = target["expr"].replace(old, new)


# What is broken → a word of the sentence that must come out.
SABOTAGE = {
    "no description": (lambda b: _first(b).update(description=""), "has no description"),
    "no unit": (lambda b: _first(b)["fieldConfig"]["defaults"].pop("unit"), "has no unit"),
    "no unit of a heatmap": (lambda b: _first(b, "heatmap")["options"]["yAxis"].pop("unit"), "has no unit"),
    "no query": (lambda b: _first(b).update(targets=[]), "asks for nothing"),
    "same id": (lambda b: _first(b).update(id=b["panels"][-1]["id"]), "stands 2 times"),
    "overlap": (lambda b: b["panels"][2]["gridPos"].update(x=0), "covers"),
    "off the grid": (lambda b: b["panels"][2]["gridPos"].update(x=23), "leaves the grid"),
    "unused variable": (lambda b: _replace(_quantile(b), ',instance=~"$instance"', ""), "ignores $instance"),
    "unknown variable": (lambda b: _replace(_quantile(b), "$instance", "$pod"), "is no variable"),
    "fixed source": (lambda b: _first(b)["targets"][0].update(datasource={"uid": "abc"}), "fixes its data source"),
    "unknown metric": (lambda b: _replace(_quantile(b), "sojourn_request_", "sojourn_requests_"), "nobody exports"),
    "fixed window": (lambda b: _replace(_quantile(b), "$__rate_interval", "5m"), "rates over 5m"),
    "le lost": (lambda b: _replace(_quantile(b), "sum by (le)", "sum"), "without le"),
    "sum alone": (lambda b: _replace(_quantile(b), "seconds_bucket", "seconds_sum"), "without its count"),
    "counter not rated": (lambda b: _quantile(b).update(expr="sum (sojourn_request_unclosed_total{})"), "is not rated"),
    "gauge rated": (lambda b: _replace(_quantile(b), "ttft_seconds_bucket", "running"), "is rated"),
    "seconds as ms": (lambda b: next(p for p in shown_panels(b) if "histogram_quantile" in p["targets"][0]["expr"])
                      ["fieldConfig"]["defaults"].update(unit="ms"), "as ms"),
    "old schema": (lambda b: b.update(schemaVersion=12), "schemaVersion is 12"),
    "old target": (lambda b: _first(b)["targets"][0].update(intervalFactor=2), "of the old schema"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SABOTAGE)
def test_lint_finds_a_planted_fault(fault):
    board = copy.deepcopy(BOARDS["sojourn-request.json"])
    plant, sentence = SABOTAGE[fault]
    plant(board)
    assert any(sentence in found for found in faults(board))


def test_unknown_metric_in_a_rule_is_refused():
    with pytest.raises(KeyError, match="sojourn_request_nothing"):
        metrics_of("rate(sojourn_request_nothing[5m])")
    named = {name for group in rules()["groups"] for rule in group["rules"] for name in (rule.get("record"),) if name}
    for group in rules()["groups"]:
        for rule in group["rules"]:
            for word in rule["expr"].replace("(", " ").split():
                if word.startswith(("model_name:", "llm:")):
                    word = word.split("{")[0].split("[")[0].rstrip(")")
                    assert word in named, f"{word} is used and never recorded"


def test_folder_that_is_a_file_is_refused_with_a_sentence(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; give a folder"):
        build_dashboards(path)


def test_compose_publishes_to_this_host_only_and_pins_its_images():
    compose = yaml.safe_load(contents()["compose.yaml"])
    for service in compose["services"].values():
        assert service["network_mode"] == "host" and "ports" not in service
        tag = service["image"].partition(":")[2]
        assert tag.lstrip("v").count(".") == 2
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source == "./" or source.removeprefix("./") in contents() or source in compose["volumes"]


def test_yaml_files_are_yaml():
    for path in Path(GENERATED).glob("*.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))
