"""A run as GuideLLM's report (`--output kind=json`), schema 2 of its 0.8: one benchmark, its requests, its statistics.

Times are seconds of the wall clock. Latencies run from the actual send, as there; `targeted_start` is the intended one.
Time between tokens divides by all tokens but one, as there; ours divides by the tokens after the first read. Texts are
null, because a run keeps none. The objectives are those that all classes share.
"""

import platform
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from sojourn.interop.exported.guidellm_statistics import (
    Array,
    Json,
    concurrency_by_group,
    count,
    known,
    rates,
    rates_by_group,
    summary,
    values_by_group,
)
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.request.objectives import EVERY_CLASS, objectives_of, requested_objectives
from sojourn.metrics.run.directory import section

VERSION = "0.8.1"  # of GuideLLM: its reader refuses a report that names none
PHASE = {"percent": None, "value": None, "mode": "prefer_duration"}  # no warm-up: a run exports measured requests only
SLOS = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "e2e_ms": "e2el_ms"}
STATUS = {"successful": "completed", "incomplete": "cancelled", "errored": "errored"}


def guidellm_report(frame: pd.DataFrame, meta: Mapping[str, Any], run: str) -> Json:
    """The report of the measured requests of a run. `run` names it. Raises RunDataError where there is none."""
    if not len(frame):
        raise RunDataError("the run has no measured request, and GuideLLM's report needs one")
    rows = _rows(frame.sort_values("due_ns", ignore_index=True), section(meta, "wall_anchor"))
    slo = _slo(frame, meta)
    strategy = _strategy(meta, rows)
    backend = {
        "kind": "openai_http", "target": section(meta, "engine").get("base_url") or "http://127.0.0.1:8000",
        "model": section(meta, "engine").get("model"),
    }  # fmt: skip
    data = {"kind": "parquet_file", "path": "schedule.parquet"}
    spec = {
        "backend": backend, "profile": _profile(strategy), "data": [data],
        "metrics": {"kind": "generative", "confidence": None, "slo": slo},
    }  # fmt: skip
    benchmark = {
        "type_": "generative_benchmark",
        "config": {
            "id_": run, "run_id": run, "run_index": 0, "strategy": strategy, "constraints": {}, "sample_size": None,
            "warmup": PHASE, "cooldown": PHASE, "prefer_response_metrics": True, "slo": slo, "confidence": None,
            "warnings": [], "profile": spec["profile"], "requests": {}, "backend": backend, "environment": {},
        },
        "scheduler_state": _scheduler_state(rows),
        "scheduler_metrics": _scheduler_metrics(rows, strategy),
        "metrics": _metrics(rows, strategy, slo),
        "requests": {
            name: [_request(row) for row in rows[rows.group == name].to_dict("records")] for name in STATUS
        } | {"total": None},
        "warnings": [],
    }  # fmt: skip
    metadata = {
        "version": 2, "guidellm_version": VERSION, "python_version": platform.python_version(),
        "platform": platform.platform(),
    }  # fmt: skip
    config = {"metadata": {"labels": {"written_by": "sojourn"}}, "spec": spec}
    return {"metadata": metadata, "config": config, "benchmarks": [benchmark], "conclusions": []}


def _rows(frame: pd.DataFrame, anchor: Mapping[str, Any]) -> pd.DataFrame:
    """One row a request: its moments in seconds of the wall clock, its counts, and what GuideLLM makes of them."""
    shift = int(anchor.get("unix_ns", 0)) - int(anchor.get("monotonic_ns", 0))

    def seconds(name: str) -> pd.Series:
        return pd.Series([(int(at) + shift) / 1e9 if pd.notna(at) else np.nan for at in frame[name]], dtype="float64")

    rows = frame[["request_id", "session_id", "turn", "status", "error"]].copy()
    rows["group"] = np.select([frame.status == "ok", frame.status == "cancelled"], ["successful", "incomplete"],
                              "errored")  # fmt: skip
    rows["target"], rows["start"] = seconds("due_ns"), seconds("sent_ns")
    rows["first"] = seconds("first_token_ns")
    last_reads = [chunks[-1] if chunks is not None and len(chunks) else None for chunks in frame.chunk_ns]
    frame = frame.assign(last_token_ns=frame.last_token_ns.where(frame.last_token_ns.notna(), last_reads))
    rows["last"] = seconds("last_token_ns")
    rows["request_end"] = seconds("last_byte_ns").where(rows.start.notna())
    rows["end"] = rows.request_end.fillna(rows.start).fillna(rows.target)
    for name in ("prompt_tokens", "output_tokens", "cached_tokens"):
        rows[name] = frame[name].astype("float64")
    rows["reads"] = [0 if chunks is None else len(chunks) for chunks in frame.chunk_ns]
    rows["outputs"] = rows.output_tokens.fillna(rows.reads.where(rows.reads > 0))
    rows["latency"] = rows.request_end - rows.start
    rows["ttft_ms"] = 1e3 * (rows["first"] - rows.start)
    several = (rows.outputs > 1) & rows["last"].notna()
    rows["itl_ms"] = (1e3 * (rows["last"] - rows["first"]) / (rows.outputs - 1)).where(several)
    produced = (rows.outputs > 0) & rows.start.notna()
    rows["per_token_ms"] = (1e3 * (rows["last"].fillna(rows.end) - rows.start) / rows.outputs).where(produced)
    return rows


def _slo(frame: pd.DataFrame, meta: Mapping[str, Any]) -> Json | None:
    """The objectives, where all classes have the same: a report has one set of them."""
    stated = requested_objectives(meta.get("objectives"))
    of_classes = [objectives_of(klass or EVERY_CLASS, stated) for klass in sorted(set(frame.klass.fillna("")))]
    bounds = {SLOS[name]: of_classes[0].get(name) for name in SLOS}
    is_shared = all(each == of_classes[0] for each in of_classes)
    return bounds if is_shared and any(bounds.values()) else None


def _strategy(meta: Mapping[str, Any], rows: pd.DataFrame) -> Json:
    """How requests were sent. What GuideLLM has no name for is a replay of the times of a schedule."""
    arrivals = section(section(meta, "scenario"), "arrivals")
    process, rate = arrivals.get("process"), arrivals.get("rate_rps")
    limit = arrivals.get({"concurrency": "in_flight", "users": "users"}.get(process, ""))
    if limit:
        return {"type_": "concurrent", "streams": limit, "worker_count": limit, "max_concurrency": limit}
    if process in ("constant", "poisson") and rate:
        return {"type_": process, "rate": rate}
    if process == "at_once" or len(rows) == 1:
        return {"type_": "throughput"}
    return {"type_": "trace", "time_scale": 1.0, "schedule_turn": "timestamp"}


def _profile(strategy: Json) -> Json:
    kind = strategy["type_"]
    if kind == "trace":
        return {"kind": "replay", "time_scale": 1.0, "schedule_turn": "timestamp"}
    extra = {"concurrent": {"streams": [strategy.get("streams")]}, "throughput": {}}
    return {"kind": kind} | extra.get(kind, {"rate": [strategy.get("rate")]})


def _has_schedule(strategy: Json) -> bool:
    return strategy["type_"] in ("constant", "poisson", "trace")


def _window(rows: pd.DataFrame) -> tuple[float, float]:
    return float(rows.start.fillna(rows.end).min()), float(rows.end.max())


def _scheduler_state(rows: pd.DataFrame) -> Json:
    begin, end = _window(rows)
    counts = rows.group.value_counts()
    return {
        "node_id": 0, "num_processes": 1, "start_time": begin, "end_time": end, "start_requests_time": begin,
        "end_requests_time": end, "end_queuing_time": float(rows.target.max()), "end_processing_time": end,
        "created_requests": len(rows), "processed_requests": len(rows),
        "successful_requests": int(counts.get("successful", 0)), "errored_requests": int(counts.get("errored", 0)),
        "cancelled_requests": int(counts.get("incomplete", 0)),
    }  # fmt: skip


def _scheduler_metrics(rows: pd.DataFrame, strategy: Json) -> Json:
    """Its own delays are the time of a send after the intended one; a run has no worker queue, and -1 is no value."""
    begin, end = _window(rows)

    def mean(values: pd.Series) -> float:
        return float(values.mean()) if values.notna().any() else -1.0

    return {
        "start_time": begin, "request_start_time": begin, "measure_start_time": begin, "measure_end_time": end,
        "request_end_time": end, "end_time": end, "requests_made": _totals(rows),
        "generation_delay": summary(np.empty(0)), "queued_time_avg": -1.0, "resolve_start_delay_avg": -1.0,
        "resolve_targeted_start_delay_avg": mean(rows.start - rows.target), "request_start_delay_avg": -1.0,
        "request_targeted_start_delay_avg": mean(rows.start - rows.target), "request_time_avg": mean(rows.latency),
        "resolve_end_delay_avg": -1.0, "resolve_time_avg": mean(rows.latency), "finalized_delay_avg": -1.0,
        "processed_delay_avg": -1.0, "dataset_incomplete": False, "strategy_type": strategy["type_"],
    }  # fmt: skip


def _totals(rows: pd.DataFrame) -> Json:
    counts = rows.group.value_counts()
    return {name: int(counts.get(name, 0)) for name in STATUS} | {"total": len(rows)}


def _values(rows: pd.DataFrame, values: pd.Series, weights: pd.Series | None = None) -> Json:
    given = None if weights is None else weights.fillna(0).to_numpy(dtype="float64")
    return values_by_group(rows.group.to_numpy(), values.fillna(0).to_numpy(dtype="float64"), given)


def _metrics(rows: pd.DataFrame, strategy: Json, slo: Json | None) -> Json:
    window, group, ended = _window(rows), rows.group.to_numpy(), rows.end.to_numpy()
    ones, nothing = np.ones(len(rows)), pd.Series(0.0, index=rows.index)
    sent, answered = rows[rows.start.notna()], rows[rows["first"].notna()]
    prompts, outputs = rows.prompt_tokens.fillna(0), rows.outputs.fillna(0)
    prompt_times = rows["first"].fillna(rows.end).to_numpy(), prompts.to_numpy()
    token_groups, token_times, token_counts = _token_events(rows, is_first_counted=True)
    later_groups, _, later_counts = _token_events(rows, is_first_counted=False)
    return {
        "request_totals": _totals(rows),
        "requests_per_second": rates_by_group(group, ended, ones, window),
        "request_concurrency": concurrency_by_group(
            sent.group.to_numpy(), sent.start.to_numpy(), sent.end.to_numpy(), np.ones(len(sent)), window
        ),
        "request_latency": _values(rows, rows.latency),
        **(_schedule_delays(sent, rows) if _has_schedule(strategy) else {}),
        "root_dispatch_delay": _roots(sent),
        "request_streaming_iterations_count": _values(rows, rows.reads.astype("float64")),
        "prompt_token_count": _values(rows, prompts),
        "output_token_count": _values(rows, outputs),
        "total_token_count": _values(rows, prompts + outputs),
        "time_to_first_token_ms": _values(answered, answered.ttft_ms),
        "time_to_first_output_token_ms": _values(answered, answered.ttft_ms),
        "time_per_output_token_ms": _values(rows, rows.per_token_ms, outputs),
        "inter_token_latency_ms": _values(rows, rows.itl_ms, rows.outputs.fillna(1) - 1),
        "time_to_last_round_trip_ms": _values(rows, nothing),
        "avg_round_trip_time_ms": _values(rows, nothing),
        "prompt_tokens_per_second": rates_by_group(group, *prompt_times, window),
        "output_tokens_per_second": rates_by_group(token_groups, token_times, token_counts, window),
        "tokens_per_second": rates_by_group(
            np.concatenate((group, token_groups)), np.concatenate((prompt_times[0], token_times)),
            np.concatenate((prompt_times[1], token_counts)), window,
        ),
        "output_tokens_per_iteration": values_by_group(token_groups, token_counts),
        "iter_tokens_per_iteration": values_by_group(later_groups, later_counts),
        "text": {"tokens": _text_tokens(rows), "words": None, "characters": None},
        "image": dict.fromkeys(("tokens", "images", "pixels", "bytes")),
        "video": dict.fromkeys(("tokens", "frames", "seconds", "bytes")),
        "audio": dict.fromkeys(("tokens", "samples", "seconds", "bytes")),
        "tool_call": dict.fromkeys(("tokens", "mixed_tokens", "count")),
        "turns": _turns(rows),
        **(_goodput(rows, slo, window) if slo else {}),
    }  # fmt: skip


def _schedule_delays(sent: pd.DataFrame, rows: pd.DataFrame) -> Json:
    late = sent.start - sent.target
    ended = rows[rows.request_end.notna()]
    return {
        "request_dispatch_delay": _values(sent, late),
        "request_scheduled_latency": _values(ended, ended.request_end - ended.target),
        "turn_predecessor_delay": _values(sent, late * 0),
        "turn_scheduling_delay": _values(sent, late),
    }


def _roots(sent: pd.DataFrame) -> Json | None:
    roots = sent[sent.turn == 0]
    return summary((roots.start - roots.target).to_numpy()) if len(roots) else None


def _token_events(rows: pd.DataFrame, is_first_counted: bool) -> tuple[Array, Array, Array]:
    """Group, moment and tokens of each read. GuideLLM spreads the reads of a request evenly from first to last."""
    groups, times, counts = [], [], []
    columns = ("group", "first", "last", "reads", "outputs", "end")
    for group, first, last, reads, outputs, end in zip(*(rows[name].tolist() for name in columns), strict=True):
        produced = outputs if outputs == outputs else 0.0
        if first != first or last != last or reads <= 1:
            at, tokens = [last if last == last else end], [produced]
            at, tokens = (at, tokens) if is_first_counted else ([], [])
        else:
            each = (produced - 1) / (reads - 1) if produced > 1 else None
            at = np.linspace(first, last, num=reads)[1:].tolist() if each is not None else []
            tokens = [each] * len(at)
            if is_first_counted:
                at, tokens = [first, *at], [float(produced > 0), *tokens]
        groups += [group] * len(at)
        times += at
        counts += tokens
    return np.asarray(groups, dtype=object), np.asarray(times, dtype="float64"), np.asarray(counts, dtype="float64")


def _text_tokens(rows: pd.DataFrame) -> Json | None:
    """Prompt and output tokens by request: as values, as rates at the end of a request, as tokens under way."""
    known = rows[rows.start.notna() & (rows.prompt_tokens.notna() | rows.output_tokens.notna())]
    result: Json = {}
    for name, columns in (
        ("input", ["prompt_tokens"]), ("output", ["output_tokens"]), ("total", ["prompt_tokens", "output_tokens"]),
    ):  # fmt: skip
        parts = [known.assign(tokens=known[column]) for column in columns]
        if any(part.tokens.isna().all() for part in parts):
            result |= {name: None, f"{name}_per_second": None, f"{name}_concurrency": None}
            continue
        both = pd.concat(parts)
        counted, amounts = both[both.tokens.notna()], both.tokens.fillna(0).to_numpy()
        group, begin, end = both.group.to_numpy(), both.start.to_numpy(), both.end.to_numpy()
        result[name] = _values(counted, counted.tokens)
        result[f"{name}_per_second"] = rates_by_group(group, end, amounts)
        result[f"{name}_concurrency"] = concurrency_by_group(group, begin, end, amounts)
    return result if len(known) else None


def _turns(rows: pd.DataFrame) -> list[Json] | None:
    if set(rows.turn) == {0}:
        return None
    return [_turn(int(turn), part) for turn, part in rows.groupby("turn")]


def _turn(turn: int, rows: pd.DataFrame) -> Json:
    answered = rows[rows["first"].notna()]
    return {
        "turn_index": turn, "request_totals": _totals(rows), "request_latency": _values(rows, rows.latency),
        "prompt_token_count": _values(rows, rows.prompt_tokens),
        "time_to_first_token_ms": _values(answered, answered.ttft_ms),
        "inter_token_latency_ms": _values(rows, rows.itl_ms, rows.outputs.fillna(1) - 1),
    }  # fmt: skip


def _goodput(rows: pd.DataFrame, slo: Json, window: tuple[float, float]) -> Json:
    """A request that lacks a time of an objective is not counted; one that failed counts as one that missed."""
    served = rows[rows.group == "successful"]
    times = {"ttft_ms": served.ttft_ms, "tpot_ms": served.itl_ms, "e2el_ms": served.latency * 1e3}
    bounds = {name: bound for name, bound in slo.items() if bound}
    known = pd.concat([times[name].notna() for name in bounds], axis=1).all(axis=1)
    good = served[known & pd.concat([times[name] <= bound for name, bound in bounds.items()], axis=1).all(axis=1)]
    counted = int(known.sum()) + int((rows.group == "errored").sum())
    if not counted:
        return {}
    nothing = rates(np.empty(0), np.empty(0), window)
    found = rates(good.end.to_numpy(), np.ones(len(good)), window)
    return {
        "slo_attainment": len(good) / counted, "slo_determined_requests": counted,
        "request_goodput": {"successful": found, "incomplete": nothing, "errored": nothing, "total": found},
    }  # fmt: skip


def _request(row: Mapping[str, Any]) -> Json:
    error = row["error"] if isinstance(row["error"], str) else row["status"]
    timings = {
        "targeted_start": row["target"], "queued": row["target"], "resolve_start": row["start"],
        "request_start": row["start"], "first_request_iteration": row["first"], "first_token_iteration": row["first"],
        "first_output_token_iteration": row["first"], "last_token_iteration": row["last"],
        "last_request_iteration": row["last"], "request_iterations": row["reads"], "token_iterations": row["reads"],
        "request_end": row["request_end"], "resolve_end": row["end"], "finalized": row["end"],
    }  # fmt: skip
    return {
        "type_": "generative_request_stats",
        "request_id": row["request_id"],
        "info": {
            "request_id": row["request_id"], "conversation_id": row["session_id"] or None,
            "turn_index": int(row["turn"]), "preceding_nodes": int(row["turn"]), "status": STATUS[row["group"]],
            "timings": {name: known(value) for name, value in timings.items()},
            "error": error if row["group"] == "errored" else None,
        },
        "input_metrics": {"text_tokens": count(row["prompt_tokens"]), "cached_tokens": count(row["cached_tokens"])},
        "output_metrics": {"text_tokens": count(row["output_tokens"])},
        **dict(_computed(row)),
    }  # fmt: skip


def _computed(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What GuideLLM writes beside the times it is computed from, for readers of the file."""
    start, end = row["start"], row["request_end"]
    yield "request_start_time", known(start)
    yield "request_end_time", row["end"]
    yield "request_latency", known(row["latency"])
    yield "request_dispatch_delay", known(start - row["target"])
    yield "request_scheduled_latency", known(end - row["target"])
    yield "prompt_tokens", count(row["prompt_tokens"])
    yield "cached_tokens", count(row["cached_tokens"])
    yield "output_tokens", count(row["outputs"])
    yield "total_tokens", count(np.nansum([row["prompt_tokens"], row["outputs"]]))
    yield "time_to_first_token_ms", known(row["ttft_ms"])
    yield "time_per_output_token_ms", known(row["per_token_ms"])
    yield "inter_token_latency_ms", known(row["itl_ms"])
