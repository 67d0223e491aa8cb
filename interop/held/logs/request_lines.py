"""Logs that write a line for each request, with its own times: Dynamo's frontend, Ray Serve, TGI's router, Ollama.

What such a line states of one request becomes percentiles, and over time the counters of that server's /metrics. Ray
writes a line in its proxy, in the ingress and in the model's replica for the same request: the outermost counts.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sojourn.interop.held.given import Given, Line
from sojourn.interop.held.held import BenchmarkFigures, Event, Held, Server
from sojourn.interop.held.literals import found_in, lines_with
from sojourn.interop.held.logs.clock import STAMP, clock_of, stated_elsewhere
from sojourn.interop.held.logs.events import events_of
from sojourn.interop.held.logs.series import Said, rows_of
from sojourn.interop.held.summaries.figures import figures_of, milliseconds, told_of
from sojourn.interop.imported.result import number

PAIR = re.compile(r'(?P<name>\w+)=(?P<value>"[^"]*"|Some\([^)]*\)|[^\s,}]+)')
RAY = re.compile(
    r"(?P<replica>ServeReplica:[\w:.\-]+|ProxyActor)?.*? -- (?P<verb>[A-Z]+) (?P<path>\S+) (?P<code>\d{3}|OK|ERROR\w*) "
    r"(?P<ms>[\d.]+) ?ms"
)
GIN = re.compile(
    r"\[GIN\] (?P<day>\d{4}/\d\d/\d\d) - (?P<clock>\d\d:\d\d:\d\d) \| (?P<code>\d{3}) \| +(?P<took>\S+) \| .*"
    r'POST +"(?P<path>/(?:api/(?:generate|chat)|v1/(?:chat/)?completions)[^"]*)"'
)
EVERY_NS = 10**9


class Asked(NamedTuple):
    """What one line says of one request."""

    line: Line
    values: dict[str, float]  # by our names
    failed: bool = False
    depth: int = 0  # how far inside the server the line was written: only the outermost counts
    when: str = ""  # where the stamp is no usual one


class Form(NamedTuple):
    """One server's line. `samples`: of each our figure, the histogram of its /metrics, in seconds or tokens."""

    server: Server
    title: str
    begin: re.Pattern[str]
    read: Callable[[Line], Asked | None]
    clocks: Mapping[str, str]
    ended: str = ""
    samples: Mapping[str, str] = {}
    missing: tuple[str, ...] = ()


def _pairs(text: str) -> dict[str, str]:
    return {found["name"]: found["value"].strip('"').removeprefix("Some(").removesuffix(")")
            for found in PAIR.finditer(text)}  # fmt: skip


def _dynamo(line: Line) -> Asked | None:
    if line.text.startswith("{"):
        try:
            said: Any = json.loads(line.text)
        except (ValueError, RecursionError):
            return None
        stated = {str(key): str(value) for key, value in said.items()} | (said.get("fields") or {})
    else:
        stated = _pairs(line.text)
    names = {"ttft_ms": "ttft_ms", "elapsed_ms": "e2e_ms", "avg_itl_ms": "tpot_ms", "input_tokens": "input_tokens",
             "output_tokens": "output_tokens"}  # fmt: skip
    values = _numbers({ours: stated.get(theirs) for theirs, ours in names.items()})
    if "e2e_ms" not in values:
        return None
    return Asked(line, values, str(stated.get("status", "success")).lower() not in ("success", "200"))


def _tgi(line: Line) -> Asked | None:
    stated = _pairs(line.text)
    names = {"total_time": "e2e_ms", "queue_time": "queue_ms", "time_per_token": "e2e_per_token_ms"}
    values = {ours: ms for theirs, ours in names.items() if (ms := milliseconds(stated.get(theirs, ""))) is not None}
    return Asked(line, values) if "e2e_ms" in values else None


def _ray(line: Line) -> Asked | None:
    found = RAY.search(line.text)
    if found is None or found["verb"] == "GET":
        return None
    is_proxy = found["replica"] == "ProxyActor" or " proxy " in line.text[:200]
    depth = 0 if is_proxy else 1 if found["verb"] == "POST" else 2
    wrong = found["code"].startswith(("ERROR", "4", "5"))
    return Asked(line, {"e2e_ms": float(found["ms"])}, wrong, depth)


def _ollama(line: Line) -> Asked | None:
    found = GIN.search(line.text)
    took = milliseconds(found["took"]) if found is not None else None
    if found is None or took is None:
        return None
    when = f"{found['day'].replace('/', '-')} {found['clock']}"
    return Asked(line, {"e2e_ms": took}, found["code"][0] != "2", when=when)


def _numbers(stated: Mapping[str, Any]) -> dict[str, float]:
    found = {name: number(value) for name, value in stated.items()}
    return {name: value for name, value in found.items() if value is not None}


HTTP = "its HTTP front: from the request's arrival to the end of the answer"
FORMS = (
    Form(
        "dynamo", "Dynamo's frontend log", re.compile(r"request completed.*\belapsed_ms|elapsed_ms.*request completed"),
        _dynamo,
        {"e2e_ms": f"Dynamo: {HTTP}", "ttft_ms": "Dynamo: the frontend's receipt to its first token",
         "tpot_ms": "Dynamo: mean gap between tokens of a request (avg_itl_ms)"},
        "dynamo_frontend_requests_total",
        {"ttft_ms": "dynamo_frontend_time_to_first_token_seconds", "e2e_ms": "dynamo_frontend_request_duration_seconds",
         "output_tokens": "dynamo_frontend_output_tokens_total"},
        ("what happens in a worker: give the log or the page of one",),
    ),
    Form(
        "tgi", "TGI's log", re.compile(r'total_time="[^"]+".*inference_time="'), _tgi,
        {"e2e_ms": "TGI: validation, queue and inference", "queue_ms": "TGI: in the router's line, until batched",
         "e2e_per_token_ms": "TGI: inference by tokens, the prompt's time included (time_per_token)"},
        "tgi_request_success", {"e2e_ms": "tgi_request_duration", "queue_ms": "tgi_request_queue_duration"},
        ("a time to first token: TGI's log has none", "requests that failed: this line is of the others"),
    ),
    Form(
        "ray", "Ray Serve's log", re.compile(r" -- (?:POST|CALL) \S+ (?:\d{3}|OK|ERROR\w*) [\d.]+ ?ms"), _ray,
        {"e2e_ms": f"Ray Serve: {HTTP}; of a stream to its last chunk"},
        missing=("tokens and a time to first token: Ray Serve's lines have none; give the engine's page of /metrics",),
    ),
    Form(
        "ollama", "Ollama's log", re.compile(GIN.pattern.partition(" \\| ")[0] + r".*POST +\"/(?:api|v1)/"), _ollama,
        {"e2e_ms": f"Ollama: {HTTP}"},
        missing=("tokens and phases: they are in the answers (eval_count, eval_duration); give those",),
    ),
)  # fmt: skip


def _forms(given: Given) -> Iterator[Form]:
    yield from (form for form in FORMS if found_in(form.begin, given.plain))


def recognises(given: Given) -> bool:
    return any(True for _ in _forms(given))


def read(given: Given) -> list[Held]:
    return [_held(given, form) for form in _forms(given)]


def _held(given: Given, form: Form) -> Held:
    near = lines_with(given.lines, [form.begin], given.plain)
    chosen = [line for line in near if form.begin.search(line.text) is not None]
    every = [each for line in chosen if (each := form.read(line)) is not None]
    outermost = min((each.depth for each in every), default=0)
    asked = [each for each in every if each.depth == outermost]
    notes = []
    if inner := len(every) - len(asked):
        notes.append(f"{inner} lines of the same requests, written further inside, were left out")
    if cut := len(chosen) - len(every):
        notes.append(f"{cut} lines of requests are cut off, and were left out")
    clock = clock_of(given.text)
    outside = stated_elsewhere([each.line.ns for each in asked])
    moments = [each.line.ns if outside else clock.ns(STAMP.search(each.when or each.line.text[:200])) for each in asked]
    notes += [clock.note] if clock.note and not outside and asked else []
    figures = figures_of(form.clocks, _told(asked, moments), form.title)
    return Held(
        kind=form.title, name=given.name, server=form.server, notes=notes, missing=list(form.missing),
        figures=BenchmarkFigures(tool=form.title, figures=figures), series=_series(form, asked, moments),
        events=_events(given, form), is_wall_clock=clock.is_wall_clock or outside,
    )  # fmt: skip


def _told(asked: list[Asked], moments: list[int | None]) -> dict[tuple[str, str], tuple[Any, float, str]]:
    good = [each.values for each in asked if not each.failed]
    names = sorted({name for each in good for name in each})
    told: Any = told_of({name: [each[name] for each in good if name in each] for name in names}, "lines of requests")
    told |= {("succeeded", "total"): (len(good), 1.0, "lines"),
             ("failed", "total"): (len(asked) - len(good), 1.0, "lines")}  # fmt: skip
    known = [ns for ns in moments if ns is not None]
    lasted_s = (max(known) - min(known)) / 1e9 if known else 0.0
    if lasted_s > 0:
        told["duration_s", "total"] = lasted_s, 1.0, "stamps"
        told["requests_per_s", "rate"] = len(good) / lasted_s, 1.0, "stamps"
    return told


def _events(given: Given, form: Form) -> list[Event]:
    """Of Dynamo and TGI: logs of the other two carry those of an engine, whose reader tells them."""
    return events_of(given.lines, lambda line: line.ns) if form.ended else []


def _series(form: Form, asked: list[Asked], moments: list[int | None]) -> list[dict[str, Any]]:
    """Counters as the server's own page has them, a look a second. A request stands in the look of its end."""
    if not form.ended:
        return []
    looks: dict[int, dict[str, float]] = {}
    for each, ns in zip(asked, moments, strict=True):
        if ns is None:
            continue
        gains = looks.setdefault(ns // EVERY_NS, {})
        gains[form.ended] = gains.get(form.ended, 0.0) + 1
        for name, sample in form.samples.items():
            if name not in each.values or each.failed:
                continue
            is_time = name.endswith("_ms")
            parts = {f"{sample}_sum": each.values[name] / 1e3, f"{sample}_count": 1.0} if is_time else {
                sample: each.values[name]}  # fmt: skip
            for sample_name, gain in parts.items():
                gains[sample_name] = gains.get(sample_name, 0.0) + gain
    said = [Said(second * EVERY_NS, 0, (), {}, gains=gains) for second, gains in sorted(looks.items())]
    return rows_of(said, 1.0, rates_over_gaps=True)
