"""Requests wait until a prefill server has computed their prompts."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.split import mean_ms
from sojourn.diagnosis.symptom_tree.reading import account

REMOTE = "request.remote_prefill"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    waited_ms = mean_ms(facts, excess, "ledger_request_remote_prefill_ns")
    return Proposal(
        cause=f"late requests waited {waited_ms:,.0f} ms each until a prefill server had computed their prompts",
        evidence=excess_evidence(excess, (REMOTE,)),
        measurement="the same requests at half the rate; and the diagnosis of the prefill server's own run",
        if_cause=f"at half the rate the wait falls well below {waited_ms:,.0f} ms where the prefill server has a queue",
        if_rival=f"{missing_share(excess)} stays in memory.transfer",
        change="more or faster prefill servers, or short prompts computed by the decode server itself",
        fixes=(Change(removed={REMOTE: 1.0}),),
    )


CAUSE = Cause(
    key="slow_prefill_server",
    lifecycles=("request", "compute"),
    object="prefill server",
    kind="capacity",
    rival="a slow transfer: the KV of a computed prompt comes late",
    rival_key="slow_kv_transfer",
    asks="Do requests wait for a server that computes prompts?",
    measurement="the same scenario with another prefill server",
    figures=(account("request.remote_prefill"),),
    booked=("request.remote_prefill",),
    complaints={"high_ttft": 20, "devices_do_not_help": 9},
    reads={
        Records: Rule(read_records, accounts=(REMOTE,)),
        Accounts: hold_time(
            accounts=("request.remote_prefill",),
            words="requests wait until a prefill server has computed their prompts",
            change="more or faster prefill servers, or prompts that the decode server computes itself",
            rival="prompts that are long for any server",
            rival_key="",
        ),
    },
)
