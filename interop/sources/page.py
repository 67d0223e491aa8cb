"""A page of /metrics as rows of the table `scrapes`.

Beside the server's samples stand two of ours, named as Prometheus does: `up`, 0 after a failed scrape, and
`scrape_duration_seconds`.
"""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from sojourn.interop.sources.scrapes import DURATION, UP


def rows_of(page: bytes, ns: int, took_s: float) -> list[dict[str, Any]]:
    """The rows of a page that was read at a moment. Raises ValueError where it is not Prometheus' text."""
    rows = [
        {"ns": ns, "name": sample.name, "labels": list(sample.labels.items()), "value": float(sample.value)}
        for family in text_string_to_metric_families(page.decode("utf-8", "replace"))
        for sample in family.samples
    ]
    if not rows:
        raise ValueError("no samples")
    return rows + own_rows(ns, up=1, took_s=took_s)


def own_rows(ns: int, up: int, took_s: float) -> list[dict[str, Any]]:
    pairs = ((UP, up), (DURATION, took_s))
    return [{"ns": ns, "name": name, "labels": [], "value": float(value)} for name, value in pairs]
