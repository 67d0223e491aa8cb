"""What happened beside the figures: annotations of every dashboard, each from series that Prometheus has."""

from dataclasses import dataclass

from sojourn.dashboards.neutral import PRESENT
from sojourn.dashboards.views import SELECTOR

_SERVER = "engine, instance, model_name"


@dataclass(frozen=True, slots=True)
class Event:
    """`expr` has a sample while it goes on. `title` and `text` may name labels of its series."""

    name: str
    expr: str
    title: str
    text: str
    colour: str


def _appeared(series: str, by: str) -> str:
    """What has a sample now and had none two minutes ago."""
    return f"count by ({by}) ({series}) unless count by ({by}) ({series} offset 2m)"


# An alert or a finding may lack labels of the variables; a matcher that allows "" keeps it.
_ANY_SERVER = 'instance=~"$instance|"'
EVENTS = (
    Event(
        "Alerts", f'ALERTS{{alertname=~"Sojourn.+",alertstate="firing",{_ANY_SERVER}}}', "{{alertname}}",
        "Fires for {{model_name}} {{instance}}. From the series ALERTS of Prometheus.", "#D55E00",
    ),
    Event(
        "Restarts", f"sum by ({_SERVER}) (resets(llm:token_generated_tokens_total{{{SELECTOR}}}[1m])) > 0",
        "{{instance}} restarted", "Its counter llm:token_generated_tokens_total began again at 0.", "#CC79A7",
    ),
    Event(
        "Core restarts",
        f"sum by (instance, model_name) (increase(sojourn_telemetry_core_restarts_total{{{SELECTOR}}}[1m])) > 0",
        "The core of {{instance}} restarted", "From sojourn_telemetry_core_restarts_total.", "#CC79A7",
    ),
    Event(
        "Deploys", _appeared(f"{PRESENT}{{{SELECTOR}}}", _SERVER), "{{instance}} appeared",
        "A server of {{model_name}} that Prometheus did not have 2 minutes ago. From " + PRESENT + ".", "#0072B2",
    ),
    Event(
        "Versions", _appeared(f"sojourn_telemetry_build_info{{{SELECTOR}}}", "version, model_name"),
        "Version {{version}}", "The first server of {{model_name}} with this version. From "
        "sojourn_telemetry_build_info.", "#0072B2",
    ),
)  # fmt: skip
