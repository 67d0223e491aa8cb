"""llama-server's log: the timings of each task, of versions since 2023, as text and as JSON lines.

A task's prompt time is that of the tokens that were computed; what the cache had is not in it. Lines have stamps only
in newer versions, and then those since the start.
"""

import re
from statistics import fmean, median

from sojourn.interop.held.given import Given, Line
from sojourn.interop.held.held import BenchmarkFigures, Event, Figure, Held, Setting
from sojourn.interop.held.literals import found_in
from sojourn.interop.held.logs.clock import stated_elsewhere
from sojourn.interop.held.logs.events import events_of
from sojourn.interop.held.logs.series import Said, rows_of

PROMPT = re.compile(r"prompt eval time\s*=\s*(?P<ms>[\d.]+) ms\s*/\s*(?P<tokens>\d+) tokens\b")
EVAL = re.compile(r"(?<!prompt )\beval time\s*=\s*(?P<ms>[\d.]+) ms\s*/\s*(?P<tokens>\d+) (?:tokens|runs)\b")
SINCE_START = re.compile(r"(?:\[\d+\] )?(?P<min>\d+)\.(?P<s>\d\d)\.(?P<ms>\d{3})\.(?P<us>\d{3}) [DIWE] ")
TASK = re.compile(r"\btask (?P<task>\d+) \|")
NEW_PROMPT = re.compile(
    r"new prompt, n_ctx_slot = (?P<context>\d+), n_keep = \d+, (?:task\.)?n_(?:prompt_)?tokens = (?P<n>\d+)"
)
UNDER_WAY = re.compile(r"\bn_(?:decoded|gen) = +(?P<n>\d+), tg = +(?P<rate>[\d.]+) t/s")
AGAIN = "forcing full prompt re-processing"
WHY_AGAIN = (
    "a whole prompt was computed again, because the cache could not go back (sliding window or recurrent layers)"
)
TRUNCATED = re.compile(r"stop processing: n_(?:past|tokens) = \d+, truncated = 1")
STATED = {
    "n_ctx": re.compile(r"(?:llama_context|\w*new_context\w*|llama_init_from_model): n_ctx\s+= (\d+)"),
    "n_batch": re.compile(r": n_batch\s+= (\d+)"),
    "n_ubatch": re.compile(r": n_ubatch\s+= (\d+)"),
    "flash_attn": re.compile(r": flash_attn\s+= (\w+)"),
    "n_slots": re.compile(r"(?:initializing slots|initializing), n_slots = (\d+)"),
    "n_parallel": re.compile(r"n_parallel\s+(?:is set to|=) (\d+)"),
    "n_threads": re.compile(r"n_threads = (\d+)"),
    "layers_on_gpu": re.compile(r"offloaded (\d+)/\d+ layers to GPU"),
    "kv_mib": re.compile(r"KV (?:self )?(?:buffer )?size\s+=\s+([\d.]+) MiB"),
}  # fmt: skip
BUILD = re.compile(r"(?:build: |build_info: b?)(\d{3,6})\b")
IDLE = "all slots are idle"
RUNNING = "llamacpp:requests_processing"
PROMPTS, GENERATED = "llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"
BY_SERVER = "llama-server: slot timings of each task"
BEGIN = re.compile(
    r"print_timings?\b|llama_perf_context_print|slot (?:launch_slot_|update_slots|print_timing)|llama_server"
)


def recognises(given: Given) -> bool:
    text = given.plain
    return found_in(BEGIN, text) and ("eval time" in text or "slot " in text or "llama_" in text)


def read(given: Given) -> list[Held]:
    lines = given.lines
    prompts, evals, cut = _timings(lines)
    settings, build = _settings(lines)
    again = [line.number for line in lines if AGAIN in line.text]
    truncated = sum(bool(TRUNCATED.search(line.text)) for line in lines)
    notes = []
    if cut:
        notes.append(f"{cut} timings are cut off or mixed with others, and were left out")
    if (asked := _of_one_task(lines)) and all(computed <= whole for computed, whole in asked):
        computed, whole = (sum(each) for each in zip(*asked, strict=True))
        if whole:
            notes.append(
                f"{1 - computed / whole:.0%} of {whole:,} prompt tokens came from the cache ({len(asked)} tasks)"
            )
    if truncated:
        notes.append(f"{truncated} answers were cut short by the context")
    events = events_of(lines, lambda line: line.ns or _since_start_ns(line))
    missing = [
        "a queue: the log does not say how long a task waited for a slot; start llama-server with --metrics and give "
        "two pages of /metrics, minutes apart"
    ]
    if not prompts and not evals:
        missing.append("timings: no task has ended in this log")
    if again:
        events = [event for event in events if "whole prompt was computed again" not in event.sentence]
        events.append(Event(kind="warning", line=again[0], times=len(again), sentence=WHY_AGAIN))
    return [Held(
        kind="llama.cpp log", name=given.name, server="llama.cpp", version=build, settings=settings,
        figures=_means(prompts, evals) or _under_way(lines), events=sorted(events, key=lambda event: event.line),
        is_wall_clock=stated_elsewhere([line.ns for line in lines if "eval time" in line.text]),
        series=rows_of(_said(lines), 1.0, rates_over_gaps=True), notes=notes, missing=missing,
    )]  # fmt: skip


class _Tasks:
    """Owns what tasks have counted up to a line: tokens since the last look, and who runs."""

    def __init__(self) -> None:
        self.looks: list[Said] = []
        self.running: set[str] = set()
        self._under_way: dict[str, int] = {}  # task → tokens that it has generated
        self._gains = {PROMPTS: 0.0, GENERATED: 0.0}

    def count_prompt(self, tokens: int) -> None:
        self._gains[PROMPTS] += tokens

    def count(self, task: str, tokens: int, *, has_ended: bool) -> None:
        """Tokens of a task since its start. Of one that was under way before the log, those before are unknown."""
        before = self._under_way.pop(task, 0 if has_ended else tokens)
        self._gains[GENERATED] += max(0, tokens - before)
        if not has_ended:
            self._under_way[task] = tokens
            self.running.add(task)

    def look(self, ns: int, line: Line, running: int) -> None:
        self.looks.append(Said(ns, line.number, (), {RUNNING: float(running)}, gains=self._gains))
        self._gains = {PROMPTS: 0.0, GENERATED: 0.0}


def _said(lines: list[Line]) -> list[Said]:
    """A look at each end of a task, and where the log states how far one is: what was counted, and how many ran. A
    line without a moment of its own has that of the line before, as those of one task's timings do."""
    tasks, ns, last = _Tasks(), None, ""
    for line in lines:
        ns = line.ns or _since_start_ns(line) or ns
        if ns is None:
            continue
        if not tasks.looks:  # nothing is counted of the time before the log
            tasks.look(ns, line, 0)
        named = TASK.search(line.text)
        last = named["task"] if named is not None else last
        if (prompt := PROMPT.search(line.text)) is not None:
            tasks.count_prompt(int(prompt["tokens"]))
        elif (ended := EVAL.search(line.text)) is not None:
            tasks.count(last, int(ended["tokens"]), has_ended=True)
            tasks.look(ns, line, len(tasks.running) or 1)
        elif named is not None and (under_way := UNDER_WAY.search(line.text)) is not None:
            tasks.count(last, int(under_way["n"]), has_ended=False)
            tasks.look(ns, line, len(tasks.running))
        elif named is not None and "launch_slot_" in line.text:
            tasks.running.add(last)
        elif named is not None and "stop processing" in line.text:
            tasks.running.discard(last)
        elif IDLE in line.text:
            tasks.running.clear()
            tasks.look(ns, line, 0)
    return tasks.looks


Timing = tuple[float, int]  # ms, tokens


def _timings(lines: list[Line]) -> tuple[list[Timing], list[Timing], int]:
    prompts, evals, cut = [], [], 0
    for line in lines:
        if "eval time" not in line.text:
            continue
        prompt, generation = PROMPT.search(line.text), EVAL.search(line.text)
        if prompt is not None:
            prompts.append((float(prompt["ms"]), int(prompt["tokens"])))
        elif generation is not None:
            evals.append((float(generation["ms"]), int(generation["tokens"])))
        else:
            cut += 1
    return prompts, evals, cut


def _of_one_task(lines: list[Line]) -> list[tuple[int, int]]:
    """Computed and all prompt tokens of each task that has both."""
    sizes: dict[str, int] = {}
    found, last = [], None
    for line in lines:
        if (named := TASK.search(line.text)) is not None:
            last = named["task"]
        if (size := NEW_PROMPT.search(line.text)) is not None and named is not None:
            sizes[named["task"]] = int(size["n"])
        elif (prompt := PROMPT.search(line.text)) is not None and last in sizes:
            found.append((int(prompt["tokens"]), sizes.pop(last)))
    return found


def _since_start_ns(line: Line) -> int | None:
    found = SINCE_START.match(line.text)
    if found is None:
        return None
    return ((int(found["min"]) * 60 + int(found["s"])) * 10**6 + int(found["ms"]) * 1000 + int(found["us"])) * 1000


def _settings(lines: list[Line]) -> tuple[dict[str, Setting], str | None]:
    found: dict[str, Setting] = {}
    build = None
    for line in lines:
        if build is None and (number := BUILD.search(line.text)) is not None:
            build = f"b{number[1]}"
        for name, pattern in STATED.items():
            if name not in found and (stated := pattern.search(line.text)) is not None:
                text = stated[1]
                found[name] = int(text) if text.isdigit() else float(text) if text.replace(".", "").isdigit() else text
        if (prompt := NEW_PROMPT.search(line.text)) is not None:
            found["n_ctx_slot"] = int(prompt["context"])
    return found, build


def _under_way(lines: list[Line]) -> BenchmarkFigures | None:
    """Of a log in which no task ends: the rate of those that run, which the last line of each states."""
    last: dict[str, float] = {}
    for line in lines:
        task, found = TASK.search(line.text), UNDER_WAY.search(line.text)
        if task is not None and found is not None:
            last[task["task"]] = float(found["rate"])
    figures = [Figure(name="decode_tokens_per_s_of_a_slot", statistic="rate", value=fmean(last.values()),
                      unit="tokens/s", clock=BY_SERVER)] if last else []  # fmt: skip
    return BenchmarkFigures(tool="llama.cpp log", figures=figures) if figures else None


def _means(prompts: list[Timing], evals: list[Timing]) -> BenchmarkFigures | None:
    if not prompts and not evals:
        return None
    by_task = {
        "prefill_ms": [ms for ms, _ in prompts],
        "computed_prompt_tokens": [float(tokens) for _, tokens in prompts],
        "tpot_ms": [ms / tokens for ms, tokens in evals if tokens > 1],
        "output_tokens": [float(tokens) for _, tokens in evals],
    }
    figures = [
        Figure(name=name, statistic=statistic, value=value, unit="ms" if name.endswith("_ms") else "tokens",
               clock=BY_SERVER)
        for name, values in by_task.items() if values
        for statistic, value in (("mean", fmean(values)), ("median", median(values)), ("max", max(values)))
    ]  # fmt: skip
    for name, timings in (("prefill_tokens_per_s", prompts), ("decode_tokens_per_s_of_a_slot", evals)):
        ms, tokens = (sum(each) for each in zip(*timings, strict=True)) if timings else (0.0, 0)
        if ms > 0:
            figures.append(Figure(name=name, statistic="rate", value=1000 * tokens / ms, unit="tokens/s",
                                  clock=BY_SERVER))  # fmt: skip
    ended = float(len(evals))
    figures.append(Figure(name="requests", statistic="total", value=ended, unit="requests", clock=BY_SERVER))
    return BenchmarkFigures(tool="llama.cpp log", figures=figures)
