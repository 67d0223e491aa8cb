"""The servers of a fleet as tables and sentences."""

import pandas as pd

from sojourn.metrics.memory.pooled_cache import CacheUse
from sojourn.metrics.results.replicas import FleetView, Replica
from sojourn.ui.text import NOTHING, duration, missing, number, percent

EVEN = 1.1  # times the mean: more is said to be uneven
UNEQUAL_QUEUES = 2.0  # times the shortest queue, mean over time
NOTED_LOSS = 0.02  # of the prompt tokens
MOST_REGRETTED = 10


def verdict(view: FleetView) -> str:
    """What the fleet lost beside what one server would lose, in a sentence or two."""
    ratio = number(view.imbalance)
    if view.imbalance <= EVEN:
        load = f"the load was even (the busiest server had {ratio} times the mean tokens)"
    else:
        busiest = max(view.replicas, key=lambda replica: replica.tokens).name
        load = f"the load was uneven: {busiest} had {ratio} times the mean tokens"
    load += _queues(view)
    head = f"{len(view.replicas)} servers behind {view.router}: {load}."
    if view.pooled is None:
        return f"{head} What routing cost in prefix hits is not known."
    fleet = view.pooled.fleet
    if not fleet.best_tokens:
        return f"{head} The prompts shared no prefix, so routing could lose no hit."
    hits = f"{percent(fleet.hit_rate)} of the prompt tokens were hits, of {percent(fleet.pooled_rate)} possible"
    evicted = f"Eviction lost {percent(fleet.evicted_tokens / max(fleet.prompt_tokens, 1))}."
    if fleet.lost_share < NOTED_LOSS:
        return f"{head} {hits}. Routing lost {percent(fleet.lost_share)}. {evicted}"
    return (
        f"{head} {hits}. Routing lost {fleet.lost_tokens:,} tokens ({percent(fleet.lost_share)} of the prompt tokens), "
        f"some {duration(fleet.lost_ns)} of prefill. {evicted}"
    )


def _queues(view: FleetView) -> str:
    """Where requests waited, if they did so at some servers more than at others."""
    means = {name: float(states.waiting.mean()) for name, states in view.timelines.items()}
    longest = max(means, key=means.get, default=None)  # type: ignore[arg-type]
    if longest is None or means[longest] < 1:
        return ""
    others = [mean for name, mean in means.items() if name != longest]
    shortest = min(others, default=means[longest])
    if means[longest] <= UNEQUAL_QUEUES * max(shortest, 0.1):
        return ""
    return f", but {means[longest]:,.1f} requests waited at {longest}, against {shortest:,.1f} where it was least"


def load_table(view: FleetView) -> pd.DataFrame:
    """A row a server and one of all: what it was sent, and how much of it was good."""
    return pd.DataFrame([
        {
            "server": replica.name,
            "requests": number(replica.requests),
            "not served": number(replica.not_served),
            "prompt tokens": number(replica.prompt_tokens),
            "output tokens": number(replica.output_tokens),
            "tokens over mean": NOTHING if replica is view.whole else f"{view.share_of_mean(replica):.2f}",
            "goodput (req/s)": number(replica.goodput_rps),
            "attainment": percent(replica.attainment),
            "device busy": NOTHING if replica.busy is None else percent(replica.busy),
            "most waiting": NOTHING if replica.peak_waiting is None else f"{replica.peak_waiting:,.1f}",
            "own settings": ", ".join(f"{key}={value}" for key, value in replica.settings.items()) or NOTHING,
        }
        for replica in (view.whole, *view.replicas)
    ])  # fmt: skip


def latency_table(view: FleetView) -> pd.DataFrame:
    """A row a server and one of all, in ms; a dash where too few requests make a quantile a guess."""
    rows = []
    for replica in (view.whole, *view.replicas):
        row = {"server": replica.name}
        for name, short in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2e_ms", "E2E")):
            row |= {f"{short} {key}": number(replica.quantiles_ms[name][key]) for key in ("p50", "p90", "p99")}
        row |= {f"routing {key}": _routing(view, replica, key) for key in ("p50", "p90")}
        rows.append(row)
    return pd.DataFrame(rows)


def _routing(view: FleetView, replica: Replica, key: str) -> str:
    return NOTHING if view.remark else number(replica.routing_ms.get(key))


def cache_table(uses: list[CacheUse]) -> pd.DataFrame:
    """A row a server and one of all: prefix hits against the pooled infinite cache."""
    return pd.DataFrame([
        {
            "server": use.server,
            "prompt tokens": number(use.prompt_tokens),
            "hit": percent(use.hit_rate),
            "pooled infinite cache": percent(use.pooled_rate),
            "lost by eviction (tokens)": number(use.evicted_tokens),
            "lost by routing (tokens)": number(use.lost_tokens),
            "of the prompt tokens": percent(use.lost_share),
            "prefill of these": NOTHING if missing(use.lost_ns) else duration(use.lost_ns),
        }
        for use in uses
    ])  # fmt: skip


def regretted(requests: pd.DataFrame, begin_ns: float) -> pd.DataFrame:
    """The requests that another server would have served with the most hits, as text."""
    rows = requests[requests.lost_tokens > 0].nlargest(MOST_REGRETTED, "lost_tokens", keep="first")
    return pd.DataFrame(
        {
            "request": rows.request_id,
            "at (s)": ((rows.ns - begin_ns) / 1e9).map(lambda at: f"{at:,.1f}"),
            "server": rows.server,
            "best server": rows.best_server,
            "prompt tokens": rows.prompt_tokens.map(number),
            "hit": rows.hit_tokens.map(number),
            "on the best server": rows.best_tokens.map(number),
            "lost by routing": rows.lost_tokens.map(number),
        }
    )
