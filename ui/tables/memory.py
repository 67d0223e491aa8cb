"""The KV cache of a run, shaped for showing: pure functions from its tables to small ones."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sojourn.live.kv_lens.document import KvLens
from sojourn.metrics import cells
from sojourn.metrics.memory.kv_load import TIERS
from sojourn.metrics.memory.miss_ratio import miss_ratio_curve, prefix_outcomes
from sojourn.metrics.memory.prefix_outcomes import hit_tokens
from sojourn.metrics.memory.residence import ModelResidence
from sojourn.metrics.request.timeline import call_of
from sojourn.metrics.request.waits import reasons
from sojourn.ui.tables.request import cohorts
from sojourn.ui.text import duration, number

OUTCOME_MEANING = {
    "hit": "in the cache",
    "hit_host": "in the tier of host memory",
    "hit_disk": "in the tier on a disk",
    "hit_remote": "in the remote tier",
    "hit_peer": "on a prefill server",
    "miss_evicted": "was in the cache, and was evicted before its next use",
    "miss_in_flight": "another request was computing it at that moment",
    "miss_disabled": "would have been a hit, but the cache is off, or the request asked for scores of its prompt",
    "miss_diverged": "follows a known prefix, and is different from all that was known to follow it",
    "miss_sub_block": "known, but no whole block of it; and the last token, which is always computed",
    "miss_cold": "never seen before",
}
OUTCOMES = tuple(OUTCOME_MEANING)
BLOCK_EVENTS = ("evicted_age_ns", "evicted_idle_ns", "reuse_gap_ns", "reuse_distance_blocks")


def outcome_tokens(requests: pd.DataFrame) -> pd.DataFrame:
    """Prompt tokens by outcome (columns OUTCOMES), a row a cohort; empty where no request tells."""
    recorded = pd.DataFrame([reasons(cell) for cell in requests.prefix_outcomes], index=requests.index)
    recorded = recorded.reindex(columns=list(OUTCOMES)).fillna(0.0)
    groups = {name: members for name, members in cohorts(requests).items() if name != "slowest 10%"}
    sums = {name: recorded.loc[members.index].sum() for name, members in groups.items()}
    table = pd.DataFrame.from_dict(sums, orient="index", columns=list(OUTCOMES))
    return table[table.sum(axis=1) > 0]


def hit_rates(requests: pd.DataFrame, begin_ns: float, bins: int = 40) -> pd.DataFrame:
    """Share of the prompt tokens that were hit, and that an infinite cache would have hit, over the time of arrival."""
    if outcome_tokens(requests).empty:
        return pd.DataFrame(columns=["at_s", "hit", "infinite"])
    outcomes = [reasons(cell) for cell in requests.prefix_outcomes]
    tokens = pd.DataFrame(
        {
            "queried": [sum(cell.values()) for cell in outcomes],
            "hit": [hit_tokens(cell) for cell in outcomes],
            "infinite": requests.infinite_hit_tokens.astype("float64").fillna(0).to_numpy(),
        },
        index=(requests.arrived_ns.astype("float64").to_numpy() - begin_ns) / 1e9,
    )
    tokens = tokens[tokens.index.notna() & (tokens.queried > 0)]
    count = min(bins, max(1, len(tokens) // 4))
    edges = np.linspace(tokens.index.min(), tokens.index.max() + 1e-9, count + 1)
    sums = tokens.groupby(pd.cut(tokens.index, edges, right=False), observed=False).sum()
    shares = sums[["hit", "infinite"]].div(sums.queried, axis=0).reset_index(drop=True)
    return shares.assign(at_s=(edges[:-1] + edges[1:]) / 2)


def miss_ratios(requests: pd.DataFrame, lens: KvLens | None = None) -> tuple[pd.DataFrame, float, float]:
    """`pool, miss` for RATIOS of the pool, then the share that this run missed, and what no cache could have hit. With
    a lens more sizes, and `low` and `high` of each."""
    if lens is not None and lens.hit_rate is not None and lens.infinite_hit_rate is not None:
        points = [point for point in lens.curve if point.ratio is not None and point.hit_rate is not None]
        curve = pd.DataFrame(
            {
                "pool": [point.ratio for point in points],
                "miss": [1 - (point.hit_rate or 0) for point in points],
                "low": [float("nan") if point.high is None else 1 - point.high for point in points],
                "high": [float("nan") if point.low is None else 1 - point.low for point in points],
            }
        )
        return curve, 1 - lens.hit_rate, 1 - lens.infinite_hit_rate
    *sizes, infinite = miss_ratio_curve(requests) or [None]
    if not sizes:
        return pd.DataFrame(columns=["pool", "miss"]), float("nan"), float("nan")
    curve = pd.DataFrame({"pool": [point.ratio for point in sizes], "miss": [point.miss_ratio for point in sizes]})
    hit = hit_tokens(prefix_outcomes(requests))
    return curve, 1 - hit / infinite.queried_tokens, infinite.miss_ratio


def block_events(steps: pd.DataFrame) -> dict[str, np.ndarray]:
    """All sampled events of blocks, by column of BLOCK_EVENTS."""
    return {name: cells.values(steps[name])[0].astype("float64") for name in BLOCK_EVENTS}


def tiers(steps: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """What each KV tier gave and took, as text, a row a tier; empty of a run without tiers."""
    if "tier_blocks" not in steps.columns or "loaded_tokens" not in requests.columns:
        return pd.DataFrame()
    rows = []
    hits = [reasons(cell) for cell in requests.loaded_tokens]
    held = cells.sums_by_key(steps.tier_blocks, TIERS)
    for tier in cells.keys_of(steps.tier_blocks):

        def total(column: str, tier: str = tier) -> float:
            return float(cells.sums_by_key(steps[column], [tier])[tier].sum())

        load_s, store_s = total("tier_load_ns") / 1e9, total("tier_store_ns") / 1e9
        loaded, stored = total("tier_loaded_bytes") / 1e6, total("tier_stored_bytes") / 1e6
        figures = {
            "prompt tokens from it": float(sum(cell.get(tier, 0) for cell in hits)),
            "requests with such tokens": float(sum(tier in cell for cell in hits)),
            "read (MB)": loaded, "read (s)": load_s, "read (MB/s)": loaded / load_s if load_s else float("nan"),
            "written (MB)": stored, "written (s)": store_s,
            "written (MB/s)": stored / store_s if store_s else float("nan"),
            "blocks at the end": float(held[tier].iloc[-1]), "failures": total("tier_failures"),
            "blocks without room": total("tier_refused"),
        }  # fmt: skip
        rows.append({"tier": tier} | {name: number(value) for name, value in figures.items()})
    return pd.DataFrame(rows)


def load_sentence(requests: pd.DataFrame) -> str:
    """How often a tier's part of a prefix was loaded, and how often computing again was predicted to be cheaper."""
    decided = requests[requests.load_decision.notna()] if "load_decision" in requests else requests[:0]
    if decided.empty:
        return "No request found a part of its prefix in a tier."
    skipped = decided[decided.load_decision == "recompute"]
    sentence = f"{number(float(len(decided)))} requests found a part of their prefix in a tier"
    if skipped.empty:
        return f"{sentence}, and all of them loaded it."
    load, again = (skipped[f"{way}_predicted_ns"].astype("float64").mean() for way in ("load", "recompute"))
    return (
        f"{sentence}. {number(float(len(skipped)))} of them computed it again, as that was predicted to be cheaper: "
        f"{duration(again)} against {duration(load)}, means."
    )


def preemptions(steps: pd.DataFrame, requests: pd.DataFrame, begin_ns: float, count: int = 20) -> pd.DataFrame:
    """Who lost his blocks, when, to whom and at what cost, as text; the costliest first."""
    facts = requests.drop_duplicates("request_id").set_index("request_id")
    rows = []
    for record in cells.as_objects(steps[cells.lengths(steps.preempted_ids) > 0]).itertuples():
        takers, thrown = _cell(record.preempted_for), _cell(record.preempted_tokens)
        for place, victim in enumerate(record.preempted_ids):
            taker = takers[place] if place < len(takers) else ""
            call = call_of(victim)
            known = facts.loc[call] if call in facts.index else None
            stall = float(known.ledger_memory_preempted_ns) if known is not None else float("nan")
            again = float(known.recomputed_tokens) if known is not None else float("nan")
            rows.append(
                {
                    "at (s)": (record.begin_ns - begin_ns) / 1e9, "step": record.step, "victim": victim,
                    "its blocks went to": "nobody: it could not grow" if taker == victim else taker or "–",
                    "positions given up": thrown[place] if place < len(thrown) else float("nan"),
                    "tokens computed again": again, "time without a place (ms)": stall / 1e6,
                }
            )  # fmt: skip
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    table = table.sort_values("time without a place (ms)", ascending=False, kind="stable").head(count)
    for name in table.columns:
        if name not in ("victim", "its blocks went to"):
            table[name] = table[name].map(lambda value: number(float(value)))
    return table


def _cell(value: object) -> list:
    """The elements of a list, none of a null."""
    return list(value) if value is not None and not isinstance(value, float) else []


def residences(models: Sequence[ModelResidence]) -> pd.DataFrame:
    """A row a model of a front: seconds by state, its loads and wakes, and both costs."""
    rows = [
        {
            "model": model.name,
            "hot (s)": model.seconds("hot"),
            "sleeping (s)": model.seconds("sleeping"),
            "cold (s)": model.seconds("cold"),
            "loads": model.count("loading"),
            "loading (s)": model.seconds("loading"),
            "wakes": model.count("waking"),
            "waking (s)": model.seconds("waking"),
            "held (GiB·s)": model.held_gib_seconds,
            "freed (GiB·s)": model.freed_gib_seconds,
            "calls that waited": model.num_waited,
            "waited (s)": model.waited_ns / 1e9,
            "freed for each second waited (GiB)": model.freed_per_second_waited,
        }
        for model in models
    ]
    return pd.DataFrame(rows)
