"""A run as `vllm bench serve` 0.33 would have written it: its keys, its units, so that its scripts read our runs.

Arrays are in seconds and summaries in milliseconds, as there. Latencies run from the *actual* send, which is what vLLM
measures; those from the intended send, which it has not, are in the keys with `_due_`. The slo keys are those of
SGLang's serving benchmark: the denominator of attainment is what was sent.

What differs, and has to: TPOT divides by the tokens after the first read (vLLM: by all but one), tokens per second are
tokens (vLLM: chunks), a summary of nothing is null (vLLM: 0), and texts are null, because a run keeps no answers.
Percentiles are given from any number of samples, as there: the report refuses those that rest on too few.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.request.deadlines import class_deadlines
from sojourn.metrics.request.goodput import judged, total_tokens, window_ns
from sojourn.metrics.request.latencies import gaps_ms, inter_chunk_ms, with_origins
from sojourn.metrics.request.objectives import EVERY_CLASS, OBJECTIVES, objectives_of, requested_objectives
from sojourn.metrics.results.summary import load_summary, steady_of
from sojourn.metrics.run.directory import section

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
# vLLM's name of a latency → ours. The last two vLLM gives for runs with --max-concurrency only.
COLUMNS = {
    "ttft": "ttft_sent_ms", "tpot": "tpot_ms", "itl": "inter_chunk_ms", "e2el": "e2e_sent_ms",
    "client_queue_time": "lag_ms", "e2el_including_client_queue": "e2e_ms",
}  # fmt: skip
SUMMARISED = ("ttft", "tpot", "itl", "e2el")
DETAILED = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors")
NAMES = {"ttft_ms": "ttft", "ttfa_ms": "ttfa", "tpot_ms": "tpot", "e2e_ms": "e2el"}


def vllm_result(
    frame: pd.DataFrame, meta: Mapping[str, Any], *, metrics: Sequence[str] = SUMMARISED,
    percentiles: Sequence[float] = PERCENTILES, detailed: bool = True, metadata: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The document of the measured requests (`goodput.measured`) of a run and its run.json.

    `metrics` are names of COLUMNS; `metadata` is written as it is; without `detailed`, most arrays are left out.
    """
    meta = {**meta, "objectives": requested_objectives(meta.get("objectives"))}
    rows = with_origins(judged(frame.sort_values("due_ns", ignore_index=True), meta["objectives"]))
    rows["lag_ms"] = (rows.sent_ns.astype("float64") - rows.due_ns.astype("float64")) / 1e6
    span = window_ns(rows)
    seconds = (span[1] - span[0]) / 1e9 if span else 0.0
    result = (
        _head(meta, len(rows)) | dict(metadata or {}) | _traffic(meta, rows) | _totals(rows, meta, seconds)
        | _arrays(rows)
    )  # fmt: skip
    for name in metrics:
        result |= _summary(name, _samples(rows, COLUMNS[name]), percentiles)
    result |= _ours(rows, meta, seconds, percentiles)
    return result if detailed else {key: value for key, value in result.items() if key not in DETAILED}


def _head(meta: Mapping[str, Any], prompts: int) -> dict[str, Any]:
    scenario, anchor = section(meta, "scenario"), section(meta, "wall_anchor")
    target = section(scenario, "target")
    backend = "openai-chat" if target.get("api") == "chat" else "openai"
    started = anchor["unix_ns"] / 1e9 if "unix_ns" in anchor else time.time()
    return {
        "date": time.strftime("%Y%m%d-%H%M%S", time.localtime(started)),
        "endpoint_type": backend,
        "backend": backend,
        "label": scenario.get("name"),
        "model_id": section(meta, "engine").get("model"),
        "tokenizer_id": target.get("tokenizer"),
        "num_prompts": prompts,
    }


def _traffic(meta: Mapping[str, Any], rows: pd.DataFrame) -> dict[str, Any]:
    """The offered rate: "inf" where all came at once, the mean of the schedule where the process names none."""
    arrivals = section(section(meta, "scenario"), "arrivals")
    process, rate = arrivals.get("process"), arrivals.get("rate_rps")
    burstiness = {"constant": "inf", "trace": None, "times": None}.get(process, 1.0)
    if process == "gamma":
        burstiness = 1 / float(arrivals["cv"]) ** 2
    if process in ("at_once", "concurrency", "users"):
        rate = "inf"
    closed = {"concurrency": "in_flight", "users": "users"}.get(process)
    return {
        "request_rate": rate if rate is not None else load_summary(rows).requested_rps,
        "burstiness": burstiness,
        "max_concurrency": arrivals.get(closed) if closed else None,
    }


def _totals(rows: pd.DataFrame, meta: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    served = rows[rows.status == "ok"]
    prompt, output = total_tokens(served.prompt_tokens), total_tokens(served.output_tokens)
    return {
        "duration": seconds,
        "completed": len(served),
        "failed": len(rows) - len(served),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": _per(len(served), seconds),
        "request_goodput": _per(int(rows.good.sum()), seconds) if meta.get("objectives") else None,
        "output_throughput": _per(output, seconds),
        "total_token_throughput": _per(None if prompt is None or output is None else prompt + output, seconds),
        "max_output_tokens_per_s": _fullest_second(served),
        "max_concurrent_requests": _most_at_once(served),
        "rtfx": 0.0,  # seconds of audio per second: none is sent
    }


def _arrays(rows: pd.DataFrame) -> dict[str, Any]:
    """One entry a request, in the order of the schedule; times in seconds, those of a clock monotonic. A request that
    failed has 0 for what it never came to, as in vLLM, so that the arrays are of numbers."""
    gaps = [(inter_chunk_ms(stamps) / 1e3).tolist() if stamps is not None else [] for stamps in rows.chunk_ns]
    return {
        "input_lens": [int(count) if count == count else None for count in rows.prompt_tokens.astype("float64")],
        "output_lens": [
            int(count) if count == count else None if status == "ok" else 0
            for count, status in zip(rows.output_tokens.astype("float64"), rows.status, strict=True)
        ],
        "ttfts": (rows.ttft_sent_ms / 1e3).fillna(0.0).tolist(),
        "itls": gaps,
        "latencies": (rows.e2e_sent_ms / 1e3).fillna(0.0).tolist(),
        "start_times": (rows.sent_ns.astype("float64") / 1e9).fillna(0.0).tolist(),
        "queue_times": (rows.lag_ms / 1e3).fillna(0.0).tolist(),
        "generated_texts": [None] * len(rows),
        "errors": [error if isinstance(error, str) else "" for error in rows.error],
    }


def _samples(rows: pd.DataFrame, column: str) -> np.ndarray:
    if column == "inter_chunk_ms":
        return gaps_ms(column, rows)[0]
    return rows.loc[rows.status == "ok", column].dropna().to_numpy(dtype="float64")


def _summary(name: str, values_ms: np.ndarray, percentiles: Sequence[float]) -> dict[str, float | None]:
    figures = {"mean": np.mean, "median": np.median, "std": np.std}
    figures |= {f"p{percentile:g}": partial(np.percentile, q=percentile) for percentile in percentiles}
    known = len(values_ms) > 0
    return {f"{word}_{name}_ms": float(figure(values_ms)) if known else None for word, figure in figures.items()}


def _ours(rows: pd.DataFrame, meta: Mapping[str, Any], seconds: float, percentiles: Sequence[float]) -> dict[str, Any]:
    """What vLLM does not write: SGLang's slo keys, latencies from the intended send, deadlines, the delay."""
    objectives = meta.get("objectives") or []
    bounds = objectives_of(EVERY_CLASS, objectives)
    load, steady = load_summary(rows), steady_of(rows, meta)
    verdicts = {name: rows[f"{name.removesuffix('_ms')}_met"].dropna() for name in OBJECTIVES}
    result = {
        "goodput_slos_ms": {NAMES[name]: bound for name, bound in bounds.items()},
        "slo_attainment": float(rows.good.mean()) if objectives and len(rows) else None,
        "slo_attainment_by_metric": {NAMES[name]: float(met.mean()) for name, met in verdicts.items() if len(met)},
        "goodput": _per(int(rows.good.sum()), seconds) if objectives else None,
        "token_goodput": _per(total_tokens(rows[rows.good].output_tokens), seconds) if objectives else None,
        "fluidity_index": {each.klass: each.fluidity for each in class_deadlines(rows, objectives)},
        "steady_state": steady.verdict,
        "load_summary": {
            "requested_rate": load.requested_rps,
            "achieved_rate": load.achieved_rps,
            "send_duration": load.send_duration_s,
            "schedule_delay": {k: None if ms is None else ms / 1e3 for k, ms in load.schedule_delay_ms.items()},
        },
        "client_error": meta.get("client_error"),
        "valid": meta.get("valid"),
    }
    for name in ("ttft", "e2e"):
        result |= _summary(f"{NAMES[f'{name}_ms']}_due", _samples(rows, f"{name}_ms"), percentiles)
    return result


def _per(amount: float | None, seconds: float) -> float | None:
    return amount / seconds if amount is not None and seconds else None


def _fullest_second(served: pd.DataFrame) -> float:
    """Most output tokens that were read in one second, counted from the first send."""
    if not len(served):
        return 0.0
    begin_ns = float(served.sent_ns.min())
    seconds: list[np.ndarray] = []
    for stamps, tokens in zip(served.chunk_ns, served.chunk_tokens, strict=True):
        read = ((np.asarray(stamps, dtype="float64") - begin_ns) // 1e9).astype("int64")
        counted = tokens is not None and len(tokens) == len(read)
        seconds.append(np.repeat(read, np.asarray(tokens, dtype="int64") if counted else 1))
    counts = np.bincount(np.clip(np.concatenate(seconds), 0, None)) if seconds else np.zeros(1)
    return float(counts.max(initial=0))


def _most_at_once(served: pd.DataFrame) -> int:
    """Most requests that were open in one second, counted from the first send: as vLLM counts them."""
    if not len(served):
        return 0
    begin = served.sent_ns.to_numpy(dtype="float64")
    first = ((begin - begin.min()) // 1e9).astype("int64")
    last = ((served.last_byte_ns.to_numpy(dtype="float64") - begin.min()) // 1e9).astype("int64")
    change = np.bincount(first, minlength=last.max() + 2) - np.bincount(last + 1, minlength=last.max() + 2)
    return int(np.cumsum(change).max())
