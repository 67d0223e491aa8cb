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


# Some alerts and all findings lack labels of the variables; a matcher that allows "" keeps them.
OR_NONE = ",".join(f'{name}=~"${name}|"' for name in ("job", "model_name", "instance"))
FIRING = f'ALERTS{{alertname=~"Sojourn.+",alertstate="firing",{OR_NONE}}}'
FOUND = f"sojourn_watch_finding{{{OR_NONE}}}"  # live.watch.exposition
EVENTS = (
    Event(
        "Alerts", FIRING, "{{alertname}}",
        "Fires for {{model_name}} {{instance}}. From the series ALERTS of Prometheus.", "#D55E00",
    ),
    Event(
        "Findings", FOUND, "{{title}} at {{instance}}",
        "{{object}} ({{finding}}), found by sojourn watch from {{series}}. From the series sojourn_watch_finding.",
        "#E69F00",
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
