"""KV tiers below the device: a tier whose reads take longer than to compute the prompt again."""

from metrics.diagnosis.excess import Excess
from metrics.diagnosis.facts import Facts
from metrics.diagnosis.rules.cause import Proposal, cause
from metrics.diagnosis.rules.shared_evidence import excess_evidence, missing_share
from metrics.diagnosis.verdict import evidence

LOAD = "memory.load"
SLOW = 1.5  # waiting for reads, over what computing again was predicted to take: less is the error of a prediction
RECORDS = "requests: load_ns, recompute_predicted_ns, loaded_tokens"


@cause(lifecycles=("memory",), object="KV tier", kind="fault", accounts=(LOAD,),
       rival="prompts that are long, wherever their KV comes from", rival_key="own_prefill")  # fmt: skip
def slow_kv_tier(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait for reads of a KV tier longer than it would take to compute their prompts again."""
    if "load_decision" not in facts.rows:
        return None
    loaded = facts.rows[(facts.rows.load_decision == "load") & facts.rows.recompute_predicted_ns.notna()]
    waited_ms = float(loaded.load_ns.fillna(0).astype("float64").sum()) / 1e6
    again_ms = float(loaded.recompute_predicted_ns.astype("float64").sum()) / 1e6
    if not len(loaded) or waited_ms < SLOW * again_ms:
        return None
    times, part = waited_ms / max(again_ms, 1e-9), 1 - again_ms / waited_ms
    settings = {"kv_disk_path": None} if facts.engine.get("kv_disk_path") is not None else None
    return Proposal(
        cause=f"{len(loaded)} requests waited {waited_ms / len(loaded):,.0f} ms each for reads of a KV tier, "
        f"{times:.1f} times as long as computing the same tokens again",
        evidence=[
            evidence(f"the reads took {waited_ms:,.0f} ms; computing again was predicted to take {again_ms:,.0f} ms",
                     times, "ratio", RECORDS, weight=4),
            *excess_evidence(excess, (LOAD,)),
        ],
        measurement="the same scenario without the tier",
        settings=settings,
        if_cause=f"memory.load goes, and compute.prefill grows by about {again_ms / len(loaded):,.0f} ms a request",
        if_rival=f"{missing_share(excess)} stays",
        change="a faster disk, or no tier on this one: kv_host_gib alone",
        claims={LOAD: part},
    )  # fmt: skip
