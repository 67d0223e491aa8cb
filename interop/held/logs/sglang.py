"""SGLang's log: `Prefill batch` and `Decode batch` lines of versions since 0.3, and what it says at its start.

A decode line's throughput is over the time since the decode line before, whatever lay between. Prompt tokens are those
of the prefill lines, booked when they are computed. Of several tensor-parallel ranks the first one speaks.
"""

import re
from collections.abc import Callable, Iterator

from sojourn.interop.held.given import Given, Line
from sojourn.interop.held.held import BenchmarkFigures, Event, Held, Setting
from sojourn.interop.held.literals import found_in
from sojourn.interop.held.logs.clock import STAMP, clock_of, stated_elsewhere
from sojourn.interop.held.logs.events import events_of, while_serving
from sojourn.interop.held.logs.pairs import settings_in
from sojourn.interop.held.logs.series import Said, figures_of, rows_of

BATCH = re.compile(
    r"\[(?P<stamp>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)(?P<ranks>(?: [A-Z]+\d+)*)\] "
    r"(?:INFO:? )?(?P<kind>Prefill|Decode) batch(?: \[\d+\])?[.,] (?P<fields>#.*)"
)
BEGIN = re.compile(r"(?:Prefill|Decode) batch(?: \[\d+\])?[.,] #")
FIELD = re.compile(r"(?P<name>#?[A-Za-z][\w ()/\-]*?): (?P<value>-?\d+(?:\.\d+)?|True|False)(?=,|\s*$| )")
USAGE = ("token usage", "full token usage", "swa token usage", "mamba usage")
SERVER_ARGS = re.compile(r"server_args=ServerArgs(\(.*)")
STATED = re.compile(
    r"max_total_num_tokens=(?P<tokens>\d+), chunked_prefill_size=(?P<chunk>-?\d+|None), .*?"
    r"max_running_requests=(?P<cap>\d+), context_len=(?P<context>\d+)"
)
RETRACTED = re.compile(
    r"\[[\d\- :.,]+(?P<ranks>(?: [A-Z]+\d+)*)\] (?P<said>(?:INFO:? )?(?:KV cache pool is full\. Retract requests|"
    r"[Dd]ecode out of memory happened)[.,] #retracted_reqs: (?P<n>\d+).*)"
)
VERSION = re.compile(r"\bsglang[ =v]+(?P<version>\d+\.\d+\.\d+(?:[.\w]*))\b", re.IGNORECASE)
KEPT = (
    "model_path", "tp_size", "dp_size", "pp_size", "ep_size", "max_running_requests", "mem_fraction_static",
    "chunked_prefill_size", "max_prefill_tokens", "max_total_tokens", "context_length", "kv_cache_dtype", "dtype",
    "quantization", "schedule_policy", "schedule_conservativeness", "disable_radix_cache", "disable_cuda_graph",
    "cuda_graph_max_bs", "attention_backend", "page_size", "speculative_algorithm", "speculative_num_steps",
    "speculative_num_draft_tokens", "enable_dp_attention", "enable_metrics", "enable_hierarchical_cache",
    "disaggregation_mode", "disable_overlap_schedule", "max_queued_requests", "load_balance_method", "port",
)  # fmt: skip
RUNNING, WAITING, KV = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"
GENERATED, PROMPT, CACHED = "sglang:generation_tokens_total", "sglang:prompt_tokens_total", "sglang:cached_tokens_total"
RETRACTIONS = "sglang:num_retracted_requests_total"
EVERY_NS = 10**9  # between two looks: stamps are no finer
NO_LATENCY = (
    "latencies (TTFT, TPOT, queue time): SGLang's log has none; start it with --enable-metrics and give two pages of "
    "its /metrics, minutes apart"
)
BY_SERVER = "SGLang's log: its batches"


def recognises(given: Given) -> bool:
    text = given.plain
    return "server_args=ServerArgs(" in text or found_in(BEGIN, text) or found_in(RETRACTED, text)


def read(given: Given) -> list[Held]:
    lines, clock = given.lines, clock_of(given.text)
    said, starts = list(_batches(lines)), _starts(lines)
    misread = sum(len(BEGIN.findall(line.text)) for line in lines) - len(said)
    outside = stated_elsewhere([line.ns for _, _, line in said])
    moments = [line.ns if outside else clock.ns(STAMP.match(stamp)) for _, stamp, line in said]
    rows = rows_of(_said(said, moments, lines, starts), interval_s=1.0, rates_over_gaps=True)

    def moment(line: Line) -> int | None:
        return line.ns if outside else clock.ns(STAMP.search(line.text[:60]))

    version = next((found["version"] for line in lines if (found := VERSION.search(line.text))), None)
    notes = [clock.note] if clock.note and not outside else []
    if misread:
        notes.append(f"{misread} batch lines are cut off or mixed with others, and were left out")
    if rows:
        notes.append("stamps are whole seconds: what is shorter cannot be seen")
    last = [each for each in said if not starts or each[2].number > starts[-1]]
    if len(last) < len(said):
        notes.append(f"settings and means are of the last of {len(starts) + 1} starts, from line {starts[-1]}")
    missing = [NO_LATENCY]
    if not said:
        missing.append("load: no batch line; SGLang writes one every 40 decode steps")
    return [Held(
        kind="SGLang log", name=given.name, server="sglang", version=version, settings=_settings(lines),
        figures=_means(last), series=rows, notes=notes, missing=missing,
        events=while_serving(_events(lines, moment), [line.number for _, _, line in said], starts),
    )]  # fmt: skip


def _events(lines: list[Line], moment: Callable[[Line], int | None]) -> list[Event]:
    """What a rank tells again is no second event."""
    again = {number for number, (_, is_new) in _retractions(lines).items() if not is_new}
    return events_of([line for line in lines if line.number not in again], moment)


def _starts(lines: list[Line]) -> list[int]:
    """The lines at which the server was started again, behind batches of the process before."""
    starts, has_served = [], False
    for line in lines:
        if BEGIN.search(line.text):
            has_served = True
        elif has_served and SERVER_ARGS.search(line.text):
            starts.append(line.number)
            has_served = False
    return starts


def _retractions(lines: list[Line]) -> dict[int, tuple[float, bool]]:
    """Line → how many requests were retracted, and whether it is news: each tensor-parallel rank tells the same
    event, one of them first."""
    found: dict[int, tuple[float, bool]] = {}
    told: dict[tuple[str, str, str], int] = {}  # by replica, words and rank: so often
    most: dict[tuple[str, str], int] = {}
    for line in lines:
        if "#retracted_reqs" not in line.text or (said := RETRACTED.search(line.text)) is None:
            continue
        replica = " ".join(re.findall(r"DP\d+", said["ranks"]))
        event = replica, said["said"].rstrip()
        times = told[(*event, said["ranks"])] = told.get((*event, said["ranks"]), 0) + 1
        found[line.number] = float(said["n"]), times > most.get(event, 0)
        most[event] = max(times, most.get(event, 0))
    return found


Batch = tuple[dict[str, float], str, Line]  # fields and ranks, the stamp, the line


def _batches(lines: list[Line]) -> Iterator[Batch]:
    """The lines of the first tensor-parallel rank, whole."""
    whole = [(line, found) for line in lines if "atch" in line.text and (found := BATCH.search(line.text)) is not None]
    first: dict[str, int] = {}
    for _, found in whole:
        ranks = _ranks(found)
        first[f"{ranks.get('DP')}"] = min(first.get(f"{ranks.get('DP')}", 10**6), ranks.get("TP", 0))
    for line, found in whole:
        if BEGIN.search(found["fields"]):
            continue  # two lines in one
        ranks = _ranks(found)
        fields = {each["name"].strip(): _number(each["value"]) for each in FIELD.finditer(found["fields"])}
        if not _is_whole(found["kind"], fields):
            continue
        if ranks.get("TP", 0) > first[f"{ranks.get('DP')}"]:
            fields = {"other rank": 1.0}
        fields |= {"decode": float(found["kind"] == "Decode"), "dp": float(ranks.get("DP", 0))}
        yield fields, found["stamp"], line


def _ranks(found: "re.Match[str]") -> dict[str, int]:
    return {name: int(number) for name, number in re.findall(r" ([A-Z]+)(\d+)", found["ranks"])}


def _number(text: str) -> float:
    return float({"True": 1, "False": 0}.get(text, text))


def _is_whole(kind: str, fields: dict[str, float]) -> bool:
    if "#running-req" not in fields or "#queue-req" not in fields:
        return False
    if kind == "Prefill":
        return "#new-token" in fields and "#cached-token" in fields
    return "gen throughput (token/s)" in fields


def _said(said: list[Batch], moments: list[int | None], lines: list[Line], starts: list[int]) -> list[Said]:
    """One a second and replica: what came between two decode lines stands in the later one."""
    retracted = {line: number for line, (number, is_new) in _retractions(lines).items() if is_new}
    numbers, found = sorted(retracted), []
    pending: dict[float, dict[str, float]] = {}
    last_decode: dict[float, int] = {}
    begun: dict[float, int] = {}
    started: set[float] = set()  # replicas that began anew
    coming = list(starts)
    for (fields, _, line), ns in zip(said, moments, strict=True):
        if ns is None or "other rank" in fields:
            continue
        rank = fields["dp"]
        if coming and coming[0] < line.number:  # what it counts began with its process
            coming = [start for start in coming if start > line.number]
            started |= {*last_decode, *begun, rank}
            pending, last_decode, begun = {}, {}, {}
        gains = pending.setdefault(rank, dict.fromkeys((GENERATED, PROMPT, CACHED), 0.0))
        while numbers and numbers[0] < line.number:
            gains[RETRACTIONS] = gains.get(RETRACTIONS, 0.0) + retracted[numbers.pop(0)]
        if fields["decode"]:
            since = last_decode.get(rank)
            gains[GENERATED] += fields["gen throughput (token/s)"] * max(0, ns - since) / 1e9 if since else 0.0
            last_decode[rank] = max(ns, since or ns)
        else:
            gains[PROMPT] += fields["#new-token"] + fields["#cached-token"]
            gains[CACHED] += fields["#cached-token"]
        if ns - begun.get(rank, ns - EVERY_NS) < EVERY_NS:
            continue
        begun[rank] = ns
        gauges = {RUNNING: fields["#running-req"], WAITING: fields["#queue-req"]}
        if (usage := _usage(fields)) is not None:
            gauges[KV] = usage
        found.append(Said(ns, line.number, (("dp_rank", f"{rank:.0f}"),), gauges, gains=gains,
                          begins=rank in started))  # fmt: skip
        started.discard(rank)
        pending[rank] = dict.fromkeys((GENERATED, PROMPT, CACHED), 0.0)
    return found


def _settings(lines: list[Line]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for line in lines:
        if (args := SERVER_ARGS.search(line.text)) is not None:
            found = {name: value for name, value in settings_in(args[1]).items() if name in KEPT}
        if "max_total_num_tokens" in line.text and (stated := STATED.search(line.text)) is not None:
            found |= {
                "max_total_num_tokens": int(stated["tokens"]), "max_running_requests": int(stated["cap"]),
                "context_len": int(stated["context"]),
            }  # fmt: skip
            if stated["chunk"] != "None":
                found["chunked_prefill_size"] = int(stated["chunk"])
    return found


def _means(said: list[Batch]) -> BenchmarkFigures | None:
    own = [fields for fields, _, _ in said if "other rank" not in fields]
    decode = [fields for fields in own if fields["decode"]]
    prompts = [fields for fields in own if not fields["decode"]]
    fresh, cached = (sum(each[name] for each in prompts) for name in ("#new-token", "#cached-token"))
    return figures_of("SGLang log", BY_SERVER, {
        "output_tokens_per_s": ("tokens/s", [each["gen throughput (token/s)"] for each in decode]),
        "running": ("requests", [each["#running-req"] for each in decode]),
        "waiting": ("requests", [each["#queue-req"] for each in own]),
        "kv_use": ("share", [use for each in own if (use := _usage(each)) is not None]),
        "accept_length": ("tokens", [each["accept len"] for each in decode if "accept len" in each]),
        "hit_rate": ("share", [cached / (cached + fresh)] if cached + fresh else []),
    })  # fmt: skip


def _usage(fields: dict[str, float]) -> float | None:
    """Of several pools the fullest."""
    return max((fields[name] for name in USAGE if name in fields), default=None)
