"""The two symptoms that take two runs: good benchmark but poor product latency, and more devices do not help."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sojourn.diagnosis.evidence import Client, is_joined, steps_of
from sojourn.diagnosis.excess import accounts_of, attainment
from sojourn.diagnosis.proposal import Gain, Proposal
from sojourn.diagnosis.repeat import rerun, with_records
from sojourn.diagnosis.shares import ledger_columns
from sojourn.diagnosis.symptoms import BY_KEY, FULL_POOL, TOLERATED_MISSES, make_check
from sojourn.diagnosis.verdict import Evidence, Finding, Kind, SymptomCheck, evidence, support_of
from sojourn.metrics.ledger import ACCOUNT_BY_NAME
from sojourn.metrics.request.objectives import OBJECTIVE_NAMES, OBJECTIVES, short
from sojourn.metrics.run.listing import before_and_after

# Settings of the place of a run, which say nothing of what it was.
PLACE = ("base_url", "host", "port", "run_dir", "served_model_name", "model_name", "seed")
# What "more devices" means for this engine: settings that buy hardware. More is larger.
POOL = ("num_kv_blocks", "kv_cache_gib", "memory_fraction")
RESOURCES = ("threads", *POOL)
NAMED_ONLY = ("name", "description", "engine")  # blocks of a scenario that say nothing about the load
DIFFERENT = 1.5  # a workload figure half as large again is another workload; below it two seeds can differ as much
# More hardware helps if at least half of its ideal speed-up arrives: linear scaling is never reached, and less than
# half of it means that something else limits.
HELPS = 0.5
DID_NOT_SHRINK = 0.8  # an account that keeps four fifths of its time did not profit from the hardware
LEDGERS = "requests: ledger_*_ns"
MOST_NAMED = 6  # settings that a sentence names

Compared = tuple[SymptomCheck, Finding | None]


def product_latency(first: Client, second: Client) -> Compared:
    """One run meets its objectives, and the other, on the same server, does not: what differs?"""
    symptom = BY_KEY["product_latency_poor"]
    for what, has in (("served requests", lambda facts: facts.served), ("objectives", lambda facts: facts.objectives)):
        if lacking := _lacking(first, second, has):
            return make_check(symptom, "unknown", f"both runs need {what}; none in {lacking}"), None
    if changed := _find_changes(first, second):
        unlike = f"the servers differ in {_list_names(changed)}; compare like with like"
        return make_check(symptom, "unknown", unlike), None
    good, bad = sorted((first, second), key=attainment, reverse=True)
    reason = f"attainment {attainment(good):.0%} in {good.name} and {attainment(bad):.0%} in {bad.name}"
    if attainment(good) < 1 - TOLERATED_MISSES or attainment(bad) >= 1 - TOLERATED_MISSES:
        return make_check(symptom, "absent", reason), None
    differences = _workload_differences(good, bad)
    if not differences and before_and_after(Path(good.path), Path(bad.path))[0] != Path(good.path):
        reason = f"attainment rose from {attainment(bad):.0%} in {bad.name} to {attainment(good):.0%} in {good.name}"
        return make_check(symptom, "absent", f"{reason}, the later run, and the workloads are alike"), None
    if not differences and not (is_joined(good) and is_joined(bad)):
        unseen = _lacking(good, bad, is_joined)
        blind = next(facts for facts in (good, bad) if not is_joined(facts))
        alike = f"{reason}, and the workloads are alike: the server or the way to it became slower"
        return make_check(
            symptom, "unknown", f"{alike}; no server records in {unseen}; next: {with_records(blind)[0]}"
        ), None
    lost = attainment(good) - attainment(bad) if first is bad else None  # the other run's loss is not of this one
    return make_check(symptom, "present", reason), _finding(symptom.key, lost, _other_workload(good, bad, differences))


def devices(first: Client, second: Client) -> Compared:
    """One run had more hardware, and is hardly faster: which account did not shrink?

    Only for runs that differ in one resource and in nothing else: no other difference can then explain the times.
    """
    symptom = BY_KEY["devices_do_not_help"]
    changed = _find_changes(first, second)
    if "num_kv_blocks" in changed and "num_kv_blocks" not in first.chosen | second.chosen:
        changed.remove("num_kv_blocks")  # the server derived it from what it had
    if unlike := _unlike(first, second, changed):
        return make_check(symptom, "unknown", unlike), None
    name = changed[0]
    small, large = sorted((first, second), key=lambda facts: facts.engine[name])
    was_full = (steps := steps_of(small)) is not None and (steps.kv_use_max >= FULL_POOL or steps.preemptions > 0)
    if name in POOL and not was_full:
        reason = f"the smaller pool was never full, so no request lacked what a larger {name} would hold"
        return make_check(symptom, "unknown", reason), None
    ratio = large.engine[name] / small.engine[name]
    before, after = (facts.rows.e2e_ms.astype("float64").mean() for facts in (small, large))
    speedup = before / after
    reason = f"{ratio:g} times the {name} make requests {speedup:.2f} times as fast ({before:,.0f} → {after:,.0f} ms)"
    if speedup - 1 >= HELPS * (ratio - 1):
        return make_check(symptom, "absent", reason), None
    rigid = _rigid_account(small, large, name, reason)
    return make_check(symptom, "present", reason), _finding(symptom.key, 1 - attainment(large), rigid)


def _finding(symptom: str, lost: float | None, found: Proposal) -> Finding:
    return Finding(
        symptom=symptom, title=BY_KEY[symptom].title, objective="", cohort="all requests of both runs",
        goodput_lost=lost, confidence=support_of(found.evidence), **found.verdict(),
    )  # fmt: skip


def _unlike(first: Client, second: Client, changed: list[str]) -> str:
    """Why two runs cannot show what more of a resource does; "" if they can."""
    if not (is_joined(first) and is_joined(second)):
        blind = next(facts for facts in (first, second) if not is_joined(facts))
        return f"no server records in {_lacking(first, second, is_joined)}; next: {with_records(blind)[0]}"
    if _load_of(first) != _load_of(second):
        return "the runs replay different scenarios; repeat one scenario with more threads or KV blocks"
    if first.meta.get("seed") != second.meta.get("seed"):
        seeds = f"{first.meta.get('seed')} and {second.meta.get('seed')}"
        return f"the seeds differ ({seeds}); repeat one with the seed of the other"
    if not changed:
        return "the runs have the same settings; repeat one with more threads or KV blocks"
    if len(changed) > 1 or changed[0] not in RESOURCES:
        return f"the servers differ in {_list_names(changed)}; change one of {', '.join(RESOURCES)} and nothing else"
    values = [facts.engine.get(changed[0]) for facts in (first, second)]
    if not all(type(value) in (int, float) and value > 0 for value in values):  # a bool is no number
        return f"one of the runs does not record its {changed[0]}"
    return ""


def _list_names(names: list[str]) -> str:
    """The first few, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more settings" if more > 0 else "")


def _lacking(first: Client, second: Client, has: Callable[[Client], object]) -> str:
    """The run of the two that has not what a comparison takes, or both, or ""."""
    return " and ".join(facts.name for facts in (first, second) if not has(facts))


def _load_of(facts: Client) -> Any:
    scenario = facts.meta.get("scenario")
    if not isinstance(scenario, dict):
        return scenario
    return {name: block for name, block in scenario.items() if name not in NAMED_ONLY}


def _other_workload(good: Client, bad: Client, differences: list[tuple[str, float, float, float]]) -> Proposal:
    objective = _worst_objective(bad)
    there = accounts_of(good.rows, objective).mean().fillna(0)
    here = accounts_of(bad.rows, objective).mean().fillna(0)
    grown = (here - there).sort_values(ascending=False)
    total = float(grown.clip(lower=0).sum())
    top = grown.index[0]
    info = ACCOUNT_BY_NAME[top]
    kind: Kind = "workload" if differences else "client" if info.lifecycle == "client" else "fault"
    prefix = "ttft" if objective == "ttft_ms" else "ledger"
    return Proposal(
        lifecycles=(info.lifecycle,),
        object="workload of the benchmark" if differences else info.name,
        cause=f"the benchmark does not resemble the product: {differences[0][0]}" if differences
        else f"the workloads are alike, and {top} grew",
        kind=kind,
        evidence=[
            *(evidence(f"{name} takes {here[name]:,.1f} ms of the {OBJECTIVE_NAMES[objective]} in {bad.name}, "
                       f"{there[name]:,.1f} ms in {good.name}: {ms / total:.0%} of the difference", ms / total,
                       "share", f"requests: {prefix}_*_ns")
              for name, ms in grown.head(3).items() if total and ms >= 0.1 * total),
            *(evidence(f"{what}: {b:,.2f} in {bad.name}, {a:,.2f} in {good.name}", ratio, "ratio",
                       "client: due_ns, prompt_tokens, output_tokens") for what, b, a, ratio in differences),
            *_step_times(good, bad),
        ],
        measurement="the benchmark once more with this one difference taken over" if differences
        else f"{good.name} once more",
        command="" if differences else rerun(good),
        rival="a server that became slower between the runs",
        if_cause=f"attainment falls from {attainment(good):.0%} towards {attainment(bad):.0%}",
        if_rival=f"attainment stays near {attainment(good):.0%}, and {good.name} repeated today falls as well",
        change="measure with the product's arrivals and lengths, and size the server for them",
        gain=Gain(f"attainment {attainment(bad):.0%} → {attainment(good):.0%} if the difference could be removed",
                  basis=f"the two runs, {good.sent} and {bad.sent} requests"),
    )  # fmt: skip


def _rigid_account(small: Client, large: Client, name: str, reason: str) -> Proposal:
    before = ledger_columns(small.rows).mean().fillna(0)
    after = ledger_columns(large.rows).mean().fillna(0)
    rigid = after[(after > 0) & (after >= DID_NOT_SHRINK * before)].sort_values(ascending=False)
    top = rigid.index[0] if len(rigid) else after.idxmax()
    share, info = float(after[top] / after.sum()), ACCOUNT_BY_NAME[top]
    shrunk = [account for account in before.index if before[account] - after[account] >= 0.1 * before.sum()]
    bound, now = 1 / share, small.engine[name]
    return Proposal(
        lifecycles=(info.lifecycle,),
        object=top,
        cause=f"{reason}, because {top} does not depend on the {name}",
        kind="fault" if top == "compute.host" else "policy",
        evidence=[
            evidence(f"{top} takes {after[top]:,.1f} of {after.sum():,.1f} ms in {large.name} and {before[top]:,.1f} "
                     f"ms in {small.name}: it did not shrink", share, "share", LEDGERS),
            evidence(f"with {share:.0%} of the time untouched, no number of devices makes requests more than "
                     f"{bound:.1f} times as fast as now (Amdahl)", bound, "ratio", LEDGERS),
            *(evidence(f"{account} did shrink, from {before[account]:,.1f} to {after[account]:,.1f} ms",
                       before[account] / max(after[account], 1e-9), "ratio", LEDGERS, supports=False)
              for account in shrunk),
        ],
        measurement=f"the same scenario with {name} halved",
        command=rerun(small, **{name: max(1, now // 2) if isinstance(now, int) else now / 2}),
        rival="too little load to need the hardware",
        if_cause=f"{top} stays near {after[top]:,.1f} ms a request",
        if_rival="every account stays where it is, request.queue included",
        change=f"shorten {top} before buying {name}",
        gain=Gain(f"at most {1 / max(1 - share, 1e-3):.1f} times as fast once {top} is gone",
                  basis=f"mean ledger of {large.joined} requests; an upper bound"),
    )  # fmt: skip


def _find_changes(first: Client, second: Client) -> list[str]:
    names = sorted(set(first.engine) | set(second.engine))
    names = [name for name in names if name not in PLACE and not name.startswith("objective_")]
    return [name for name in names if first.engine.get(name) != second.engine.get(name)]


def _worst_objective(facts: Client) -> str:
    answers = {name: facts.rows[f"{short(name)}_met"].dropna() for name in OBJECTIVES}
    attained = {name: float(met.mean()) for name, met in answers.items() if len(met)}
    return min(attained, key=lambda name: attained[name], default="e2e_ms")


def _workload_differences(good: Client, bad: Client) -> list[tuple[str, float, float, float]]:
    """Figures of the product's workload that are half as large again: (name, bad run, good run, ratio)."""
    # Constant arrivals have a coefficient of 0, and anything is many times of it: bursts are more than Poisson's 1.
    figures = [
        ("its arrivals come in bursts (coefficient of variation)", lambda run: _variation(run, True), 1.0),
        ("its rate of arrivals changes (coefficient of variation)", lambda run: _variation(run, False), 1.0),
        ("its prompts are longer (mean tokens)", lambda run: run.rows.prompt_tokens.astype("float64").mean(), 0.0),
        ("its outputs are longer (mean tokens)", lambda run: run.rows.output_tokens.astype("float64").mean(), 0.0),
        ("it offers more load (requests/s)", lambda run: run.offered_rps, 0.0),
    ]
    found = []
    for name, figure, least in figures:
        b, a = float(figure(bad)), float(figure(good))
        if (base := max(a, least)) > 0 and b >= DIFFERENT * base:  # NaN is not known
            found.append((name, b, a, b / base))
    return sorted(found, key=lambda row: -row[3])


def _step_times(good: Client, bad: Client) -> list[Evidence]:
    """Whether the server itself was as fast in both runs."""
    before, after = steps_of(good), steps_of(bad)
    if not (before and after and before.model and after.model):
        return []
    tokens, context = 16, 16 * (good.work.context_tokens if good.work else 0)
    ratio = after.model.predict(tokens, context) / before.model.predict(tokens, context)
    return [
        evidence(f"a step of 16 tokens takes {ratio:.2f} times as long in {bad.name} as in {good.name}", ratio, "ratio",
                 "steps: fit of wall time", supports=ratio < DIFFERENT)
    ]  # fmt: skip


def _variation(facts: Client, bursty: bool) -> float:
    return facts.arrivals.cv if facts.arrivals is not None and facts.arrivals.bursty is bursty else 0.0
