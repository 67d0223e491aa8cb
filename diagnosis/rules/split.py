"""Causes of a decode server whose prompts another server computes (docs/disaggregation.md)."""

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.rules.cause import Proposal, cause
from sojourn.diagnosis.rules.shared_evidence import excess_evidence, missing_share
from sojourn.diagnosis.verdict import evidence
from sojourn.metrics.prediction import Change

REMOTE, TRANSFER = "request.remote_prefill", "memory.transfer"


@cause(lifecycles=("request", "compute"), object="prefill server", kind="capacity", accounts=(REMOTE,),
       rival="a slow transfer: the KV of a computed prompt comes late", rival_key="slow_kv_transfer")  # fmt: skip
def slow_prefill_server(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait until a prefill server has computed their prompts."""
    waited_ms = _mean_ms(facts, excess, "ledger_request_remote_prefill_ns")
    return Proposal(
        cause=f"late requests waited {waited_ms:,.0f} ms each until a prefill server had computed their prompts",
        evidence=excess_evidence(excess, (REMOTE,)),
        measurement="the same requests at half the rate; and the diagnosis of the prefill server's own run",
        settings=None,
        if_cause=f"at half the rate the wait falls well below {waited_ms:,.0f} ms where the prefill server has a queue",
        if_rival=f"{missing_share(excess)} stays in memory.transfer",
        change="more or faster prefill servers, or short prompts computed by the decode server itself",
        fixes=(Change(removed={REMOTE: 1.0}),),
    )


@cause(lifecycles=("memory",), object="KV transfer between servers", kind="capacity", accounts=(TRANSFER,),
       rival="a prefill server that is slow to compute", rival_key="slow_prefill_server")  # fmt: skip
def slow_kv_transfer(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait for KV that another server has computed."""
    waited_ms = _mean_ms(facts, excess, "ledger_memory_transfer_ns")
    size, seconds = (
        float(facts.rows[name].fillna(0).astype("float64").sum()) if name in facts.rows else 0.0
        for name in ("transfer_bytes", "transfer_ns")
    )
    found = excess_evidence(excess, (TRANSFER,))
    if size and seconds:
        rate = size / seconds  # bytes a nanosecond
        words = f"{size / 1e6:,.0f} MB of KV were read at {rate:.2g} GB/s"
        found.append(evidence(words, rate, "GB/s", "requests: transfer_bytes, transfer_ns", weight=0))
    return Proposal(
        cause=f"late requests waited {waited_ms:,.0f} ms each for KV that a prefill server had computed",
        evidence=found,
        measurement="the same scenario with one server that computes prompts and outputs",
        settings=None,
        if_cause=f"memory.transfer goes, {waited_ms:,.0f} ms a late request, and compute.prefill takes its place",
        if_rival=f"{missing_share(excess)} stays, in compute.prefill",
        change="a faster link or transport; both calls at once, so that chunks are read while the next are computed",
        fixes=(Change(removed={TRANSFER: 1.0}),),
    )


def _mean_ms(facts: Facts, excess: Excess, column: str) -> float:
    rows = facts.rows.loc[excess.missing]
    return float(rows[column].mean()) / 1e6 if column in rows else 0.0
