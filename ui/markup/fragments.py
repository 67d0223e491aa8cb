"""Pieces of HTML that the app and the report share. Everything that comes from a run is escaped here."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pandas as pd

from sojourn.diagnosis.expectation import is_expectation
from sojourn.diagnosis.verdict import Diagnosis, Finding, SymptomCheck, rivals_fix
from sojourn.metrics.compute.weight_error import weight_error_of
from sojourn.metrics.ledger import CLOSURE_NS, CLOSURE_SHARE, COLOURS
from sojourn.metrics.machine.client_error import client_error_sentence
from sojourn.metrics.memory.prefix_share import prefix_share
from sojourn.metrics.run.join import uncertainty_sentence
from sojourn.ui.run_data import RunData
from sojourn.ui.tables.request import throughput_tokens_per_s
from sojourn.ui.text import NOTHING, duration, missing, number, percent, prose, safe
from sojourn.ui.theme import BAD, GOOD, MUTED, STATE_COLOURS, ink_on

CSS_FILE = Path(__file__).parents[1] / "style.css"
STATUS_COLOURS = {"present": BAD, "absent": GOOD, "unknown": "var(--sj-line-bold)"}
ID_COLUMNS, LONGEST_ID = ("request", "victim", "its blocks went to", "server"), 40  # characters that stay on one line
KIND_MEANING = {
    "capacity": "more hardware, or less load",
    "policy": "a setting, at no cost",
    "workload": "what is sent, and when",
    "client": "outside of the server",
    "fault": "something is slower than it should be",
}
TEXT_COLUMNS = {
    "request", "class", "tenant", "status", "error", "largest account", "victim", "its blocks went to", "kernel",
    "latency (ms)", "model", "day", "key", "route", "figure", "result", "server", "best server", "own settings",
    "account", "differs", "metric", "run", "verdict", "why", "who", "is a", "by", "memory", "medium",
}  # fmt: skip
Tile = tuple[str, str, str, str]  # name, value, unit, detail


def wrap(inner: str) -> str:
    return f'<div class="sj">{inner}</div>'


def headline(run: RunData) -> str:
    """The state of a run and its first cause in one sentence, or why there is none."""
    if run.diagnosis is None:
        return state("inconclusive", "inconclusive", run.no_diagnosis)
    return state(run.diagnosis.state, run.diagnosis.state, run.diagnosis.headline)


def state(name: str, word: str, sentence: str) -> str:
    """A sentence under a word, in the colour of one of STATE_COLOURS; further sentences stand below it."""
    first, _, rest = sentence.partition(". ")
    more = f'<div class="sj-small">{prose(rest)}</div>' if rest else ""
    return wrap(
        f'<div class="sj-headline" style="--state:{STATE_COLOURS[name]}"><div class="sj-state">{safe(word)}</div>'
        f'<div class="sj-sentence">{prose(first)}</div>{more}</div>'
    )


def about(run: RunData) -> str:
    """Which run this is: name, scenario, model and device, as far as run.json tells, and what is left out of it."""
    engine = run.meta.get("engine")
    engine = engine if isinstance(engine, dict) else {}
    served = engine.get("served")  # the server's own description of itself
    known = engine | ((served.get("engine") or {}) if isinstance(served, dict) else {})
    parts = [f"run {run.name}", f"scenario {scenario_name(run.meta)}"]
    parts += [f"{key} {known[key]}" for key in ("model", "device", "dtype") if known.get(key)]
    parts += _weights(run.meta)
    hardware = run.meta.get("hardware")
    if isinstance(hardware, dict):
        parts += [f"{hardware['cores']} cores"] if hardware.get("cores") else []
        parts += [str(gpu.get("name", gpu) if isinstance(gpu, dict) else gpu) for gpu in hardware.get("gpus") or []]
    if run.warmup:
        parts.append(f"{run.warmup} warm-up {'request' if run.warmup == 1 else 'requests'} left out")
    if run.diagnosis is not None and run.diagnosis.against:
        parts.append(f"against {run.diagnosis.against}")
    return wrap(f'<div class="sj-about">{" · ".join(map(safe, parts))}</div>')


def _weights(meta: dict[str, Any]) -> list[str]:
    """How the weights are held, and their error, beside the speed that they give."""
    core = meta.get("core")
    core = core if isinstance(core, dict) else {}
    parts = [f"weights {core['weights']}"] if core.get("weights") not in (None, core.get("dtype")) else []
    error = weight_error_of(meta)
    return parts if error is None else [*parts, error.sentence()]


def scenario_name(meta: dict[str, Any]) -> str:
    scenario = meta.get("scenario")
    return str(scenario.get("name", "unnamed") if isinstance(scenario, dict) else scenario or "unnamed")


def key_numbers(run: RunData) -> list[Tile]:
    """What a reader asks first, each with its unit and the number of requests it rests on."""
    sent, served = len(run.requests), int((run.requests.status == "ok").sum())
    outcome = f"{served:,} succeeded, {sent - served:,} failed"
    detail = f"of a sample of {sent:,}: {outcome}" if run.is_sample else outcome
    tiles: list[Tile] = [("requests", f"{run.num_requests:,}", "sent", detail)]
    goodput = run.diagnosis.goodput if run.diagnosis is not None else []
    whole = goodput[0] if goodput else None
    if whole is not None:
        due_rps = whole.window.due_rps if whole.window is not None else None
        due = "" if due_rps is None else f", offered {number(due_rps)}/s"
        bounds = run.meta.get("objectives") or []
        if bounds:
            good = f"{whole.good:,} of {whole.sent:,} were good{due}"
            within = "twice their own work" if is_expectation(bounds) else "all objectives"
            tiles.append(("goodput", number(whole.goodput_rps), "req/s", good))
            tiles.append(("attainment", percent(whole.attainment), "", f"of {whole.sent:,} sent, {within}"))
        else:
            tiles.append(("goodput", NOTHING, "", f"no objective is named{due}"))
    rate = throughput_tokens_per_s(run.requests)
    if rate is not None and run.is_sample:
        rate *= run.num_requests / sent
    tiles.append(("output", number(rate), "tokens/s", f"n = {served:,} served requests"))
    for latency, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT")):
        for quantile in ("p50", "p90"):
            known = int(run.requests[latency].notna().sum())
            if whole is not None:
                value = whole.quantiles_ms.get(latency, {}).get(quantile)
            else:
                value = float(run.requests[latency].quantile(int(quantile[1:]) / 100))
            tiles.append((f"{name} {quantile}", number(value), "ms", f"n = {known:,}"))
    share = prefix_share(run.meta, run.requests)
    if share is not None:
        detail = f"ideal {percent(share.ideal)}: {share.infinite_cache}"
        tiles.append(("prefix cache", percent(share.achieved), "of prompt tokens", detail))
    return tiles


def tiles(items: list[Tile]) -> str:
    """Key numbers side by side."""
    boxes = [
        f'<div class="sj-tile"><div class="sj-name">{safe(name)}</div><div class="sj-value">{safe(value)}'
        f"{f'<small>{safe(unit)}</small>' if unit and value != NOTHING else ''}</div>"
        f'<div class="sj-detail">{safe(detail)}</div></div>'
        for name, value, unit, detail in items
    ]
    return wrap(f'<div class="sj-tiles">{"".join(boxes)}</div>')


def closure(diagnosis: Diagnosis) -> str:
    """Whether the accounts explain what the client measured."""
    found = diagnosis.closure
    if not found.joined:
        return wrap('<p class="sj-small sj-muted">Closure: no request was recorded by both client and server.</p>')
    colour = STATUS_COLOURS["absent" if found.closed == found.joined else "present"]
    bound = f"{percent(CLOSURE_SHARE)} and {duration(CLOSURE_NS)}"
    worst = f"worst {percent(found.worst_share)}, {duration(found.worst_ns)}"
    return wrap(
        f'<p class="sj-small">{dot(colour)}<b>Closure</b>: in {found.closed:,} of '
        f"{found.joined:,} requests the accounts sum to the client’s latency within {bound} ({worst}).</p>"
    )


def clocks(meta: dict[str, Any]) -> str:
    """How far client.network can be trusted; nothing where client and server shared a clock."""
    sentence = uncertainty_sentence(meta)
    return wrap(f'<div class="sj-warning">{prose(sentence)}.</div>' if sentence else "")


def client_error(meta: dict[str, Any]) -> str:
    """How wrong the load generator itself is at the run's load; nothing where none of ours recorded the run."""
    error = meta.get("client_error")
    line = f'<p class="sj-small sj-muted">Client error: {prose(client_error_sentence(error))}.</p>' if error else ""
    return wrap(line)


def lines(found: Iterable[str]) -> str:
    """Sentences below each other."""
    return wrap("".join(f'<p class="sj-small">{prose(each)}</p>' for each in found))


def warnings(diagnosis: Diagnosis) -> str:
    return wrap("".join(f'<div class="sj-warning">{prose(text)}</div>' for text in diagnosis.warnings))


def chip(lifecycle: str) -> str:
    colour = COLOURS.get(lifecycle, MUTED)
    return f'<span class="sj-chip" style="background:{colour};color:{ink_on(colour)}">{safe(lifecycle)}</span>'


def finding(number_: int, found: Finding) -> str:
    """A finding as a card: symptom → lifecycle → cause, evidence, probe, fix."""
    first = found.lifecycles[0] if found.lifecycles else "client"
    lost = ""
    if not missing(found.goodput_lost):
        lost = (
            f'<div class="sj-lost"><b>{percent(found.goodput_lost)}</b><br>'
            f'<span class="sj-small sj-muted">of sent requests miss {"it" if found.objective else "an objective"}'
            "</span></div>"
        )
    who = " · ".join(safe(part) for part in (found.objective, found.cohort) if part)
    arrow = '<span class="sj-arrow">→</span>'
    lifecycles = " ".join(chip(name) for name in found.lifecycles)
    kind = f'<span class="sj-chip sj-kind">{safe(found.kind)}</span>'
    return wrap(
        f'<article class="sj-card" style="--lifecycle:{COLOURS.get(first, MUTED)}">'
        f"<header>{lost}<h3>{number_}. {_role(found)}{safe(found.title)}</h3>"
        f'<div class="sj-small sj-muted">{who}&nbsp;</div></header>'
        f'<div class="sj-path">{safe(found.title)}{arrow}{lifecycles}{arrow}{safe(found.object)}{arrow}'
        f'<b>{prose(found.cause)}</b> {kind} <span class="sj-small sj-muted">{KIND_MEANING[found.kind]}</span></div>'
        f'<div class="sj-columns"><section>{_evidence(found)}</section><section>{_probe(found)}</section>'
        f"<section>{_fix(found)}</section></div></article>"
    )


def _role(found: Finding) -> str:
    if found.role != "alternative":
        return ""
    return f'<span class="sj-chip sj-kind">{"a consequence" if found.follows else "or else"}</span> '


def _evidence(found: Finding) -> str:
    parts = []
    for title, css, supports in (("Evidence for", "sj-for", True), ("Evidence against", "sj-against", False)):
        items = [
            f'<li class="{css}">{prose(item.statement)} <span class="sj-small sj-muted">{safe(item.source)}</span></li>'
            for item in found.evidence
            if item.supports is supports
        ]
        listed = f'<ul class="sj-evidence">{"".join(items)}</ul>'
        parts.append(f"<h4>{title}</h4>" + (listed if items else '<p class="sj-muted">none was found</p>'))
    return "".join(parts)


def _probe(found: Finding) -> str:
    probe = found.probe
    command = f'<code class="sj-line">{safe(probe.command)}</code>' if probe.command else ""
    return (
        f"<h4>What would prove it</h4><p>{prose(probe.measurement)}</p>{command}"
        f'<dl class="sj-outcomes"><dt>if so</dt><dd>{prose(probe.if_cause)}</dd>'
        f"<dt>rival</dt><dd>{prose(probe.rival)}</dd><dt>if rival</dt><dd>{prose(probe.if_rival)}"
        f"{f'<br>{prose(rivals_fix(found))}' if rivals_fix(found) else ''}</dd></dl>"
    )


def _fix(found: Finding) -> str:
    fix = found.fix
    return (
        f"<h4>What to change</h4><p>{prose(fix.change)}</p>"
        f'<dl class="sj-outcomes"><dt>gain</dt><dd>{safe(fix.gain)}</dd>'
        f"<dt>rests on</dt><dd>{safe(fix.basis)}</dd></dl>"
    )


def checks(items: list[SymptomCheck]) -> str:
    """The six symptoms, whether the run shows each, and why."""
    rows = [
        [dot(STATUS_COLOURS[item.status]) + safe(item.title),
         f'<span class="sj-muted">{item.status}</span>', prose(item.reason),
         " ".join(map(chip, item.lifecycles))]
        for item in items
    ]  # fmt: skip
    return html_table(["symptom", "this run", "because", "lifecycles"], rows, ids=(0, 1))


def dot(colour: str) -> str:
    return f'<span class="sj-dot" style="--dot:{colour}"></span>'


def html_table(
    columns: list[str], rows: list[list[str]], right: tuple[int, ...] = (), ids: tuple[int, ...] = ()
) -> str:
    """Cells are HTML; the columns in `right` are numbers and stand right, those in `ids` do not wrap."""
    css = [
        ' class="sj-right"' if place in right else ' class="sj-id"' if place in ids else ""
        for place in range(len(columns))
    ]
    head = "".join(f"<th{css[place]}>{safe(name)}</th>" for place, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(f"<td{css[place]}>{cell}</td>" for place, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return wrap(f'<table class="sj-table"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def table(columns: list[str], rows: list[list[Any]], right: tuple[int, ...] = ()) -> str:
    """As `html_table`; cells are text and numbers."""
    ids = tuple(
        place for place, name in enumerate(columns)
        if name in ID_COLUMNS and all(len(str(row[place])) <= LONGEST_ID for row in rows)
    )  # fmt: skip
    return html_table(columns, [[safe(value) for value in row] for row in rows], right, ids)


def data_table(rows: pd.DataFrame) -> str:
    """All columns but TEXT_COLUMNS are numbers and stand right."""
    right = tuple(place for place, name in enumerate(rows.columns) if name not in TEXT_COLUMNS)
    cells = rows.astype(object).where(rows.notna(), NOTHING)
    return table(list(rows.columns), cells.to_numpy().tolist(), right)


def folded(words: str, inner: str) -> str:
    """HTML that a click on the words opens."""
    return wrap(f"<details><summary>{safe(words)}</summary>{inner}</details>")


def link(page: str, query: Mapping[str, str], words: str) -> str:
    """To another page of the app, as HTML; the first page stands at the root."""
    place = "./" if page == "overview" else page
    return f'<a href="{safe(f"{place}?{urlencode(query)}")}">{safe(words)}</a>'


def pairs(items: dict[str, Any], css: str = "") -> str:
    """Names and values, nested names joined by a dot: how a run was made. `css` sj-facts sets two pairs a line."""
    rows = "".join(f"<dt>{safe(name)}</dt><dd>{safe(value)}</dd>" for name, value in flat(items).items())
    return wrap(f'<dl class="sj-pairs {css}">{rows}</dl>')


def flat(items: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """`{"a": {"b": 1}}` → `{"a.b": "1"}`; nothing for None."""
    found: dict[str, str] = {}
    for name, value in items.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for place, item in enumerate(value):
                found |= flat(item, f"{prefix}{name}.{item.get('klass', place)}.")
        elif value is not None:
            found[f"{prefix}{name}"] = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return found
