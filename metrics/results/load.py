"""How the load of a run arrived, as a reader of its latencies must know it."""

from typing import Any

from sojourn.metrics.run.directory import section

CLOSED_ORIGIN = "the moment its turn had come"  # instead of an intended send


def load_notes(meta: dict[str, Any]) -> list[str]:
    """Sentences: whether the loop was closed, whether a trace's times were rounded, whether the load was stopped before
    its end, and what its replies left open. [] of an ordinary open load."""
    reported, stopped = section(meta, "arrivals").get("told"), section(meta, "stopped_early")
    found = [str(sentence) for sentence in reported] if isinstance(reported, list) else []
    if stopped:
        found.append(f"the load was stopped after {stopped['after_s']:.3g} s of its schedule: {stopped['reason']}")
    notes = meta.get("reply_notes")
    return found + [str(sentence) for sentence in notes or () if isinstance(notes, list)]


def is_closed(meta: dict[str, Any]) -> bool:
    """Whether the load waited for the server: its due times then tell of the server too, not of the load alone."""
    return section(meta, "arrivals").get("loop") == "closed"


def rate_was_to_change(meta: dict[str, Any]) -> bool:
    """Whether the scenario itself moves the rate: requests in flight then grow with it, and not for the server."""
    facts = section(meta, "arrivals")
    if "rate_changes" in facts:  # older runs do not say it
        return facts["rate_changes"] is True
    return section(section(meta, "scenario"), "arrivals").get("process") in ("ramp", "phases")


def declared_window_s(meta: dict[str, Any]) -> float | None:
    """How long the scenario lets measured requests come, less what a load that was stopped early did not send. None
    where the server, a count or a trace's end decides too.

    The warm-up is taken to begin with the schedule: it begins with the first request, a gap later.
    """
    scenario = section(meta, "scenario")
    arrivals, warmup_s = section(scenario, "arrivals"), section(scenario, "measure").get("warmup_s") or 0.0
    if section(meta, "arrivals").get("loop") != "open":
        return None
    if arrivals.get("process") == "trace" or arrivals.get("count") is not None:
        return None
    phases = arrivals.get("phases") or [arrivals]
    seconds = sum(phase.get("duration_s") or 0.0 for phase in phases)
    if stopped := section(meta, "stopped_early"):
        seconds = min(seconds, float(stopped["after_s"]))
    seconds -= warmup_s
    return seconds if seconds > 0 else None


def latency_origin(meta: dict[str, Any]) -> str:
    """Where a latency of the run begins, in words."""
    if meta.get("measured_by") == "server":
        return "from the arrival at the server"
    return f"from {CLOSED_ORIGIN} (closed loop)" if is_closed(meta) else "from the intended send"
