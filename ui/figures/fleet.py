"""The servers of a fleet side by side: their state over time, and what routing cost in prefix hits."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sojourn.metrics.memory.pooled_cache import PooledCache
from sojourn.metrics.results.replicas import FleetView
from sojourn.ui import theme
from sojourn.ui.text import label, percent

MOST_SERVERS = 6  # side by side
NO_STEPS = "No server of the fleet recorded a step."
PANELS = ("requests", "KV blocks in use (%)", "tokens of a step", "device busy (%)")
GREEN = theme.COLOURS["memory"]
# Parts of the prompt tokens, which sum to them: name → (column of the table, colour, what it is).
PARTS = {
    "hit": ("hit_tokens", GREEN, "cached on the server that was chosen"),
    "lost by eviction": ("evicted_tokens", theme.shade(GREEN, -0.5), "the server had computed them, and gave them up"),
    "lost by routing": ("lost_tokens", theme.COLOURS["request"], "another server had computed them"),
    "new": ("new_tokens", theme.UNACCOUNTED_COLOUR, "no server had computed them"),
}
SPANS = 30  # of a hit rate over the run, at most


def server_colours(names: list[str]) -> dict[str, str]:
    colours = theme.COHORT_COLOURS
    return {name: colours[place % len(colours)] for place, name in enumerate(names)}


def shown_servers(view: FleetView) -> list[str]:
    """Those that have steps; of many, the ones with most and with fewest tokens, in their order."""
    known = [replica for replica in view.replicas if replica.name in view.timelines]
    if len(known) > MOST_SERVERS:
        ranked = sorted(known, key=lambda replica: -replica.tokens)
        ends = {replica.name for replica in (*ranked[: MOST_SERVERS // 2], *ranked[-MOST_SERVERS // 2 :])}
        known = [replica for replica in known if replica.name in ends]
    return [replica.name for replica in known]


def small_multiples(view: FleetView) -> go.Figure:
    """A column a server and a row a quantity, all on the same axes."""
    names = shown_servers(view)
    if not names:
        return theme.note(NO_STEPS)
    fig = make_subplots(
        rows=len(PANELS), cols=len(names), shared_xaxes="all", shared_yaxes="rows", vertical_spacing=0.045,
        horizontal_spacing=0.02, column_titles=[label(name, 24) for name in names],
    )  # fmt: skip
    fig.update_layout(template=theme.TEMPLATE, height=680, hovermode="x unified", margin=dict(t=56))
    request, memory, compute = (theme.COLOURS[name] for name in ("request", "memory", "compute"))
    for column, name in enumerate(names, start=1):
        states = view.timelines[name]
        for quantity, words, colour, factor, row, dash in (
            ("running", "running", request, 1, 1, "dot"), ("waiting", "waiting", request, 1, 1, "solid"),
            ("kv_use", "KV blocks in use", memory, 100, 2, "solid"),
            ("batch_tokens", "tokens of a step", theme.ACCOUNT_COLOURS["compute.prefill"], 1, 3, "solid"),
            ("busy", "device busy", compute, 100, 4, "solid"),
        ):  # fmt: skip
            unit = "%" if factor == 100 else ""
            fig.add_scatter(
                name=words, x=states.at_s, y=factor * states[quantity], mode="lines", row=row, col=column,
                line=dict(color=colour, width=1.6, dash=dash), legendgroup=words, showlegend=column == 1,
                hovertemplate=f"{words}: %{{y:,.1f}}{unit}<extra></extra>",
            )  # fmt: skip
    for row, title in enumerate(PANELS, start=1):
        fig.update_yaxes(rangemode="tozero", row=row)
        fig.update_yaxes(title_text=title, row=row, col=1)
    fig.update_yaxes(range=[0, 104], row=4)
    fig.update_xaxes(title_text="")
    fig.update_xaxes(title_text="time (s)" if len(names) > 2 else theme.RUN_CLOCK, row=len(PANELS))
    fig.update_layout(legend=dict(y=1.045))
    return fig


def latency_by_server(requests: pd.DataFrame, view: FleetView, name: str) -> go.Figure:
    """Distribution of `ttft_ms` or `e2e_ms` of the served requests, a line a server."""
    names = [replica.name for replica in view.replicas]
    served = requests[(requests.status == "ok") & requests[name].notna() & requests.server.isin(names)]
    if served.empty:
        return theme.note("No served request has such a latency.")
    fig = theme.figure(300)
    for server, colour in server_colours(names).items():
        values = served[name][served.server == server].to_numpy(dtype="float64")
        if len(values):
            theme.add_distribution(fig, label(server), np.maximum(values, 1e-3), colour, "%{x:,.3~g} ms")
    title = f"{name.removesuffix('_ms').upper()} (ms, log scale)"
    fig.update_xaxes(title_text=title, **theme.log_axis(served[name].clip(lower=1e-3).to_list()))
    return fig.update_yaxes(title_text="requests (cumulative %)", range=[0, 102])


def prompt_tokens(pooled: PooledCache) -> go.Figure:
    """A bar for all servers and one for each: prompt tokens that were hit, lost by eviction, lost by routing, new."""
    uses = [pooled.fleet, *pooled.servers]
    detail = [f"{use.prompt_tokens:,} tokens, {percent(use.hit_rate)} hit" for use in uses]
    rows = [theme.row_label(label(use.server, 24), text) for use, text in zip(uses, detail, strict=True)]
    fig = theme.stacked_bars(rows, "share of the prompt tokens (%)", "server", range=[0, 100])
    for name, (attribute, colour, meaning) in PARTS.items():
        counts = [use.prompt_tokens - use.best_tokens if name == "new" else getattr(use, attribute) for use in uses]
        shares = [count / max(use.prompt_tokens, 1) for count, use in zip(counts, uses, strict=True)]
        theme.add_share_bars(
            fig, name, rows, [100 * share for share in shares], shares, colour,
            f"<b>{name}</b>: %{{x:.1f}}%, %{{customdata:,}} tokens<br>{meaning}", customdata=counts,
        )  # fmt: skip
    return fig


def regret_over_time(pooled: PooledCache, begin_ns: float) -> go.Figure:
    """Two panels: hit rate of the fleet against the pooled infinite cache, and the tokens lost by routing so far."""
    rows = pooled.requests
    at_s = (rows.ns - begin_ns) / 1e9
    fig = theme.panels(("prompt tokens hit (%)", "lost by routing (tokens)"), 430, 0.09)
    width = max(at_s.max() / SPANS, 1e-9)
    spans = rows.groupby((at_s / width).astype(int).clip(0, SPANS - 1))
    sums = spans[["prompt_tokens", "hit_tokens", "best_tokens"]].sum()
    middle = (sums.index.to_numpy() + 0.5) * width
    for column, name, colour, dash in (
        ("best_tokens", "pooled infinite cache", theme.INK, "dot"), ("hit_tokens", "the fleet", GREEN, "solid"),
    ):  # fmt: skip
        fig.add_scatter(
            name=name, x=middle, y=100 * sums[column] / sums.prompt_tokens.clip(lower=1), mode="lines+markers",
            marker_size=4, line=dict(color=colour, width=2, dash=dash), row=1, col=1,
            hovertemplate=f"{name}: %{{y:.1f}}% of the prompt tokens<extra></extra>",
        )  # fmt: skip
    for name, colour in server_colours([use.server for use in pooled.servers]).items():
        mine = rows.server == name
        fig.add_scatter(
            name=label(name), x=at_s[mine], y=rows.lost_tokens[mine].cumsum(), mode="lines", row=2, col=1,
            line=dict(color=colour, width=2, shape="hv"),
            hovertemplate=f"{label(name)}: %{{y:,}} tokens lost so far<extra></extra>",
        )  # fmt: skip
    return fig.update_yaxes(range=[0, 102], row=1, col=1)
