"""TensorRT-LLM's iteration log (`print_iter_log: true`) of its PyTorch back end, and of the older C++ one as JSON.

`num_generation_tokens` may hold padding for graphs, so no token is counted from it; scheduled requests are real.
"""

import json
import re
from statistics import fmean, median
from typing import Any

from sojourn.interop.held.given import Given, Line
from sojourn.interop.held.held import BenchmarkFigures, Figure, Held, Setting
from sojourn.interop.held.literals import found_in
from sojourn.interop.held.logs.clock import STAMP, clock_of
from sojourn.interop.held.logs.events import events_of
from sojourn.interop.held.logs.series import Said, rows_of

ITERATION = re.compile(
    r"\biter = (?P<iter>\d+), global_rank = (?P<global>\d+), rank = (?P<rank>\d+), "
    r"currank_total_requests = (?P<current>\d+)/(?P<total>\d+), (?P<rest>.*)"
)
BEGIN = re.compile(r"\biter = \d+, global_rank = ")
HOST = re.compile(r"(?:host_step_time = (?P<ms>[\d.]+)ms|elapsed_time = (?P<s>[\d.]+)s)")
DEVICE = re.compile(r"prev_device_step_time = (?P<ms>[\d.]+)ms")
SCHEDULED = re.compile(r"num_scheduled_requests(?::| =) (\d+)")
KV_USE = re.compile(r"kv_cache_util(?:ization)?(?::| =) (?P<share>[\d.]+)(?P<percent>%?)")
STATES = re.compile(r"states = \{'num_ctx_requests': (?P<prefills>\d+), 'num_ctx_tokens': (?P<tokens>\d+), ")
KV_TOKENS = re.compile(r"Allocated (?P<gib>[\d.]+) GiB for max tokens in paged KV cache \((?P<tokens>\d+)\)")
VERSION = re.compile(r"TensorRT[- ]LLM version: (?P<version>\S+)")
C_JSON = '"Active Request Count"'
GAUGES = {"running": "trtllm_num_requests_running", "waiting": "trtllm_num_requests_waiting",
          "kv_use": "trtllm_kv_cache_utilization"}  # fmt: skip
STEPS = "trtllm_prefill_batch_tokens_count"  # its page counts the steps so
EVERY_NS = 10**9
BY_SERVER = "TensorRT-LLM: its iterations, as its host times them"


def recognises(given: Given) -> bool:
    text = given.plain
    return found_in(BEGIN, text) or C_JSON in text or "[TRT-LLM]" in text or "[TensorRT-LLM]" in text


def read(given: Given) -> list[Held]:
    lines, clock = given.lines, clock_of(given.text)
    steps, moments, seen, others = [], [], 0, 0
    for line in lines:
        seen += len(BEGIN.findall(line.text)) + (C_JSON in line.text)
        step = _step(line.text)
        if step is not None and step.pop("rank", 0.0):
            others += 1
        elif step is not None:
            steps.append(step)
            moments.append((line.ns or clock.ns(STAMP.search(line.text[:80])), line.number))
    notes = []
    if seen > len(steps) + others:
        notes.append(f"{seen - len(steps) - others} iteration lines are cut off, and were left out")
    if others:
        notes.append(f"{others} iterations of other ranks than the first were left out")
    settings, version = _settings(lines)
    missing = ["latencies of requests: the iteration log has steps only; give the result file of a benchmark, or a "
               "page of /metrics"]  # fmt: skip
    if not steps:
        missing.append("steps: no iteration line; start with `print_iter_log: true` in the extra LLM API options")
    return [Held(
        kind="TensorRT-LLM log", name=given.name, server="tensorrt-llm", version=version, settings=settings,
        figures=_means(steps), notes=notes, missing=missing, series=rows_of(_said(steps, moments), 1.0, True),
        is_wall_clock=clock.is_wall_clock,
        events=events_of(lines, lambda line: line.ns or clock.ns(STAMP.search(line.text[:80]))),
    )]  # fmt: skip


def _said(steps: list[dict[str, float]], moments: list[tuple[int | None, int]]) -> list[Said]:
    """One look a second: the last step of it, and how many there were."""
    found: dict[int, Said] = {}
    counted = 0.0
    for step, (ns, line) in zip(steps, moments, strict=True):
        if ns is None:
            return []
        gauges = {ours: step[name] for name, ours in GAUGES.items() if name in step}
        before = found.get(ns // EVERY_NS)
        counted = (before.gains[STEPS] if before is not None else 0.0) + 1
        found[ns // EVERY_NS] = Said(ns, line, (), gauges, gains={STEPS: counted})
    return list(found.values())


def _step(text: str) -> dict[str, float] | None:
    """One iteration, None for a line that is none, or is not whole."""
    if C_JSON in text:
        return _older(text)
    found = ITERATION.search(text)
    if found is None or (host := HOST.search(found["rest"])) is None or "states = {" not in found["rest"]:
        return None
    if not text.rstrip().endswith("}") and not re.search(r"\}(?:, \w+ = [\w.]+)*$", text.rstrip()):
        return None
    step = {"rank": float(found["rank"]), "host_ms": float(host["ms"]) if host["ms"] else 1000 * float(host["s"])}
    if (device := DEVICE.search(found["rest"])) is not None:
        step["device_ms"] = float(device["ms"])
    if (scheduled := SCHEDULED.search(found["rest"])) is not None:
        step["running"] = float(scheduled[1])
    if (kv := KV_USE.search(found["rest"])) is not None:
        step["kv_use"] = float(kv["share"]) / (100 if kv["percent"] else 1)
    if (states := STATES.search(found["rest"])) is not None:
        step["prefills"], step["prompt_tokens"] = float(states["prefills"]), float(states["tokens"])
    return step


def _older(text: str) -> dict[str, float] | None:
    try:
        entry: Any = json.loads(text[text.index("{") :])
        blocks = float(entry["Max KV cache blocks"])
        return {
            "running": float(entry["Scheduled Requests"]),
            "active": float(entry["Active Request Count"]), "prefills": float(entry["Context Requests"]),
            "waiting": float(entry["Active Request Count"]) - float(entry["Scheduled Requests"]),
        } | ({"kv_use": float(entry["Used KV cache blocks"]) / blocks} if blocks else {})  # fmt: skip
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _settings(lines: list[Line]) -> tuple[dict[str, Setting], str | None]:
    found: dict[str, Setting] = {}
    version = None
    for line in lines:
        if (kv := KV_TOKENS.search(line.text)) is not None:
            found |= {"kv_cache_tokens": int(kv["tokens"]), "kv_cache_gib": float(kv["gib"])}
        if (stated := VERSION.search(line.text)) is not None:
            version = stated["version"]
    return found, version


def _means(steps: list[dict[str, float]]) -> BenchmarkFigures | None:
    figures = []
    for name, ours, unit in (
        ("host_ms", "host_step_ms", "ms"), ("device_ms", "device_step_ms", "ms"), ("running", "running", "requests"),
        ("active", "active", "requests"), ("kv_use", "kv_use", "share"),
        ("prompt_tokens", "prompt_tokens_of_a_step", "tokens"),
    ):  # fmt: skip
        values = [step[name] for step in steps if name in step and (step.get("running", 1.0) or step.get("active"))]
        if values:
            figures += [
                Figure(name=ours, statistic=statistic, value=value, unit=unit, clock=BY_SERVER)
                for statistic, value in (("mean", fmean(values)), ("median", median(values)), ("max", max(values)))
            ]
    if not figures:
        return None
    figures.append(Figure(name="steps", statistic="total", value=float(len(steps)), unit="steps", clock=BY_SERVER))
    return BenchmarkFigures(tool="TensorRT-LLM log", figures=figures)
