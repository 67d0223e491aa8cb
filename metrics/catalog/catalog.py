"""Every metric declared once: name, type, unit, lifecycle, labels, buckets, what it measures and what it cannot.

The exporter, the dashboards, the Prometheus rules and `docs/metrics.md` are made from this list. A name reads
`sojourn_<lifecycle>_<noun>_<unit>`, with `_total` behind it where the value only grows. `telemetry` is the fifth word:
what Sojourn itself costs and loses. All series carry `model_name` beside the labels named here.
"""

from metrics.catalog.compute import COMPUTE
from metrics.catalog.memory import BLOCK_STATES, MEMORY
from metrics.catalog.metric import Metric
from metrics.catalog.request import REQUEST, TELEMETRY
from metrics.catalog.token import TOKEN
from metrics.ledger import LIFECYCLES

__all__ = ["BLOCK_STATES", "CATALOG", "GOOD", "METRIC_BY_NAME", "OWNERS", "Metric", "render_markdown", "sample_names"]

OWNERS = (*LIFECYCLES, "telemetry")
GOOD = "all_objectives"  # value of the label `objective` that stands for a good request

CATALOG: tuple[Metric, ...] = (*REQUEST, *TOKEN, *COMPUTE, *MEMORY, *TELEMETRY)
METRIC_BY_NAME: dict[str, Metric] = {metric.name: metric for metric in CATALOG}


def sample_names(metric: Metric) -> tuple[str, ...]:
    """The names under which its samples can be queried."""
    if metric.kind == "histogram":
        return tuple(metric.name + suffix for suffix in ("_bucket", "_sum", "_count"))
    return (metric.name,)


def render_markdown() -> str:
    """The page `docs/metrics.md`: one table a lifecycle."""
    lines = [
        "# Metrics",
        "",
        "Made from `metrics/catalog/` by `python -m metrics.catalog.catalog > docs/metrics.md`; change it there.",
        "All series carry `model_name`. Histograms export `_bucket`, `_sum` and `_count`; an objective that the",
        "server was given is an exact bucket bound.",
    ]
    for owner in OWNERS:
        lines += ["", f"## {owner}", "", "| metric | type | labels | measures | cannot |", "|---|---|---|---|---|"]
        for metric in CATALOG:
            if metric.lifecycle == owner:
                shape = f"{metric.kind}, {metric.unit}"
                if metric.buckets:
                    shape += f", {len(metric.buckets)} buckets {metric.buckets[0]:g} … {metric.buckets[-1]:g}"
                labels = ", ".join(f"`{label}`" for label in metric.labels) or "–"
                lines.append(f"| `{metric.name}` | {shape} | {labels} | {metric.meaning} | {metric.cannot} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_markdown(), end="")
