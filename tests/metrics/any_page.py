"""Rows of a page of any server whose source translates renamed families: one life, written in its names."""

from typing import Any, NamedTuple

from sojourn.interop.sources.source import Source
from sojourn.metrics.catalog.catalog import METRIC_BY_NAME

Labels = tuple[tuple[str, str], ...]
BOUNDS = (0.1, 1, 10, 100, 1000)
SECOND = 10**9


class Life(NamedTuple):
    """What the server does all the time. `ended_rps` in requests per second, `ttft_s` and `e2e_s` of each request."""

    running: float
    waiting: float
    ended_rps: float
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    kv_use: float = 0.3


def rows(source: Source, ns: int, seconds: float, life: Life) -> list[dict[str, Any]]:
    """The page after so many seconds of this life. Each request has 100 prompt and 40 output tokens."""
    found: dict[tuple[str, Labels], float] = {}
    ended = life.ended_rps * seconds
    values = {
        "sojourn_request_running": life.running, "sojourn_request_waiting": life.waiting,
        "sojourn_memory_kv_usage_ratio": life.kv_use, "sojourn_token_prompt_tokens_total": ended * 100,
        "sojourn_token_generated_tokens_total": ended * 40, "sojourn_request_finished_total": ended,
    }  # fmt: skip
    tpot_s = (life.e2e_s - life.ttft_s) / 39
    of_each = {
        "sojourn_request_ttft_seconds": life.ttft_s, "sojourn_request_e2e_seconds": life.e2e_s,
        "sojourn_request_queue_seconds": max(0.0, life.ttft_s - 0.1), "sojourn_request_tpot_seconds": tpot_s,
        "sojourn_request_itl_seconds": tpot_s, "sojourn_request_prompt_length_tokens": 100,
        "sojourn_request_output_length_tokens": 40,
    }  # fmt: skip
    for item in source.translations:
        term = item.theirs[0][0]
        name, where = term.name, term.where
        if item.labels:
            continue
        if METRIC_BY_NAME[item.ours].kind == "histogram":
            count, value = ended * (39 if "itl" in item.ours else 1), of_each[item.ours]
            found |= {
                (f"{name}_bucket", (*where, ("le", str(bound / term.scale)))): count * (value <= bound)
                for bound in BOUNDS
            }
            found |= {
                (f"{name}_bucket", (*where, ("le", "+Inf"))): count,
                (f"{name}_sum", where): count * value / term.scale,
                (f"{name}_count", where): count,
            }
        elif item.ours in values:
            others = {(each.name, each.where): found.get((each.name, each.where), 0.0) for each in item.theirs[0][1:]}
            found |= others | {(name, where): values[item.ours] / term.scale + sum(others.values())}
    for span in source.spans:
        for term in (*span.seconds, *span.requests):
            is_time = term.name.endswith("_sum") or term.scale != 1
            found.setdefault((term.name, term.where), ended * (0.2 / term.scale if is_time else 1))
    for name in source.steps:
        found.setdefault((name, ()), seconds * 20 * bool(ended))
    return [
        {"ns": ns, "name": name, "labels": list(labels), "value": float(value)}
        for (name, labels), value in found.items()
    ]
