"""Panels and rows → the JSON that Grafana 10 and later read, by way of grafanalib.

grafanalib writes an old schema and leaves defects that Grafana tolerates or mends on import. Here only the keys that
today's schema knows pass, so that what is committed is what Grafana would save.
"""

import json
from typing import Any

from grafanalib import core as grafana
from grafanalib._gen import DashboardEncoder

from dashboards.content import Row
from dashboards.views import Panel
from metrics.ledger import COLOURS, LIFECYCLES

SCHEMA_VERSION = 39
GRID_COLUMNS = 24
PANEL_HEIGHT = 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

_PANEL_KEYS = ("id", "type", "title", "description", "gridPos", "fieldConfig", "options")
_DASHBOARD_KEYS = ("title", "uid", "description", "tags", "editable", "annotations", "timezone", "time", "refresh")
_VARIABLE_KEYS = ("name", "label", "type", "query", "refresh", "sort", "includeAll", "multi", "allValue", "hide")


def dashboard(lifecycle: str, rows: tuple[Row, ...]) -> dict[str, Any]:
    """Grafana's JSON of one lifecycle's dashboard; the panels flow left to right under their rows."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        header = grafana.RowPanel(title=row.title, id=len(panels) + 1, gridPos=grafana.GridPos(1, GRID_COLUMNS, 0, top))
        panels.append({**_normalised_panel(header), "collapsed": False, "panels": []})
        top += 1
        left = 0
        for panel in row.panels:
            if left + panel.width > GRID_COLUMNS:
                top, left = top + PANEL_HEIGHT, 0
            place = grafana.GridPos(PANEL_HEIGHT, panel.width, left, top)
            panels.append(_panel(panel, lifecycle, len(panels) + 1, place))
            left += panel.width
        top += PANEL_HEIGHT
    board = grafana.Dashboard(
        title=f"Sojourn: {lifecycle}",
        uid=f"sojourn-{lifecycle}",
        description=f"The {lifecycle} lifecycle of a Sojourn server. Made from the catalogue by `sojourn dashboards`.",
        tags=["sojourn"],
        timezone="browser",
        time=grafana.Time("now-15m", "now"),
    )
    data = _as_json(board)
    return {
        **{key: data[key] for key in _DASHBOARD_KEYS},
        "graphTooltip": 1,  # one crosshair in all panels
        "links": [_LINK_TO_THE_OTHERS],
        "panels": panels,
        "schemaVersion": SCHEMA_VERSION,
        "templating": {"list": [_variable(template) for template in _TEMPLATES]},
    }


def _panel(panel: Panel, lifecycle: str, panel_id: int, place: grafana.GridPos) -> dict[str, Any]:
    common = {"title": panel.title, "description": panel.description, "id": panel_id, "gridPos": place}
    if panel.shape == "number":
        built = _normalised_panel(grafana.Stat(**common, format=panel.unit, reduceCalc="lastNotNull"))
        built["fieldConfig"]["defaults"]["noValue"] = "no data"
    elif panel.shape == "heatmap":
        built = _normalised_panel(grafana.Heatmap(**common))
        built["fieldConfig"] = {"defaults": {"custom": {}}, "overrides": []}
        built["options"] = _heatmap_options(panel.unit)
    else:
        stacked = panel.shape == "stack"
        lines = grafana.TimeSeries(
            **common,
            unit=panel.unit,
            fillOpacity=60 if stacked else 5,
            stacking={"group": "A", "mode": "normal" if stacked else "none"},
            showPoints="auto",
            tooltipMode="multi",
            tooltipSort="desc",
            valueMin=0,
        )
        built = _normalised_panel(lines)
    if panel.shape != "heatmap":
        # Series told apart by a label need distinct colours; quantiles and single series wear the lifecycle's.
        distinct = any("{{" in query.legend for query in panel.queries)
        defaults = built["fieldConfig"]["defaults"]
        defaults["color"] = {"mode": "palette-classic"} if distinct else _shades(lifecycle)
        defaults["thresholds"] = {"mode": "absolute", "steps": [{"color": COLOURS[lifecycle], "value": None}]}
        built["fieldConfig"]["overrides"] = _account_colours() if panel.by_account else []
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


def _shades(lifecycle: str) -> dict[str, str]:
    return {"mode": "shades", "fixedColor": COLOURS[lifecycle]}


def _account_colours() -> list[dict[str, Any]]:
    """Every account in a shade of its lifecycle's colour; a series is called `<lifecycle>.<noun>`."""
    return [
        {
            "matcher": {"id": "byRegexp", "options": f"/^{lifecycle}\\./"},
            "properties": [{"id": "color", "value": _shades(lifecycle)}],
        }
        for lifecycle in LIFECYCLES
    ]


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


_LINK_TO_THE_OTHERS = {
    "title": "Lifecycles", "type": "dashboards", "tags": ["sojourn"], "asDropdown": False, "icon": "external link",
    "includeVars": True, "keepTime": True, "targetBlank": False, "tooltip": "", "url": "",
}  # fmt: skip

_ON_TIME_RANGE_CHANGE = 2
_TEMPLATES = (
    grafana.Template(name="datasource", label="Data source", type="datasource", query="prometheus"),
    grafana.Template(
        name="model_name", label="Model", query="label_values(sojourn_request_running, model_name)",
        includeAll=True, multi=True, allValue=".+", refresh=_ON_TIME_RANGE_CHANGE,
    ),
    grafana.Template(
        name="instance", label="Instance",
        query='label_values(sojourn_request_running{model_name=~"$model_name"}, instance)',
        includeAll=True, multi=True, allValue=".+", refresh=_ON_TIME_RANGE_CHANGE,
    ),
)  # fmt: skip


def _variable(template: grafana.Template) -> dict[str, Any]:
    data = _as_json(template)
    variable = {key: data[key] for key in _VARIABLE_KEYS if data.get(key) is not None}
    if template.type == "query":
        variable["datasource"] = DATASOURCE
        variable["definition"] = template.query
        variable["current"] = {"selected": True, "text": ["All"], "value": ["$__all"]}
    return variable


def _normalised_panel(panel: grafana.Panel) -> dict[str, Any]:
    """What grafanalib wrote, without empty values and the keys that today's schema does not know."""
    data = _as_json(panel)
    known = {key: data[key] for key in _PANEL_KEYS if key in data}
    if data["type"] == "row":
        del known["fieldConfig"]  # a row draws nothing
    return _without_none(known)


def _as_json(item: Any) -> dict[str, Any]:
    return json.loads(json.dumps(item.to_json_data(), cls=DashboardEncoder))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
