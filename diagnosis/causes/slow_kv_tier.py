"""Requests wait for reads of a KV tier that is slower than to compute again, or than a sound disk."""

import numpy as np

from sojourn.diagnosis.cause import Cause, Change, Client, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.foreign_server import span_share
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH
from sojourn.diagnosis.statements import means
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.kv_memory import host_gib
from sojourn.diagnosis.statements.prefixes import pool_for_reuse
from sojourn.diagnosis.statements.refutations import EXTERNAL_CACHE_HITS
from sojourn.diagnosis.symptom_tree.reading import account
from sojourn.interop.sources.source import EXTERNAL_HITS, EXTERNAL_LOOKUPS, TIER_SECONDS
from sojourn.interop.sources.view import ServerView
from sojourn.metrics.request.waits import reasons
from sojourn.metrics.run.directory import section

LOAD = "memory.load"
SLOW = 1.5  # waiting for reads, over what computing again was predicted to take: less is the error of a prediction
SLOW_DISK = 100e6  # bytes/s: a magnetic disk reads more in one piece, and a solid one ten times that
UNDISTURBED = 0.75  # quantile of the speeds: slower ones may have waited for the reads of others
FEWEST_TOKENS, HITS_ALREADY = 1000, 0.5  # that were asked for; of the prompt tokens, in the server's own cache
RECORDS = "requests: load_ns, recompute_predicted_ns, loaded_tokens"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    if "load_decision" not in facts.rows:
        return None
    loaded = facts.rows[(facts.rows.load_decision == "load") & facts.rows.recompute_predicted_ns.notna()]
    waited_ms = float(loaded.load_ns.fillna(0).astype("float64").sum()) / 1e6
    again_ms = float(loaded.recompute_predicted_ns.astype("float64").sum()) / 1e6
    read, speed = _bytes_read(facts, loaded)
    is_slower, is_slow_disk = waited_ms >= SLOW * again_ms, speed is not None and speed < SLOW_DISK
    if not len(loaded) or not waited_ms or not (is_slower or is_slow_disk):
        return None
    times = waited_ms / max(again_ms, 1e-9)
    part = max(1 - again_ms / waited_ms if is_slower else 0.0, 1 - speed / SLOW_DISK if is_slow_disk else 0.0)
    settings = _without(facts) if is_slower else _host_memory(facts)
    than = f"{times:.1f} times as long as computing the same tokens again" if is_slower else (
        f"which came at {speed / 1e6:.0f} MB/s")  # fmt: skip
    return Proposal(
        cause=f"{len(loaded)} requests waited {waited_ms / len(loaded):,.0f} ms each for reads of a KV tier, {than}",
        evidence=[
            evidence(f"the reads took {waited_ms:,.0f} ms; computing again was predicted to take {again_ms:,.0f} ms",
                     times, "ratio", RECORDS, supports=is_slower or times >= 0.5, weight=4 if is_slower else 1),
            *([evidence(f"{read / 1e6:,.0f} MB were read at {speed / 1e6:.0f} MB/s; a sound disk reads more than "
                        f"{SLOW_DISK / 1e6:.0f}", speed / 1e6, "MB/s", RECORDS, supports=is_slow_disk, weight=3)]
              if speed is not None else []),
            *excess_evidence(excess, (LOAD,)),
        ],
        measurement="the same scenario without the tier" if is_slower else
        "the same scenario with all that is read again in host memory",
        settings=settings,
        if_cause=f"memory.load goes, and compute.prefill grows by about {again_ms / len(loaded):,.0f} ms a request"
        if is_slower else "memory.load falls to the copies within a step",
        if_rival=f"{missing_share(excess)} stays",
        change="a faster disk, or no tier on this one: kv_host_gib alone" if is_slower or settings is None else
        f"a faster disk, or kv_host_gib={settings['kv_host_gib']:g}, so that reused prefixes are in host memory",
        claims={LOAD: part},
        fixes=() if settings is None else (Change(settings=settings),),
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """An external cache or an offload tier is asked for prompts, and has next to none of them."""
    view = facts.server
    asked, found = (view.further.get(name, 0.0) for name in (EXTERNAL_LOOKUPS, EXTERNAL_HITS))
    spent = sum(span_share(view.span(name), excess) for name in ("compute.prefill", "request.queue"))
    if asked < FEWEST_TOKENS or excess.objective == "tpot_ms" or spent < EXPLAINS_ENOUGH:
        return None
    own, hits = view.hit_rate or 0.0, found / asked
    if own < HITS_ALREADY and (means.prompt_work(view) or 0.0) < means.PROMPT_WORK:
        return None
    why = f"the server's own cache has {own:.0%} of the prompts already" if own >= HITS_ALREADY else (
        "prompts do not repeat, or the tier is too small, or its keys differ between replicas")  # fmt: skip
    return Proposal(
        cause=f"prompts are computed, and the external cache spares none of it: it had {hits:.1%} of the {asked:,.0f} "
        f"tokens that it was asked for; {why}",
        evidence=[
            evidence(f"{found:,.0f} of {asked:,.0f} tokens that the external cache was asked for were in it", hits,
                     "share", means.COUNTERS, weight=3),
            evidence(f"{own:.0%} of the looked-up tokens were in the server's own prefix cache", own, "share",
                     means.COUNTERS, weight=0),
            evidence(f"{spent:.0%} of {means.quantity(excess)} is queue and prefill; {_tier_time(view)}", spent,
                     "share", means.HISTOGRAMS, supports=False),
        ],
        measurement="one replica without the connector (--kv-transfer-config) beside one with it, at the same load",
        settings={},
        if_cause=f"without it {missing_share(excess)} falls or stays, and nothing is lost",
        if_rival=f"without it prefill takes longer, and {missing_share(excess)} grows",
        change="no external cache for this traffic; else routing by prefix, so that prompts meet where they were "
        "stored, and a larger tier",
        explained=EXPLAINS_ENOUGH * spent,
        gain=means.time_gained(view, f"{spent:.0%} in queue and prefill"),
    )  # fmt: skip


def _tier_time(view: ServerView) -> str:
    """Transfers run beside the steps, so that their time is no request's."""
    took = view.further.get(TIER_SECONDS)
    if took is None:
        return "what lookups and stores take of it is in no metric of this server"
    return f"reads and writes of the tier took {took:,.1f} s of {view.seconds:,.0f} s, beside the steps or within them"


def _bytes_read(facts: Client, loaded) -> tuple[float, float | None]:
    """Bytes that came from a slow tier, and their speed in bytes/s while nobody else read; None where none is known."""
    of_token = section(facts.meta, "model_shape").get("kv_bytes_per_token")
    if not of_token or "loaded_tokens" not in loaded or not len(loaded):
        return 0.0, None
    tokens = np.array([sum(count for tier, count in reasons(cell).items() if tier != "host")
                       for cell in loaded.loaded_tokens], dtype=float)  # fmt: skip
    waited_ns = loaded.load_ns.fillna(0).astype("float64").to_numpy()
    known = (tokens > 0) & (waited_ns > 0)
    if not known.any():
        return 0.0, None
    speeds = tokens[known] * of_token / waited_ns[known] * 1e9
    return float(tokens.sum() * of_token), float(np.quantile(speeds, UNDISTURBED))


def _without(facts: Client) -> dict[str, object] | None:
    return {"kv_disk_path": None} if facts.engine.get("kv_disk_path") is not None else None


def _host_memory(facts: Records) -> dict[str, object] | None:
    """Host memory for all that is asked for again, so that the disk is read after a restart only."""
    kv = facts.kv()
    size = host_gib(facts, pool_for_reuse(kv)) if kv is not None else 0.0
    size = max(size, 2 * (facts.engine.get("kv_host_gib") or 1.0))
    return {"kv_host_gib": float(f"{size:.2g}")}


CAUSE = Cause(
    key="slow_kv_tier",
    lifecycles=("memory",),
    object="KV tier",
    kind="fault",
    rival="prompts that are long, wherever their KV comes from",
    rival_key="own_prefill",
    asks="Do reads of a KV tier take longer than to compute again?",
    measurement="the same scenario without the tier",
    figures=(account("memory.load"),),
    booked=("memory.load",),
    missing="load_ns and recompute_predicted_ns of requests",
    complaints={"high_ttft": 9, "product_latency_poor": 8},
    reads={
        Records: Rule(read_records, accounts=(LOAD,)),
        Means: Rule(
            read_means,
            kind="policy",
            object="external cache",
            rival="prompts that are long and new: any cache misses them",
            rival_key="overload",
            refuted_by=(EXTERNAL_CACHE_HITS,),
        ),
    },
)
