"""Verdicts and truths of a known score."""

from sojourn.diagnosis.score.judgement import Judgement, judge
from sojourn.diagnosis.score.said import Said, SaidCause
from sojourn.diagnosis.score.truth import FaultRecord, Remedy, Truth

KV = Truth(keys=["kv_pool", "block_leak"], lifecycles=["memory"], kinds=["policy", "capacity"],
           remedies=[Remedy(setting="num_kv_blocks", direction="larger")])  # fmt: skip
TOKENISER = Truth(keys=["slow_tokeniser"], lifecycles=["token", "request"], kinds=["fault"])
SETTINGS = {"num_kv_blocks": 64, "max_num_seqs": 8, "max_prefill_chunk_tokens": None, "policy": "fcfs"}
KIND = {"kv_pool": "policy", "overload": "capacity", "slow_tokeniser": "fault", "batch_cap": "policy"}
LIFECYCLE = {"kv_pool": "memory", "slow_tokeniser": "token"}


def cause(key: str, *, lifecycle: str | None = None, kind: str | None = None, **fields) -> SaidCause:
    """A finding; lifecycle and kind are those of the cause, by default."""
    return SaidCause(key=key, lifecycle=lifecycle or LIFECYCLE.get(key, "request"), kind=kind or KIND.get(key, "fault"),
                     statement="it is so", **fields)  # fmt: skip


def said(*causes: SaidCause | str, state: str = "degraded", **fields) -> Said:
    named = [cause(each) if isinstance(each, str) else each for each in causes]
    return Said(state=state, headline="so it is", causes=named, **fields)


def fault(*truths: Truth, case: str = "kv", severity: int = 1, repeat: int = 0, **fields) -> FaultRecord:
    return FaultRecord(case=case, workload="chat", severity=severity, repeat=repeat, truths=list(truths or (KV,)),
                       **fields)  # fmt: skip


def control(state: str = "healthy", **fields) -> FaultRecord:
    return FaultRecord(**{"case": "chat", "workload": "chat", "control": state} | fields)


def judged(record: FaultRecord, verdict: Said, attainment: float = 0.4, base: float | None = 0.98) -> Judgement:
    return judge("run", record, "steps", verdict, attainment, base, SETTINGS)
