"""Requests wait for KV that another server has computed."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.split import mean_ms
from sojourn.diagnosis.symptom_tree.reading import account

TRANSFER = "memory.transfer"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    waited_ms = mean_ms(facts, excess, "ledger_memory_transfer_ns")
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
        if_cause=f"memory.transfer goes, {waited_ms:,.0f} ms a late request, and compute.prefill takes its place",
        if_rival=f"{missing_share(excess)} stays, in compute.prefill",
        change="a faster link or transport; both calls at once, so that chunks are read while the next are computed",
        fixes=(Change(removed={TRANSFER: 1.0}),),
    )


CAUSE = Cause(
    key="slow_kv_transfer",
    lifecycles=("memory",),
    object="KV transfer between servers",
    kind="capacity",
    rival="a prefill server that is slow to compute",
    rival_key="slow_prefill_server",
    asks="Does KV of another server come late, though it is computed?",
    measurement="the same scenario with one server that does both, or with another kv_transport",
    figures=(account("memory.transfer"),),
    booked=("memory.transfer",),
    missing="transfer_bytes and transfer_ns of requests",
    complaints={"high_ttft": 12, "devices_do_not_help": 2},
    reads={
        Records: Rule(read_records, accounts=(TRANSFER,)),
        Accounts: hold_time(
            accounts=("memory.transfer",),
            words="requests wait for KV that another server has computed",
            change="a faster link, and kv_transfer_granularity=chunk with both calls at once",
            rival="a side channel that answers late",
            rival_key="",
        ),
    },
)
