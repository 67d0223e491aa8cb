"""A run as a Benchmark Report v0.2.1 of llm-d (its schema: llmdbenchmark/analysis/benchmark_report at 8bc9f1d). JSON is
YAML, which its tools read. PyPI has no package of the schema or its validator.

Latencies run from the actual send, as those of the tools that it was made for. Statistics are of served requests.
"""

import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.request.goodput import total_tokens, window_ns
from sojourn.metrics.request.latencies import gaps_ms, with_origins
from sojourn.metrics.run.devices import num_devices
from sojourn.metrics.run.directory import engine_settings, section
from sojourn.metrics.version import own_version

SCHEMA = "0.2.1"
PERCENTILES = {"p0p1": 0.1, "p1": 1, "p5": 5, "p10": 10, "p25": 25, "p50": 50, "p75": 75, "p90": 90, "p95": 95,
               "p99": 99, "p99p9": 99.9}  # fmt: skip
LATENCIES = {
    "time_to_first_token": ("ttft_sent_ms", "s"), "time_per_output_token": ("tpot_ms", "s/token"),
    "request_latency": ("e2e_sent_ms", "s"), "normalized_time_per_output_token": ("normalised_sent_ms", "s/token"),
}  # fmt: skip


def llmd_report(
    frame: pd.DataFrame, meta: Mapping[str, Any], name: str, *, gpus: int | None = None, hardware: str | None = None
) -> dict[str, Any]:
    """`frame`: the measured requests. `gpus` and `hardware` as the run does not know them itself."""
    rows = with_origins(frame.sort_values("due_ns", ignore_index=True))
    served = rows[rows.status == "ok"]
    span = window_ns(rows)
    seconds = (span[1] - span[0]) / 1e9 if span else 0.0
    results: dict[str, Any] = {"request_performance": {"aggregate": {
        "requests": {
            "total": len(rows), "failures": len(rows) - len(served),
            **_named("input_length", served.prompt_tokens, "count"),
            **_named("output_length", served.output_tokens, "count"),
        },
        "latency": _latency(served),
        "throughput": _throughput(served, seconds),
    }}}  # fmt: skip
    if (sessions := _sessions(rows, seconds)) is not None:
        results["session_performance"] = {"sessions": sessions}
    return {
        "version": SCHEMA,
        "run": _run(meta, name, seconds),
        "scenario": {"load": _load(meta, rows), "stack": [_component(meta, gpus, hardware)]},
        "results": results,
    }  # fmt: skip


def _statistics(values: Any, units: str) -> dict[str, Any] | None:
    known = np.asarray(values, dtype="float64")
    known = known[~np.isnan(known)]
    if not len(known):
        return None
    found = {"units": units, "mean": float(known.mean()), "stddev": float(known.std()), "min": float(known.min()),
             "max": float(known.max())}  # fmt: skip
    return found | {key: float(np.percentile(known, share)) for key, share in PERCENTILES.items()}


def _named(key: str, values: pd.Series, units: str) -> dict[str, Any]:
    found = _statistics(values.astype("float64"), units)
    return {} if found is None else {key: found}


def _latency(served: pd.DataFrame) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, (column, units) in LATENCIES.items():
        found |= _named(key, served[column] / 1e3, units)
    gaps = _statistics(gaps_ms("itl_ms", served)[0] / 1e3, "s/token")
    return found | ({} if gaps is None else {"inter_token_latency": gaps})


def _throughput(served: pd.DataFrame, seconds: float) -> dict[str, Any]:
    prompt, output = total_tokens(served.prompt_tokens), total_tokens(served.output_tokens)
    both = None if prompt is None or output is None else prompt + output
    sums = (("input_token_rate", prompt, "tokens/s"), ("output_token_rate", output, "tokens/s"),
            ("total_token_rate", both, "tokens/s"), ("request_rate", len(served), "queries/s"))  # fmt: skip
    return {
        key: {"units": units, "mean": total / seconds} for key, total, units in sums if total is not None and seconds
    }


def _sessions(rows: pd.DataFrame, seconds: float) -> dict[str, Any] | None:
    """Sessions with their sub-agents, whose names begin with theirs; None where no request has a session."""
    named = rows[rows.session_id.fillna("") != ""]
    if not len(named):
        return None
    # A session of ours is PREFIX-sNUMBER, and a sub-agent adds .NAME.
    group = named.groupby(named.session_id.str.replace(r"(-s\d{6})\..*$", r"\1", regex=True), sort=False)
    whole = group.status.apply(lambda status: bool((status == "ok").all()))
    lasted = (group.last_byte_ns.max().astype("float64") - group.due_ns.min().astype("float64")) / 1e9
    found: dict[str, Any] = {
        "total": len(whole), "succeeded": int(whole.sum()), "failed": int((~whole).sum()),
        "total_events": len(named), "total_events_completed": int((named.status == "ok").sum()),
        "total_events_cancelled": int((named.status == "cancelled").sum()),
        **_named("session_duration", lasted[whole], "s"), **_named("events_per_session", group.size(), "count"),
    }  # fmt: skip
    return found | ({"session_rate": {"units": "queries/s", "mean": len(whole) / seconds}} if seconds else {})


def _run(meta: Mapping[str, Any], name: str, seconds: float) -> dict[str, Any]:
    begun_ns = section(meta, "wall_anchor").get("unix_ns")
    uid = uuid.uuid5(uuid.NAMESPACE_URL, f"sojourn:{name}:{begun_ns}").hex
    found: dict[str, Any] = {"uid": uid, "description": name, "time": {"duration": f"PT{seconds:.6f}S"}}
    if begun_ns is not None:
        found["time"]["start"] = datetime.fromtimestamp(begun_ns / 1e9, UTC).isoformat()
    return found


def _load(meta: Mapping[str, Any], rows: pd.DataFrame) -> dict[str, Any]:
    scenario = section(meta, "scenario")
    arrivals = section(scenario, "arrivals")
    prompts = rows.prompt_tokens.dropna()
    standardized: dict[str, Any] = {
        "tool": "sojourn", "tool_version": own_version(),
        "source": "sampled" if arrivals.get("process") == "trace" else "random",
        "input_seq_len": {"distribution": "other", "value": float(prompts.mean()) if len(prompts) else 1.0},
    }  # fmt: skip
    if (rate := arrivals.get("rate_rps")) is not None:
        standardized["rate_qps"] = rate
    if (slots := arrivals.get("users") or arrivals.get("in_flight")) is not None:
        standardized["concurrency"] = slots
    return {"metadata": {}, "standardized": standardized, "native": {"config": dict(scenario)}}


def _component(meta: Mapping[str, Any], gpus: int | None, hardware: str | None) -> dict[str, Any]:
    settings, machine = engine_settings(dict(meta)), section(meta, "hardware")
    devices, engine = gpus or num_devices(meta), section(meta, "engine")
    is_ours = "max_num_seqs" in settings  # of another server the run knows its model at most
    known = hardware or machine.get("gpus") or machine.get("cpu") or "unknown"
    standardized: dict[str, Any] = {
        "kind": "generic", "tool": "sojourn" if is_ours else "unknown",
        "tool_version": own_version() if is_ours else "unknown",
    }  # fmt: skip
    if devices is not None:  # an inference engine has a number of accelerators
        standardized |= {
            "kind": "inference_engine", "role": "replica", "replicas": 1,
            "model": {"name": str(engine.get("model") or settings.get("model") or "unknown")},
            "accelerator": {
                "model": str(known[0] if isinstance(known, list) else known), "count": devices,
                "parallelism": {"tp": int(settings.get("tensor_parallel") or devices)},
            },
        }  # fmt: skip
    return {
        "metadata": {"label": "server", "cfg_id": uuid.uuid5(uuid.NAMESPACE_URL, repr(sorted(settings.items()))).hex},
        "standardized": standardized, "native": {"args": dict(settings)},
    }  # fmt: skip
