"""Panels and rows → the JSON that Grafana 10 and later read, by way of grafanalib.

grafanalib writes an old schema and leaves defects that Grafana tolerates or mends on import. Here only the keys that
today's schema knows pass, so that what is committed is what Grafana would save.
"""

import json
from typing import Any

from grafanalib import core as grafana
from grafanalib._gen import DashboardEncoder

from sojourn.dashboards.boards import Board
from sojourn.dashboards.events import EVENTS, Event
from sojourn.dashboards.views import CHOICES, SELECTOR, Panel
from sojourn.metrics.ledger import COLOURS, LIFECYCLES

SCHEMA_VERSION = 39
GRID_COLUMNS = 24
REPEATED_PER_ROW = 4
PANEL_HEIGHT = 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

NOTEWORTHY, FULL = "#E69F00", "#D55E00"  # of a panel's limits
PANEL_KEYS = ("id", "type", "title", "description", "gridPos", "fieldConfig", "options")
ON_LOAD, ON_TIME_RANGE_CHANGE = 1, 2  # when Grafana reads the values of a variable


def dashboard(board: Board, app_url: str) -> dict[str, Any]:
    """Grafana's JSON of a dashboard; panels flow left to right under their rows. `app_url`: of our app, which a series
    of a server opens."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in board.rows:
        panels.append({
            "id": len(panels) + 1, "type": "row", "title": row.title,
            "gridPos": {"h": 1, "w": GRID_COLUMNS, "x": 0, "y": top}, "collapsed": False, "panels": [],
        })  # fmt: skip
        top += 1
        left = 0
        for panel in row.panels:
            width = GRID_COLUMNS if panel.repeats else panel.width
            if left + width > GRID_COLUMNS:
                top, left = top + PANEL_HEIGHT, 0
            place = grafana.GridPos(PANEL_HEIGHT, width, left, top)
            panels.append(_panel(panel, board.lifecycle, len(panels) + 1, place))
            if "{{instance}}" in "".join(query.legend for query in panel.queries):
                panels[-1]["fieldConfig"]["defaults"]["links"] = [_watch(app_url)]
            left += width
        top += PANEL_HEIGHT
    link_to_the_others = {
        "title": "Sojourn", "type": "dashboards", "tags": ["sojourn"], "asDropdown": False, "icon": "external link",
        "includeVars": True, "keepTime": True, "targetBlank": False, "tooltip": "", "url": "",
    }  # fmt: skip
    link_to_runs = {
        "title": "Recorded runs", "type": "link", "icon": "external link", "targetBlank": True, "tags": [],
        "asDropdown": False, "includeVars": False, "keepTime": False, "tooltip": "", "url": f"{app_url}/runs",
    }  # fmt: skip
    source = {
        "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "refresh": ON_LOAD,
        "sort": 1, "includeAll": False, "multi": False, "hide": 0,
    }  # fmt: skip
    jobs = f"label_values({board.present}, job)"
    models = f'label_values({board.present}{{job=~"$job"}}, model_name)'
    servers = f'label_values({board.present}{{job=~"$job",model_name=~"$model_name"}}, instance)'
    variables = [
        _variable("job", "Job", jobs), _variable("model_name", "Model", models),
        _variable("instance", "Instance", servers),
    ]  # fmt: skip
    shown = " ".join(query.expr for row in board.rows for panel in row.panels for query in panel.queries)
    for name, label in (("klass", "Class"), ("tenant", "Tenant")):
        if families := [family for family in CHOICES[name] if family in shown]:
            variables.append(_variable(name, label, f"label_values({families[-1]}{{{SELECTOR}}}, {name})"))
    origin = "Generated from the catalogue by `sojourn server dashboards`."
    return {
        "title": f"Sojourn: {board.name}",
        "uid": board.uid,
        "description": f"{board.shows} {origin}",
        "tags": ["sojourn"],
        "editable": True,
        "annotations": {"list": [_annotation(each) for each in EVENTS]},
        "timezone": "browser",
        "time": {"from": "now-15m", "to": "now"},
        "refresh": "10s",
        "graphTooltip": 1,  # one crosshair in all panels
        "links": [link_to_the_others, link_to_runs],
        "panels": panels,
        "schemaVersion": SCHEMA_VERSION,
        "templating": {"list": [source, *variables]},
    }


def _annotation(event: Event) -> dict[str, Any]:
    return {
        "name": event.name, "datasource": DATASOURCE, "enable": True, "hide": False, "iconColor": event.colour,
        "target": {"refId": "Anno", "expr": event.expr, "interval": "15s"}, "titleFormat": event.title,
        "textFormat": event.text, "tagKeys": "instance,model_name,severity", "useValueForTime": False,
    }  # fmt: skip


def _watch(app_url: str) -> dict[str, Any]:
    """From a server's series to the page that says what limits it now."""
    url = f"{app_url}/live?url=http://${{__field.labels.instance}}"
    return {"title": "What limits ${__field.labels.instance} now?", "url": url, "targetBlank": True}


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    """A choice among the values of a label, all of them at first."""
    return {
        "name": name, "label": label, "type": "query", "query": query, "refresh": ON_TIME_RANGE_CHANGE, "sort": 1,
        "includeAll": True, "multi": True, "allValue": ".+", "hide": 0, "datasource": DATASOURCE,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }  # fmt: skip


def _panel(panel: Panel, lifecycle: str, panel_id: int, place: grafana.GridPos) -> dict[str, Any]:
    common = {"title": panel.title, "description": panel.description, "id": panel_id, "gridPos": place}
    if panel.shape == "number":
        built = _normalised(grafana.Stat(**common, format=panel.unit, reduceCalc="lastNotNull"))
        built["fieldConfig"]["defaults"]["noValue"] = "no data"
    elif panel.shape == "states":
        built = {**_normalised(grafana.Stat(**common, format=panel.unit)), "type": "state-timeline"}
        built["options"] = {
            "mergeValues": True,
            "showValue": "never",
            "rowHeight": 0.8,
            "legend": {"showLegend": False},
        }
        built["fieldConfig"]["defaults"] |= {"noValue": "none has fired", "custom": {"fillOpacity": 80}}
    elif panel.shape == "heatmap":
        built = _normalised(grafana.Heatmap(**common))
        built["fieldConfig"] = {"defaults": {"custom": {}}, "overrides": []}
        built["options"] = _heatmap_options(panel.unit)
    else:
        stacked = panel.shape == "stack"
        lines = grafana.TimeSeries(
            **common, unit=panel.unit, valueMin=0, showPoints="auto", tooltipMode="multi", tooltipSort="desc",
            fillOpacity=60 if stacked else 5, stacking={"group": "A", "mode": "normal" if stacked else "none"},
        )  # fmt: skip
        built = _normalised(lines)
    if panel.shape != "heatmap":
        # Series told apart by a label need distinct colours; quantiles and single series wear the lifecycle's.
        distinct = any("{{" in query.legend for query in panel.queries)
        defaults = built["fieldConfig"]["defaults"]
        defaults["color"] = {"mode": "palette-classic"} if distinct else _shades(lifecycle)
        steps: list[dict[str, Any]] = [{"color": COLOURS[lifecycle], "value": None}]
        steps += [{"color": colour, "value": limit}
                  for colour, limit in zip((NOTEWORTHY, FULL), panel.limits, strict=False)]  # fmt: skip
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        if panel.limits:
            defaults["custom"]["thresholdsStyle"] = {"mode": "dashed"}
        built["fieldConfig"]["overrides"] = _dashed_bounds(
            panel
        ) + [  # an account's series is called `<lifecycle>.<noun>`
            {
                "matcher": {"id": "byRegexp", "options": f"/^{name}\\./"},
                "properties": [{"id": "color", "value": _shades(name)}],
            }
            for name in (LIFECYCLES if panel.by_account else ())
        ]
    if panel.opens:
        built["links"] = [_link(panel.opens)]
    if panel.repeats:
        built |= {"repeat": "instance", "repeatDirection": "h", "maxPerRow": REPEATED_PER_ROW}
    built["datasource"] = DATASOURCE
    built["targets"] = [
        {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": query.expr,
            "format": "heatmap" if panel.shape == "heatmap" else "time_series",
            "legendFormat": query.legend,
            "range": True,
            "refId": chr(ord("A") + index),
        }
        for index, query in enumerate(panel.queries)
    ]
    return built


def _link(uid: str) -> dict[str, Any]:
    """To another dashboard, with the same variables and time."""
    return {
        "title": f"Open {uid}", "type": "link", "icon": "external link", "tooltip": "", "tags": [],
        "url": f"/d/{uid}?${{__all_variables}}&${{__url_time_range}}", "targetBlank": False, "asDropdown": False,
        "includeVars": False, "keepTime": False,
    }  # fmt: skip


def _dashed_bounds(panel: Panel) -> list[dict[str, Any]]:
    """An objective beside what it bounds."""
    return [
        {
            "matcher": {"id": "byFrameRefID", "options": chr(ord("A") + place)},
            "properties": [
                {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [10, 10]}},
                {"id": "color", "value": {"mode": "fixed", "fixedColor": FULL}},
            ],
        }
        for place, query in enumerate(panel.queries)
        if query.is_bound
    ]


def _shades(lifecycle: str) -> dict[str, str]:
    return {"mode": "shades", "fixedColor": COLOURS[lifecycle]}


def _heatmap_options(unit: str) -> dict[str, Any]:
    return {
        "calculate": False,
        "cellGap": 1,
        "color": {"mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5, "steps": 64},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "tooltip": {"mode": "single", "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "unit": unit},
    }


def _normalised(panel: grafana.Panel) -> dict[str, Any]:
    """What grafanalib wrote, without empty values and the keys that today's schema does not know."""
    data = json.loads(json.dumps(panel.to_json_data(), cls=DashboardEncoder))
    return _without_none({key: data[key] for key in PANEL_KEYS if key in data})


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
