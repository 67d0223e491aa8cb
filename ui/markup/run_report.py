"""One self-contained HTML file of a run: the same figures and words as the app, nothing to load from a network."""

from collections.abc import Iterator
from pathlib import Path

from sojourn.diagnosis.verdict import Diagnosis, without_finding
from sojourn.metrics.results.energy import energy_line
from sojourn.metrics.results.replicas import FleetView
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.whole_file import write_whole
from sojourn.ui import drawings
from sojourn.ui.drawings import Drawing
from sojourn.ui.figures import goodput, ledger, steps
from sojourn.ui.markup import confidence, fragments, results
from sojourn.ui.markup import foreign_server as server
from sojourn.ui.markup.before_after import in_order, side_by_side
from sojourn.ui.markup.document import caption, document, figure
from sojourn.ui.markup.incident.section import for_tools, moving_parts
from sojourn.ui.run_data import RunData, load
from sojourn.ui.tables.blame import slowed_steps, traits
from sojourn.ui.tables.fleet import cache_table, latency_table, load_table, verdict
from sojourn.ui.tables.request import chosen, failure_reasons, failures, longest_steps, slowest_requests
from sojourn.ui.text import safe

MOST_FACTS = 12  # of a section that stands open


def write_report(
    run: RunDirectory, diagnosis: Diagnosis, path: Path | str, against: RunDirectory | None = None
) -> Path:
    """Writes the report of a run as one HTML file and returns its path. Raises RunDataError."""
    other = None if against is None else load(against.path, objectives=against.objectives)
    return write_whole(Path(path), render(load(run.path, diagnosis, run.objectives), other))


def render(run: RunData, other: RunData | None = None) -> str:
    sections = list(_sections(run, other))
    links = "".join(f'<a href="#{anchor}">{safe(title)}</a>' for anchor, title, _ in sections)
    body = "".join(
        f'<section id="{anchor}"><h2>{safe(title)}</h2>{inner}</section>' for anchor, title, inner in sections
    )
    head = f"{fragments.about(run)}{fragments.headline(run)}{for_tools(run)}<nav>{links}</nav>"
    return document(f"Sojourn: {run.name}", head + fragments.tiles(fragments.key_numbers(run)) + body)


def _sections(run: RunData, other: RunData | None) -> Iterator[tuple[str, str, str]]:
    """Anchor, heading and HTML of each."""
    if run.diagnosis is not None:
        yield "findings", "Findings", _findings(run.diagnosis)
    if other is not None:
        before, after = in_order(run, other)
        yield "against", f"Before and after: {before.name} and {after.name}", side_by_side(before, after)
    if not run.requests.empty:
        yield "timeline", "Objectives and timeline", moving_parts(*((run,) if other is None else in_order(run, other)))
        yield "goodput", "Goodput", _goodput(run)
        yield "time", "Where the time went", _time(run)
    if run.fleet is not None:
        yield "fleet", "Fleet", _fleet(run, run.fleet)
    if not run.requests.empty:
        yield "requests", "Slowest requests", _requests(run)
    if run.book is not None and run.has_ledger:
        yield "blame", "Who delayed whom", _blame(run)
    yield "steps", "Steps", _steps(run)
    yield "measured", "How it was measured", _measured(run)


def _goodput(run: RunData) -> str:
    diagnosis = run.diagnosis
    measured = diagnosis.results if diagnosis is not None else None
    parts = [results.goodput_of(run)]
    parts += [results.steady(measured.steady), results.load_and_cost(measured)] if measured is not None else []
    if diagnosis is not None and diagnosis.energy is not None:
        parts.append(caption(f"Energy: {energy_line(diagnosis.energy)}; `system.parquet`."))
    parts += map(figure, drawings.of_goodput(run))
    if diagnosis is not None:
        parts.append(fragments.data_table(goodput.quantile_table(diagnosis.goodput)))
        parts.append(caption("A dash stands where there are too few samples."))
    if measured is not None:
        parts += ["<h3>Deadlines of tokens</h3>", results.deadlines(measured.deadlines)]
        parts.append(caption(results.DEADLINES_NOTE))
        parts += ["<h3>All latencies, and what each is</h3>", results.latency_table(measured)]
        parts.append(caption(results.INTERVAL_NOTE))
    parts.append(fragments.client_error(run.meta))
    return "".join(parts)


def _time(run: RunData) -> str:
    if run.diagnosis is not None and run.diagnosis.server is not None:
        return _time_by_metrics(run)
    parts = []
    if run.diagnosis is not None:
        parts += [figure(drawings.lifecycles(run)), fragments.closure(run.diagnosis)]
    parts.append(fragments.clocks(run.meta))
    parts.append(figure(drawings.accounts(run, "ledger", "To the last byte")))
    parts.append(figure(drawings.accounts(run, "ttft", "To the first token")))
    return "".join(parts)


def _time_by_metrics(run: RunData) -> str:
    """Of a server that recorded nothing for us: what its own metrics show, and what they do not."""
    view = run.diagnosis.server
    return "".join([
        figure(drawings.parts_of_the_time(run)._replace(title="")),
        server.introduction(view), server.spans(view), fragments.tiles(server.tiles_of(view)), server.agreement(view),
        "<h3>What can be seen of this server</h3>", server.accounts(view),
    ])  # fmt: skip


def _blame(run: RunData) -> str:
    parts = [
        figure(drawings.waits(run)),
        *(figure(drawings.blame_matrix(run, trait)) for trait in traits(run.book)[:2]),
    ]
    if beware := slowed_steps(run.steps):
        parts.append(f"<p>{safe(beware)}</p>")
    return "".join(parts)


def _findings(diagnosis: Diagnosis) -> str:
    cards = [
        fragments.finding(place, found) + confidence.sentence(diagnosis, found)
        for place, found in enumerate(diagnosis.findings, start=1)
    ]
    parts = cards or [f"<p>{safe(without_finding(diagnosis))}</p>"]
    parts += ["<h3>The six symptoms</h3>", fragments.checks(diagnosis.checks)]
    if diagnosis.devices:
        parts += ["<h3>Devices, by their sensors</h3>", fragments.lines(diagnosis.devices)]
    if diagnosis.warnings:
        parts += ["<h3>What limits this diagnosis</h3>", fragments.warnings(diagnosis)]
    return "".join(parts)


def _fleet(run: RunData, view: FleetView) -> str:
    drawn = drawings.of_fleet(run, view)
    parts = [
        f"<p><b>{safe(verdict(view))}</b></p>", figure(drawn["small multiples"]),
        "<h3>Load by server</h3>", fragments.data_table(load_table(view)),
        "<h3>Latency by server (ms)</h3>", fragments.data_table(latency_table(view)),
        caption(f"{view.remark}." if view.remark else "Routing: `ledger_request_routing_ns`."),
    ]  # fmt: skip
    if view.pooled is None:
        return "".join([*parts, f"<p>{safe(view.no_pooled)}</p>"])
    parts += [
        figure(drawn["prompt tokens"]),
        fragments.data_table(cache_table([view.pooled.fleet, *view.pooled.servers])),
    ]
    return "".join(parts)


def _requests(run: RunData) -> str:
    rows, failed, parts = chosen(run.requests, "e2e_ms", 20), failures(run.requests), []
    if not failed.empty:
        parts.append(f"<h3>{(run.requests.status != 'ok').sum():,} requests were not served</h3>")
        parts += [fragments.data_table(failure_reasons(run.requests)), "<p>The first of them:</p>"]
        parts.append(fragments.data_table(failed))
        parts.append(caption("`client.parquet` `status`, `error`, in the order of `due_ns`; the first 20."))
    if rows.empty:
        return "".join([*parts, "<p>No request was served to its end.</p>"])
    source = "`client.parquet` joined with `requests.parquet`, `ledger_*_ns` end to end."
    parts.append(figure(Drawing("The 20 slowest", ledger.waterfall(rows), source)))
    parts.append(fragments.data_table(slowest_requests(run.requests)))
    source = "`ledger_*_ns`; `steps.parquet` `request_ids` and `kinds`; `token_ns`; `chunk_ns`."
    parts.append(figure(Drawing("The slowest request", ledger.one_request(rows.iloc[0], run.steps), source)))
    return "".join(parts)


def _steps(run: RunData) -> str:
    if run.fleet is not None:
        places = ", ".join(f"<code>{safe(run.path / replica.name)}</code>" for replica in run.fleet.replicas)
        return f"<p>Steps are of one server: <code>sojourn report</code> of {places} has them.</p>"
    if run.steps.empty:
        metrics = "" if run.server.empty else figure(drawings.scraped_metrics(run))
        return f"<p>{steps.NO_STEPS}</p>{metrics}"
    longest = fragments.data_table(longest_steps(run.steps, run.begin_ns))
    return "".join([*map(figure, drawings.of_steps(run)), "<h3>Longest steps</h3>", longest])


def _measured(run: RunData) -> str:
    meta = run.meta
    parts = []
    for key, title in (
        ("hardware", "Hardware"), ("versions", "Versions"), ("scenario", "Scenario"), ("engine", "Engine"),
        ("objectives", "Objectives"), ("client_error", "Error of the load generator"),
    ):  # fmt: skip
        value = meta.get(key)
        nested = {key: value} if key == "objectives" else value
        if not isinstance(nested, dict):
            parts.append(f"<h3>{title}</h3><p>{safe(_text(nested))}</p>")
        elif (count := len(fragments.flat(nested))) > MOST_FACTS:
            parts.append(fragments.folded(f"{title}: {count} values", fragments.pairs(nested, "sj-facts")))
        else:
            parts.append(f"<h3>{title}</h3>{fragments.pairs(nested, 'sj-facts')}")
    validity = {"seed": _text(meta.get("seed")), "valid": _text(meta.get("valid"))}
    parts += ["<h3>Seed and validity</h3>", fragments.pairs(validity)]
    if run.diagnosis is not None:
        parts += ["<h3>Closure</h3>", fragments.closure(run.diagnosis)]
    return "".join(parts)


def _text(value: object) -> str:
    return "not recorded" if value is None else str(value)
