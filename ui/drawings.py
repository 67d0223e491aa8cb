"""The figures that the app and the report share, each with its title and with the tables that it was made from."""

from typing import NamedTuple

import plotly.graph_objects as go

from sojourn.metrics.request.goodput import goodput_by_tpot
from sojourn.metrics.request.objectives import OBJECTIVE_NAMES
from sojourn.metrics.results.load import latency_origin
from sojourn.metrics.results.replicas import FleetView
from sojourn.ui.figures import blame as blame_figures
from sojourn.ui.figures import fleet, goodput, ledger, server, steps
from sojourn.ui.run_data import RunData
from sojourn.ui.tables.blame import TRAITS, blame, waits_by_reason


class Drawing(NamedTuple):
    """`caption` names files and columns between backticks."""

    title: str
    figure: go.Figure
    caption: str


def of_goodput(run: RunData) -> list[Drawing]:
    """Throughput against TPOT, the attainment if the run was diagnosed, and last the distributions of TTFT and TPOT."""
    objectives = run.meta.get("objectives") or []
    bounds = {name: goodput.bounds(run.requests, objectives, name) for name in ("ttft_ms", "tpot_ms")}
    drawings = [Drawing(
        "Throughput against time per output token",
        goodput.throughput_against_tpot(goodput_by_tpot(run.requests, objectives), bounds["tpot_ms"]),
        "`client.parquet` `chunk_ns`, `chunk_tokens`; `run.json` objectives. A point is a window of the run, its size "
        "the open streams.",
    )]  # fmt: skip
    if run.diagnosis is not None:
        drawings.append(attainment(run))
    for name, bound in bounds.items():
        drawings.append(Drawing(
            OBJECTIVE_NAMES[name].capitalize(), goodput.latency_distribution(run.requests, name, bound),
            f"`client.parquet`: `{name}` of served requests, {latency_origin(run.meta)}.",
        ))  # fmt: skip
    return drawings


def attainment(run: RunData) -> Drawing:
    return Drawing(
        "Attainment", goodput.attainment(run.diagnosis.goodput),
        "The share of the sent requests, failures included. A line on a bar is its 95% interval. `diagnosis.json` "
        "goodput, from `client.parquet` `status`, `due_ns`, `first_token_ns`, `last_byte_ns`.",
    )  # fmt: skip


def lifecycles(run: RunData) -> Drawing:
    return Drawing(
        "Time by lifecycle", ledger.lifecycle_bar(run.diagnosis.lifecycle_share),
        "`client.parquet` and `requests.parquet`: sum of `ledger_<lifecycle>_*_ns` over all joined requests.",
    )  # fmt: skip


def accounts(run: RunData, prefix: str = "ledger", title: str = "Where the time went") -> Drawing:
    """`prefix` as in `accounts_ms`."""
    return Drawing(
        title, ledger.where_the_time_went(run.requests, prefix),
        f"By class, and of the slowest tenth of the requests, end to end. `{prefix}_*_ns`, and what is left over.",
    )  # fmt: skip


def parts_of_the_time(run: RunData) -> Drawing:
    """Of a server that is known by its own metrics only."""
    return Drawing(
        "Where the time went", server.parts_of_the_time(run.diagnosis),
        "Means over all requests; grey is what no metric explains. `scrapes.parquet` against `client.parquet`.",
    )  # fmt: skip


def waits(run: RunData) -> Drawing:
    return Drawing(
        "What they waited for", blame_figures.waits_by_reason(waits_by_reason(run.requests)),
        "`requests.parquet` `waits`, by the scheduler’s own reason, and `ledger_request_interference_ns`.",
    )  # fmt: skip


def blame_matrix(run: RunData, trait: str) -> Drawing:
    """Who delayed whom, by one of TRAITS."""
    rows = TRAITS[trait] if trait != "worst" else "requests"
    victims = None if len(run.requests) == run.sent else set(run.requests.request_id)  # as the filter leaves them
    return Drawing(
        f"By {TRAITS[trait]}",
        blame_figures.heat_map(blame(run.book, trait, victims), f"{rows} that waited", f"{rows} that they waited for"),
        "Rows sum to `request.queue`, `memory.blocked`, `request.interference` and `memory.preempted` of the ledger; "
        "from `steps.parquet`. `unexplained` is what the steps do not explain.",
    )  # fmt: skip


def of_steps(run: RunData) -> list[Drawing]:
    """The panels over time, and last the step model and the stages."""
    lasting_s = (run.steps.end_ns.max() - run.begin_ns) / 1e9
    count = f"{len(run.steps):,} of {run.count_steps():,}" if run.sampled_of else f"{len(run.steps):,}"
    return [
        Drawing(
            f"{count} steps in {lasting_s:,.1f} s", steps.over_time(run.steps, run.begin_ns),
            "`steps.parquet`: `new_tokens` by `kinds`, `budget`; `refusals`, `waiting`, `preempted_ids`; `blocks_*`; "
            "`stage_*_ns`, `predicted_ns`. With more than 200 steps, a bar is the mean of the steps that began in its "
            "span.",
        ),
        Drawing(
            "Expected and measured", steps.expected_against_actual(run.steps, run.begin_ns),
            "`steps.parquet` `device_ns` against `predicted_ns`; above the line a step took longer than its work "
            "explains.",
        ),
        Drawing(
            "Stages of all steps", steps.stage_breakdown(run.steps),
            "Share of the wall time, and mean of a step. `steps.parquet` `stage_*_ns`.",
        ),
    ]  # fmt: skip


def scraped_metrics(run: RunData) -> Drawing:
    return Drawing(
        "What its own metrics showed", server.over_time(run.server, run.begin_ns),
        "One point per scrape: gauges are samples, tokens are what counters grew by. `scrapes.parquet`.",
    )  # fmt: skip


def of_fleet(run: RunData, view: FleetView) -> dict[str, Drawing]:
    """By a short name: the servers side by side, their latencies, and what routing cost where that is known."""
    some = "" if len(view.replicas) <= fleet.MOST_SERVERS else " Those with most and with fewest tokens are shown."
    drawings = {
        "small multiples": Drawing(
            "The servers side by side", fleet.small_multiples(view),
            "`server-N/steps.parquet` `request_ids`, `waiting`, `blocks_*`, `new_tokens`, `device_ns`." + some,
        ),
        "ttft": Drawing(
            "Time to first token by server", fleet.latency_by_server(run.requests, view, "ttft_ms"),
            f"`client.parquet` `ttft_ms` of served requests, {latency_origin(run.meta)}.",
        ),
        "e2e": Drawing(
            "End to end by server", fleet.latency_by_server(run.requests, view, "e2e_ms"),
            f"`client.parquet` `e2e_ms` of served requests, {latency_origin(run.meta)}.",
        ),
    }  # fmt: skip
    if view.pooled is not None:
        drawings |= {
            "prompt tokens": Drawing(
                "What became of the prompt tokens", fleet.prompt_tokens(view.pooled),
                "`requests.parquet` `prefix_outcomes`, `prompt_block_hashes`. The parts sum to the prompt tokens.",
            ),
            "regret": Drawing(
                "Hits and losses over time", fleet.regret_over_time(view.pooled, run.begin_ns),
                "The same, over `scheduled_ns`. Below: cumulative, by the server that was chosen.",
            ),
        }  # fmt: skip
    return drawings
