"""One self-contained HTML file of a run: the same figures and words as the app, nothing to load from a network."""

import os
from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from metrics.diagnosis.verdict import Diagnosis, without_finding
from metrics.request.goodput import goodput_by_tpot
from metrics.request.objectives import OBJECTIVE_NAMES
from metrics.results.energy import energy_line
from metrics.results.load import latency_origin
from metrics.run.directory import RunDirectory
from ui.figures import blame as blame_figures
from ui.figures import goodput, ledger, steps
from ui.figures.server import over_time, parts_of_the_time
from ui.markup import foreign_server as server
from ui.markup import fragments, results
from ui.run_data import RunData, load
from ui.tables.blame import TRAITS, blame, slowed_steps, traits, waits_by_reason
from ui.tables.request import chosen, failures, longest_steps, slowest_requests
from ui.text import safe
from ui.theme import CONFIG, FONT

PAGE_CSS = """
body { font-family: %s; color: #1F2933; margin: 0 auto; max-width: 1180px; padding: 28px 32px; font-size: 15px; }
h1 { font-size: 1.6rem; margin: 0 0 0.9rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 0.7rem; }
h3 { font-size: 1.02rem; margin: 1.3rem 0 0.3rem; }
p.caption { color: #5F6B7A; font-size: 0.8rem; margin: 0.2rem 0 1rem; }
nav { display: flex; gap: 1.2rem; margin: 1rem 0; font-size: 0.88rem; flex-wrap: wrap; } nav a { color: #0072B2; }
.figure { break-inside: avoid; } .sj { margin-bottom: 0.6rem; }
@media print { body { max-width: none; padding: 0; } nav { display: none; } h2 { break-after: avoid; } }
"""
Section = tuple[str, str, str]  # anchor, heading, HTML


def write_report(run: RunDirectory, diagnosis: Diagnosis, path: Path | str) -> Path:
    """Writes the report of a run as one HTML file, all or nothing, and returns its path. Raises RunDataError."""
    target = Path(path)
    page = render(load(run.path, diagnosis))
    partial = target.with_name(f".{target.name}.tmp")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, target)
    return target


def render(run: RunData) -> str:
    """The whole page."""
    sections = list(_sections(run))
    links = "".join(f'<a href="#{anchor}">{safe(title)}</a>' for anchor, title, _ in sections)
    body = "".join(
        f'<section id="{anchor}"><h2>{safe(title)}</h2>{inner}</section>' for anchor, title, inner in sections
    )
    css = PAGE_CSS % FONT + fragments.CSS_FILE.read_text(encoding="utf-8")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Sojourn: {safe(run.name)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{css}</style><script>{get_plotlyjs()}</script></head><body><h1>Sojourn: {safe(run.name)}</h1>"
        f"{fragments.about(run)}{fragments.headline(run)}<nav>{links}</nav>{fragments.tiles(fragments.key_numbers(run))}{body}</body></html>"
    )


def _sections(run: RunData) -> Iterator[Section]:
    if not run.requests.empty:
        yield "goodput", "Goodput", _goodput(run)
        yield "time", "Where the time went", _time(run)
    if run.diagnosis is not None:
        yield "findings", "Findings", _findings(run.diagnosis)
    if not run.requests.empty:
        yield "requests", "Slowest requests", _requests(run)
    if run.book is not None and run.has_ledger:
        yield "blame", "Who delayed whom", _blame(run)
    yield "steps", "Steps", _steps(run)
    yield "measured", "How it was measured", _measured(run)


def _goodput(run: RunData) -> str:
    objectives = run.meta.get("objectives") or []
    measured = run.diagnosis.results if run.diagnosis is not None else None
    parts = [results.steady(measured.steady), results.load_and_cost(measured)] if measured is not None else []
    parts.append("<h3>Throughput against time per output token</h3>")
    windows = goodput_by_tpot(run.requests, objectives)
    parts.append(_figure(goodput.throughput_against_tpot(windows, goodput.bounds(run.requests, objectives, "tpot_ms"))))
    parts.append(
        _caption("client.parquet chunk_ns, chunk_tokens; a point is a window of the run, its size the streams.")
    )
    if run.diagnosis is not None and run.diagnosis.energy is not None:
        parts.append(_caption(f"Energy: {energy_line(run.diagnosis.energy)}; system.parquet."))
    if run.diagnosis is not None:
        parts += ["<h3>Attainment</h3>", _figure(goodput.attainment(run.diagnosis.goodput))]
        parts.append(
            _caption(
                "Share of the sent requests, failures included, that met the objectives; a line: its 95 % interval."
            )
        )
    for latency in ("ttft_ms", "tpot_ms"):
        bounds = goodput.bounds(run.requests, objectives, latency)
        parts.append(f"<h3>{OBJECTIVE_NAMES[latency].capitalize()}</h3>")
        parts.append(_figure(goodput.latency_distribution(run.requests, latency, bounds)))
        parts.append(_caption(f"{latency} of served requests, {latency_origin(run.meta)}; client.parquet."))
    if run.diagnosis is not None:
        table = goodput.quantile_table(run.diagnosis.goodput)
        right = tuple(range(2, len(table.columns)))
        parts.append(fragments.table(list(table.columns), table.to_numpy().tolist(), right))
        parts.append(_caption("A dash stands where there are too few requests for the claim."))
    if measured is not None:
        parts += ["<h3>Deadlines of tokens</h3>", results.deadlines(measured.deadlines)]
        parts.append(_caption(results.DEADLINES_NOTE))
        parts += ["<h3>All latencies, and what each is</h3>", results.latency_table(measured)]
        parts.append(_caption(results.INTERVAL_NOTE))
    parts.append(fragments.client_error(run.meta))
    return "".join(parts)


def _time(run: RunData) -> str:
    if run.diagnosis is not None and run.diagnosis.server is not None:
        return _time_by_metrics(run.diagnosis)
    parts = []
    if run.diagnosis is not None:
        parts.append(_figure(ledger.lifecycle_bar(run.diagnosis.lifecycle_share)))
        parts.append(fragments.closure(run.diagnosis))
    parts.append(fragments.clocks(run.meta))
    for prefix, title in (("ledger", "To the last byte"), ("ttft", "To the first token")):
        parts += [f"<h3>{title}</h3>", _figure(ledger.where_the_time_went(run.requests, prefix))]
        parts.append(_caption(f"client.parquet joined with requests.parquet: {prefix}_*_ns and what is left over."))
    return "".join(parts)


def _time_by_metrics(diagnosis: Diagnosis) -> str:
    """Of a server that recorded nothing for us: what its own metrics show, and what they do not."""
    view = diagnosis.server
    return "".join([
        _figure(parts_of_the_time(diagnosis)),
        _caption("scrapes.parquet against client.parquet: means over all requests; what the server does not explain is "
                 "grey."),
        server.introduction(view), server.spans(view), fragments.tiles(server.tiles_of(view)), server.agreement(view),
        "<h3>What can be seen of this server</h3>", server.accounts(view),
    ])  # fmt: skip


def _blame(run: RunData) -> str:
    parts = [_figure(blame_figures.waits_by_reason(waits_by_reason(run.requests)))]
    parts.append(_caption("requests.parquet waits, by the scheduler's own reason, and ledger_request_interference_ns."))
    for trait in traits(run.book)[:2]:
        named = TRAITS[trait] if trait != "worst" else "requests"
        parts.append(f"<h3>By {TRAITS[trait]}</h3>")
        parts.append(
            _figure(blame_figures.heat_map(blame(run.book, trait), f"{named} that waited", f"{named} they waited for"))
        )
        parts.append(_caption("Rows sum to the waiting in the ledger; steps.parquet tells who had what it waited for."))
    if beware := slowed_steps(run.steps):
        parts.append(f"<p>{safe(beware)}</p>")
    return "".join(parts)


def _findings(diagnosis: Diagnosis) -> str:
    cards = [fragments.finding(place, found) for place, found in enumerate(diagnosis.findings, start=1)]
    parts = cards or [f"<p>{safe(without_finding(diagnosis))}</p>"]
    parts += ["<h3>The six symptoms</h3>", fragments.checks(diagnosis.checks)]
    if diagnosis.warnings:
        parts += ["<h3>What limits this diagnosis</h3>", fragments.warnings(diagnosis)]
    return "".join(parts)


def _requests(run: RunData) -> str:
    rows, failed, parts = chosen(run.requests, "e2e_ms", 20), failures(run.requests), []
    if not failed.empty:
        parts.append(f"<h3>{(run.requests.status != 'ok').sum():,} requests were not served</h3>")
        parts.append(fragments.table(list(failed.columns), failed.to_numpy().tolist(), right=(2,)))
        parts.append(_caption("client.parquet status, error, in the order of due_ns; the first 20."))
    if rows.empty:
        return "".join([*parts, "<p>No request was served to its end.</p>"])
    table = slowest_requests(run.requests)
    parts += [_figure(ledger.waterfall(rows))]
    parts.append(_caption("The 20 slowest: client.parquet joined with requests.parquet, ledger_*_ns end to end."))
    parts.append(fragments.table(list(table.columns), table.to_numpy().tolist(), right=(2, 3, 4, 5, 6)))
    parts += ["<h3>The slowest request</h3>", _figure(ledger.one_request(rows.iloc[0], run.steps))]
    parts.append(_caption("ledger_*_ns; steps.parquet request_ids and kinds; token_ns; chunk_ns."))
    return "".join(parts)


def _steps(run: RunData) -> str:
    if run.steps.empty:
        said = f"<p>{steps.NO_STEPS}</p>"
        if run.server.empty:
            return said
        caption = _caption("scrapes.parquet, one point a scrape: gauges are samples, tokens are what counters grew by.")
        return said + "<h3>What its own metrics showed</h3>" + _figure(over_time(run.server, run.begin_ns)) + caption
    table = longest_steps(run.steps, run.begin_ns)
    parts = [_figure(steps.over_time(run.steps, run.begin_ns))]
    parts.append(
        _caption("steps.parquet; with more than 200 steps, a bar is the mean of the steps that began in its span.")
    )
    parts += ["<h3>Expected and measured</h3>", _figure(steps.expected_against_actual(run.steps, run.begin_ns))]
    parts.append(_caption("steps.parquet device_ns against predicted_ns."))
    parts += ["<h3>Stages of all steps</h3>", _figure(steps.stage_breakdown(run.steps))]
    parts.append(_caption("steps.parquet stage_*_ns: share of the wall time, and mean of a step."))
    parts.append("<h3>Longest steps</h3>")
    rows = table.astype(object).where(table.notna(), "–").to_numpy().tolist()
    parts.append(fragments.table(list(table.columns), rows, right=tuple(range(len(table.columns)))))
    return "".join(parts)


def _measured(run: RunData) -> str:
    meta = run.meta
    parts = []
    for key, title in (
        ("hardware", "Hardware"), ("versions", "Versions"), ("scenario", "Scenario"), ("engine", "Engine"),
        ("objectives", "Objectives"), ("client_error", "Error of the load generator"),
    ):  # fmt: skip
        value = meta.get(key)
        parts.append(f"<h3>{title}</h3>")
        nested = {key: value} if key == "objectives" else value
        parts.append(
            fragments.pairs(nested, "sj-facts") if isinstance(nested, dict) else f"<p>{safe(_told(nested))}</p>"
        )
    validity = {"seed": _told(meta.get("seed")), "valid": _told(meta.get("valid"))}
    parts += ["<h3>Seed and validity</h3>", fragments.pairs(validity)]
    if run.diagnosis is not None:
        parts += ["<h3>Closure</h3>", fragments.closure(run.diagnosis)]
    return "".join(parts)


def _told(value: object) -> str:
    return "not recorded" if value is None else str(value)


def _figure(fig: go.Figure) -> str:
    inner = fig.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)
    return f'<div class="figure">{inner}</div>'


def _caption(text: str) -> str:
    return f'<p class="caption">{safe(text)}</p>'
