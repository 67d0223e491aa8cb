"""The tree of one symptom for one run: complaint → lifecycles → objects → measurement, with the run's figures.

A branch says whether it leads to the finding, is ruled out in numbers, or cannot be known, and from which evidence.
A finding always leads: the tree never contradicts the verdict.
"""

from typing import Literal

import msgspec

from sojourn.diagnosis.cause import Cause
from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.evidence import Client, is_joined
from sojourn.diagnosis.excess import Excess, accounts_of
from sojourn.diagnosis.foreign_server import shares_seen
from sojourn.diagnosis.repeat import with_records
from sojourn.diagnosis.symptom_tree.complaints import BY_SYMPTOM, Complaint
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, figures
from sojourn.diagnosis.symptoms import BY_KEY, late
from sojourn.diagnosis.verdict import Diagnosis, Finding, Status

BranchStatus = Literal["leads_here", "possible", "unknown", "ruled_out"]
STATUS_WORDS: dict[BranchStatus, str] = {
    "leads_here": "leads here", "possible": "not ruled out", "unknown": "cannot be known", "ruled_out": "ruled out",
}  # fmt: skip
_ORDER = list(STATUS_WORDS)
LATENCY = ("high_ttft", "high_itl")
QUANTITIES = {"high_ttft": "time to first token", "high_itl": "time per output token"}
LIFECYCLE_QUESTIONS = {
    "request": "Does the request wait for its turn, or for other requests?",
    "memory": "Does it wait for KV blocks, or compute again what was there before?",
    "compute": "Does the device, or its host, take long for the work itself?",
    "token": "Does text ↔ ids, or the draw of a token, take long?",
    "client": "Does the time pass outside of the server?",
}
NEEDS_RECORDS = "the server's records of its requests and steps"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured fact. `share` (0 to 1) where it can be a bar."""

    statement: str
    source: str
    share: float | None = None


class ObjectBranch(msgspec.Struct, frozen=True, kw_only=True):
    key: str  # of the cause
    name: str
    asks: str
    status: BranchStatus
    reason: str  # in numbers, or the evidence that is missing
    figures: list[Figure]
    measurement: str
    command: str
    finding: int | None  # place in `Diagnosis.findings`


class LifecycleBranch(msgspec.Struct, frozen=True, kw_only=True):
    lifecycle: str
    asks: str
    status: BranchStatus
    reason: str
    share: float | None  # of the quantity that the symptom is about, in the lifecycle's own accounts
    accounts: dict[str, float]  # account → share of that quantity, above a hundredth
    objects: list[ObjectBranch]  # most telling first


class SymptomTree(msgspec.Struct, frozen=True, kw_only=True):
    symptom: str
    words: str
    title: str
    status: Status  # of the symptom in this run
    reason: str
    basis: str  # what the shares are of
    branches: list[LifecycleBranch]
    finding: int | None  # place of the first finding of this symptom
    next_measurement: str
    next_command: str


class _Spent(msgspec.Struct, frozen=True):
    """Where the time that a symptom is about went: account → share of it; empty where nobody recorded it."""

    basis: str
    shares: dict[str, float]

    def of(self, accounts: tuple[str, ...]) -> float:
        return sum(max(self.shares.get(name, 0.0), 0.0) for name in accounts)

    def in_lifecycle(self, name: str) -> dict[str, float]:
        return {account: share for account, share in self.shares.items()
                if account.split(".")[0] == name and share >= 0.01}  # fmt: skip


def symptom_tree(facts: Client, diagnosis: Diagnosis, symptom: str) -> SymptomTree:
    """The tree of one of the six symptoms. `diagnosis` is of the same run as `facts`."""
    complaint = BY_SYMPTOM[symptom]
    check = next(each for each in diagnosis.checks if each.symptom == symptom)
    spent = _spent(facts, symptom)
    own = [(place, each) for place, each in enumerate(diagnosis.findings) if _is_of(each, symptom)]
    branches = [_lifecycle(facts, complaint, spent, name, own, diagnosis) for name in LIFECYCLE_QUESTIONS]
    branches.sort(key=lambda branch: (_ORDER.index(branch.status), -(branch.share or 0.0)))
    first = own[0][0] if own else None
    measurement, command = _next(facts, diagnosis, symptom, first, branches)
    return SymptomTree(
        symptom=symptom, words=complaint.words, title=complaint.title, status=check.status, reason=check.reason,
        basis=spent.basis, branches=branches, finding=first, next_measurement=measurement, next_command=command,
    )  # fmt: skip


def _is_of(finding: Finding, symptom: str) -> bool:
    """A finding that explains several symptoms names all of their titles."""
    return finding.symptom == symptom or BY_KEY[symptom].title in finding.title.split(" · ")


def _spent(facts: Client, symptom: str) -> _Spent:
    above = late(facts, symptom) if symptom in LATENCY else []
    if above and is_joined(facts):
        return _of_excess(above, symptom)
    served = facts.rows[facts.rows.status == "ok"]
    if symptom == "high_itl" and is_joined(facts):
        mean = accounts_of(served, "tpot_ms").mean().fillna(0.0)
        total = float(mean.clip(lower=0).sum())
        return _Spent(f"the {QUANTITIES[symptom]} of all {len(served)} served requests",
                      {name: float(ms) / total for name, ms in mean.items()} if total else {})  # fmt: skip
    shares = shares_seen(facts, "ttft" if symptom == "high_ttft" else "ledger")
    split: dict[str, float] = {}
    for names, share in shares.items():  # a foreign server measures some accounts together: the first stands for them
        split[names.split(" + ")[0]] = share
    quantity = QUANTITIES.get(symptom, "time") if symptom == "high_ttft" else "time"
    return _Spent(f"the {quantity} of all {facts.served} served requests", split)


def _of_excess(above: list[Excess], symptom: str) -> _Spent:
    total: dict[str, float] = {}
    for excess in above:
        for name, ms in excess.accounts.items():
            total[name] = total.get(name, 0.0) + max(ms, 0.0) * excess.missed
    whole = sum(total.values())
    count = len(set().union(*(set(excess.missing) for excess in above)))
    return _Spent(f"what {count} late requests spent above the others or the objective, in {QUANTITIES[symptom]}",
                  {name: ms / whole for name, ms in total.items()} if whole else {})  # fmt: skip


def _lifecycle(
    facts: Client, complaint: Complaint, spent: _Spent, name: str, own: list[tuple[int, Finding]], diagnosis: Diagnosis
) -> LifecycleBranch:
    named = [(place, each) for place, each in own if (each.lifecycles or ["client"])[0] == name]
    taken = {_key(each) for _, each in own}
    objects = [
        _object(facts, complaint.symptom, spent, leaf) for leaf in complaint.causes(name) if leaf.key not in taken
    ]
    objects.sort(key=lambda each: _ORDER.index(each.status))
    objects = [_of_finding(place, each) for place, each in named] + objects
    accounts = spent.in_lifecycle(name)
    share = float(sum(accounts.values())) if spent.shares else None
    found = [each for _, each in own]
    status, reason = (
        _status_of_findings([each for _, each in named], _holds(name, share)) if named
        else _status(facts, diagnosis, name, found, objects, share, complaint.symptom)
    )  # fmt: skip
    if status == "leads_here" and (share or 0.0) < NEGLIGIBLE and (shows := _largest(spent)):
        reason = f"{named[0][1].cause if named else reason}; the time that it costs is booked to {shows}"
    return LifecycleBranch(
        lifecycle=name, asks=LIFECYCLE_QUESTIONS[name], status=status, reason=reason, share=share,
        accounts=dict(sorted(accounts.items(), key=lambda item: -item[1])), objects=objects,
    )  # fmt: skip


def _largest(spent: _Spent) -> str:
    """The two accounts with most of the time, in words."""
    ranked = sorted(((share, name) for name, share in spent.shares.items() if share >= NEGLIGIBLE), reverse=True)
    return " and ".join(f"{name} ({share:.0%})" for share, name in ranked[:2])


def _key(finding: Finding) -> str:
    return finding.key or finding.object


def _of_finding(place: int, found: Finding) -> ObjectBranch:
    leaf = CAUSES.get(_key(found))
    return ObjectBranch(
        key=_key(found), name=found.object, asks=leaf.asks if leaf else "", reason=found.cause,
        status="leads_here" if found.role == "cause" else "possible",
        figures=[Figure(statement=fact.statement, source=fact.source,
                        share=min(1.0, max(0.0, fact.value)) if fact.unit == "share" else None)
                 for fact in found.evidence if fact.supports],
        measurement=found.probe.measurement, command=found.probe.command, finding=place,
    )  # fmt: skip


def _object(facts: Client, symptom: str, spent: _Spent, leaf: Cause) -> ObjectBranch:
    found = figures(leaf.figures, facts)
    status, reason = _judge(facts, symptom, spent, leaf, found)
    return ObjectBranch(
        key=leaf.key, name=leaf.name or leaf.object, asks=leaf.asks, status=status, reason=reason,
        figures=[Figure(statement=each.statement, source=each.source,
                        share=None if each.share is None else float(each.share)) for each in found],
        measurement=leaf.measurement, command="", finding=None,
    )  # fmt: skip


def _judge(facts: Client, symptom: str, spent: _Spent, leaf: Cause, found: list) -> tuple[BranchStatus, str]:
    if symptom in LATENCY and leaf.booked and is_joined(facts) and spent.shares:
        share = spent.of(leaf.booked)
        if share < NEGLIGIBLE:
            return "ruled_out", (
                f"{_list_accounts(leaf.booked)} {'hold' if len(leaf.booked) > 1 else 'holds'} {share:.0%} of "
                f"{_short(spent.basis)}"
            )
    against = [each for each in found if each.rules_out]
    if against and not leaf.lacks:
        return "ruled_out", against[0].statement
    if leaf.lacks:
        return "unknown", f"missing: {leaf.lacks}"
    if not found:
        return "unknown", f"missing: {leaf.missing if is_joined(facts) else NEEDS_RECORDS}"
    return "possible", found[0].statement


def _holds(name: str, share: float | None) -> str:
    return f"{name}.* accounts hold {share:.0%}" if share is not None else ""


def _status_of_findings(named: list[Finding], holds: str) -> tuple[BranchStatus, str]:
    leads = next((each for each in named if each.role == "cause"), None)
    return "leads_here" if leads else "possible", _join((leads or named[0]).cause, holds)


def _status(
    facts: Client, diagnosis: Diagnosis, name: str, own: list[Finding], objects: list[ObjectBranch],
    share: float | None, symptom: str,
) -> tuple[BranchStatus, str]:  # fmt: skip
    """Of a lifecycle without a finding: what the symptom says of it, else what is measured in it. `own`: the findings
    of the symptom, in other lifecycles."""
    holds = _holds(name, share)
    shown = next(each.status for each in diagnosis.checks if each.symptom == symptom)
    if shown == "absent" and not own:
        return "ruled_out", _join("nothing is to be explained", holds)
    if shown == "present" and diagnosis.bottleneck == name and not own:
        return "leads_here", f"{holds}, and no known cause explains it" if holds else "no known cause explains it"
    if not is_joined(facts) and name != "client":
        return "unknown", f"missing: {NEEDS_RECORDS}"
    if symptom in LATENCY and (share or 0.0) >= NEGLIGIBLE:
        beside = f"beside the finding in {own[0].lifecycles[0]}, or through it" if own else "no finding is there"
        return "possible", f"{holds}; {beside}"
    return _status_of_objects(objects, holds)


def _status_of_objects(objects: list[ObjectBranch], holds: str) -> tuple[BranchStatus, str]:
    unseen = [each for each in objects if each.status == "unknown"]
    if (left := next((each for each in objects if each.status == "possible"), None)) is not None:
        return "possible", _join(left.reason, holds)
    if unseen and not holds:
        return "unknown", unseen[0].reason
    measured = next((each.reason for each in objects if each.status == "ruled_out" and each.reason in
                     [figure.statement for figure in each.figures]), "")  # fmt: skip
    also = f"not measured: {', '.join(each.name for each in unseen)}" if unseen else ""
    return "ruled_out", _join(holds, measured, also) or "no object of it fits"


def _join(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def _next(
    facts: Client, diagnosis: Diagnosis, symptom: str, first: int | None, branches: list[LifecycleBranch]
) -> tuple[str, str]:
    if first is not None:
        probe = diagnosis.findings[first].probe
        return probe.measurement, probe.command
    if symptom in ("product_latency_poor", "devices_do_not_help") and diagnosis.against is None:
        return "a second run to compare with", f"sojourn diagnose {facts.path} --against RUN2"
    if not is_joined(facts):
        return with_records(facts)
    open_ = next((each for branch in branches for each in branch.objects if each.status == "possible"), None)
    if open_ is not None and next(c.status for c in diagnosis.checks if c.symptom == symptom) == "present":
        return open_.measurement, open_.command
    return "", ""


def _list_accounts(accounts: tuple[str, ...]) -> str:
    return " + ".join(accounts[:3]) + (f" and {len(accounts) - 3} more" if len(accounts) > 3 else "")


def _short(basis: str) -> str:
    return "that excess" if basis.startswith("what") else basis
