"""What a run says of how its load came, for whoever reads its latencies."""

from typing import Any

CLOSED_ORIGIN = "the moment its turn had come"  # instead of an intended send


def load_told(meta: dict[str, Any]) -> list[str]:
    """Sentences: whether the loop was closed, and whether a trace's times were rounded. [] of an ordinary open load."""
    arrivals = meta.get("arrivals")
    told = arrivals.get("told") if isinstance(arrivals, dict) else None
    return [str(sentence) for sentence in told] if isinstance(told, list) else []


def is_closed(meta: dict[str, Any]) -> bool:
    """Whether the load waited for the server: its due times then tell of the server too, not of the load alone."""
    arrivals = meta.get("arrivals")
    return isinstance(arrivals, dict) and arrivals.get("loop") == "closed"


def rate_was_to_change(meta: dict[str, Any]) -> bool:
    """Whether the scenario itself moves the rate: requests in flight then grow with it, and not for the server."""
    scenario = meta.get("scenario")
    arrivals = scenario.get("arrivals") if isinstance(scenario, dict) else None
    return isinstance(arrivals, dict) and arrivals.get("process") in ("ramp", "phases")


def latency_origin(meta: dict[str, Any]) -> str:
    """Where a latency of the run begins, in words."""
    return f"from {CLOSED_ORIGIN} (closed loop)" if is_closed(meta) else "from the intended send"
