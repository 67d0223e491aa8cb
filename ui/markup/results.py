"""What the client measured, as HTML that the app and the report share: latencies with intervals, steadiness, cost."""

from sojourn.diagnosis.expectation import is_expectation
from sojourn.metrics.request.deadlines import FLUID_SHARE, Deadlines
from sojourn.metrics.request.latencies import DEFINITIONS, QUANTILES, Estimate
from sojourn.metrics.results.load import CLOSED_ORIGIN
from sojourn.metrics.results.prices import cost_line
from sojourn.metrics.results.summary import Results
from sojourn.metrics.run.devices import num_devices
from sojourn.metrics.statistics.intervals import Interval
from sojourn.metrics.statistics.steadiness import Steadiness
from sojourn.ui.markup import fragments
from sojourn.ui.markup.fragments import dot, wrap
from sojourn.ui.run_data import RunData
from sojourn.ui.text import NOTHING, number, percent, prose, safe
from sojourn.ui.theme import BAD, GOOD

VERDICT_COLOURS = {"steady": GOOD, "no steady state": BAD, "cannot tell": "var(--sj-line-bold)"}
INTERVAL_NOTE = (
    "Beside a figure stands its 95% interval, where there are samples enough for one (?: beyond what was measured); "
    "a dash stands where there are too few for the figure itself."
)


GOODPUT_DEFINITION = (
    "Goodput counts the requests that %s, and their output tokens, per second. A failed request is not good. This is "
    "the goodput of this load. To find the largest rate that keeps the objectives, measure several: "
    "`sojourn capacity SCENARIO --rates 1,2,4,8`."
)


def goodput_of(run: RunData) -> str:
    """The goodput of a run in requests and in tokens per second, and by device, with its definition; "" where nothing
    is diagnosed."""
    found = run.diagnosis.goodput[0] if run.diagnosis is not None and run.diagnosis.goodput else None
    if found is None:
        return ""
    bounds = run.meta.get("objectives") or []
    if not bounds:
        return wrap('<p class="sj-small sj-muted">The run names no objective, so it has no goodput. Give one: '
                    "<code>sojourn report RUN --slo 'ttft:500 tpot:50'</code>.</p>")  # fmt: skip
    devices, tokens = num_devices(run.meta), found.goodput_tokens_per_s
    share = 1 / devices if devices else None
    tiles: list[fragments.Tile] = [
        ("goodput", number(found.goodput_rps), "requests/s", f"{found.good:,} of {found.sent:,} sent were good"),
        ("goodput", number(tokens), "tokens/s",
         "output tokens of good requests" if tokens is not None else "the server reports no tokens"),
        ("goodput per device", number(tokens * share if tokens is not None and share else None), "tokens/s",
         f"{number(found.goodput_rps * share)} requests/s; {devices} device{'s' if devices > 1 else ''}" if share else
         "the server does not report its devices"),
        ("attainment", percent(found.attainment), "", "good requests, of all that were sent"),
    ]  # fmt: skip
    good = "took at most twice their own work" if is_expectation(bounds) else "met every objective of their class"
    window = f" Here: {found.window.sentence()}." if found.window is not None else ""
    return fragments.tiles(tiles) + wrap(f'<p class="sj-small">{prose(GOODPUT_DEFINITION % good + window)}</p>')


def latency_table(results: Results) -> str:
    """Every latency with its figures and their intervals, and what it is measured from."""
    columns = ["latency (ms)", "samples", "mean", *QUANTILES, "max"]
    origins, rows, meanings = {"intended send": CLOSED_ORIGIN} if results.closed else {}, [], {}
    for row in results.latencies:
        known = DEFINITIONS[row.name]
        rows.append([
            safe(known.title), f"{row.samples:,}", estimate(row.mean),
            *(estimate(row.quantiles[name]) for name in QUANTILES), number(row.max),
        ])  # fmt: skip
        meanings[known.title] = f"from {origins.get(known.origin, known.origin)}, {known.meaning}"
    table = fragments.html_table(columns, rows, right=tuple(range(1, len(columns))))
    return table + fragments.folded("What each is", fragments.pairs(meanings))


def estimate(value: Estimate) -> str:
    """`120`, and below it `112–131`."""
    if value.value is None or value.interval is None:
        return number(value.value)
    return f'{number(value.value)}<span class="sj-interval">{bounds(value.interval)}</span>'


def bounds(interval: Interval) -> str:
    low, high = (("?" if bound is None else number(bound)) for bound in (interval.low, interval.high))
    return f"{low}–{high}"


def steady(found: Steadiness) -> str:
    """Whether the measured window was a steady state, and why not."""
    window = ""
    if found.window_s is not None:
        window = f" Looked at: seconds {found.begin_s:.3g} to {found.end_s:.4g} after the first measured request."
    return wrap(
        f'<p class="sj-small">{dot(VERDICT_COLOURS[found.verdict])}'
        f"<b>Steady state: {safe(found.verdict)}</b> {prose(found.reason)}.{safe(window)} "
        '<span class="sj-muted">Nothing was trimmed: the figures are of the declared measure window.</span></p>'
    )


def deadlines(rows: list[Deadlines]) -> str:
    """Fluidity and smooth goodput by class; a sentence where no class has a deadline for every token."""
    if not rows:
        return wrap('<p class="sj-small sj-muted">No class has both a ttft and a tpot objective, so no token has a '
                    "deadline.</p>")  # fmt: skip
    columns = ["class", "first token due (ms)", "each later (ms)", "fluidity",
               f"requests with ≥ {percent(FLUID_SHARE)} of deadlines met",
               "smooth goodput (tokens/s)", "output (tokens/s)"]  # fmt: skip
    cells = []
    for row in rows:
        first = number(row.first_token_ms)
        if row.first_token_ms_per_prompt_token:
            first += f" + {row.first_token_ms_per_prompt_token:g} per prompt token"
        spread = f" ({_shares(row.fluidity_interval)})" if row.fluidity_interval is not None else ""
        cells.append([
            row.klass or NOTHING, first, number(row.token_ms), f"{percent(row.fluidity)}{spread}",
            f"{row.fluid:,} of {row.sent:,}", number(row.smooth_goodput_tokens_per_s), number(row.output_tokens_per_s),
        ])  # fmt: skip
    return fragments.table(columns, cells, right=tuple(range(1, len(columns))))


DEADLINES_NOTE = (
    "Fluidity: the share of its deadlines that a request met, on average over all that were sent; a stall misses as "
    "many as pass in it (Etalon). Smooth goodput: output tokens less those that a reader could have read while he "
    "waited past a deadline; a request that was not served is worth nothing (arXiv 2410.14257)."
)


def load_and_cost(results: Results) -> str:
    """How the schedule was kept, and what tokens cost."""
    load, delay = results.load, results.load.schedule_delay_ms
    parts = [
        f"offered {number(load.requested_rps, 'req/s')}, sent {number(load.achieved_rps, 'req/s')} within "
        f"{number(load.send_duration_s, 's')}; send delay: mean {number(delay['mean'], 'ms')}, "
        f"p99 {number(delay['p99'], 'ms')}, max {number(delay['max'], 'ms')}"
    ]
    parts += [f"cost: {cost_line(results.cost)}"] if results.cost is not None else []
    return wrap("".join(f'<p class="sj-small">{safe(part)}</p>' for part in parts))


def _shares(interval: Interval) -> str:
    low, high = (
        NOTHING if bound is None else percent(min(1.0, max(0.0, bound))) for bound in (interval.low, interval.high)
    )
    return f"{low} to {high}"
