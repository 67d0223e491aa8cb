"""Prometheus' rules file: the neutral names of every engine, figures of ours, and the alerts."""

from typing import Any

from sojourn.dashboards.alerts import AlertOptions, alerts
from sojourn.dashboards.neutral import neutral_rules
from sojourn.dashboards.rules_of_ours import rules_of_ours
from sojourn.dashboards.views import metrics_of

DEFAULTS = AlertOptions()


def rules(options: AlertOptions = DEFAULTS) -> dict[str, Any]:
    """The rules file, as data. Raises KeyError for a rule with a name that the catalogue lacks."""
    ours, told = rules_of_ours(options.target_share), alerts(options)
    for rule in (*ours, *told):
        metrics_of(rule["expr"])
    # The neutral names keep the interval of Prometheus, which should be that of the scrapes: panels rate over few.
    return {
        "groups": [
            {"name": "sojourn-neutral", "rules": neutral_rules(options.objectives)},
            {"name": "sojourn-recording", "interval": "15s", "rules": ours},
            {"name": "sojourn-alerts", "interval": "15s", "rules": told},
        ]
    }


def prometheus_rule(options: AlertOptions = DEFAULTS) -> dict[str, Any]:
    """The same rules for the Prometheus operator. The label that it selects by is its own setting; `release` is that of
    its Helm chart."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "sojourn", "labels": {"release": "prometheus"}},
        "spec": rules(options),
    }
