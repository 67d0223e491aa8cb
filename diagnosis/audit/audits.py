"""The audits, and what a diagnosis says of each. The list is fixed, so that two runs can be laid side by side.

Three audits are of what was measured. Each of the others stands for causes: it fails where one of them was found,
passes where the run's evidence could have shown them and did not, and is not measurable otherwise. What an audit is
worth is the attainment that the fixes of its findings regain.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.evidence import Client, Means, Records
from sojourn.diagnosis.proposals import can_be_asked, rules_for
from sojourn.diagnosis.verdict import Diagnosis, Finding, label_fix
from sojourn.metrics.request.goodput import ClassGoodput

Status = Literal["fail", "pass", "not measurable"]
LATE_MS = 20.0  # of the client, at the 99th percentile: later, its latencies are those of another load
ATTAINMENT, FAILED = 0.9, 0.0  # without a budget
ALL = "all"
NO_CLIENT = "the server alone recorded the run: no client measured it"
BY = {Client: " in what the client saw", Means: " in the means of the server's metrics"}


@dataclass(frozen=True, slots=True)
class Audit:
    """`causes`: keys of the causes that it stands for; () where it judges what was measured."""

    key: str
    title: str
    causes: tuple[str, ...] = ()


MEASURED = (
    Audit("load", "The client sent what was planned, when it was planned"),
    Audit("failures", "Requests end well"),
    Audit("objectives", "Requests meet their objectives"),
)
OF_CAUSES = (
    Audit("capacity", "The server can serve what arrives", ("overload", "burst", "core_death")),
    Audit("batch", "No limit on the batch keeps requests out",
          ("batch_cap", "token_budget", "prefill_chunk", "queue_limit", "admission_policy", "scheduling_policy")),
    Audit("interference", "Long work does not stand before short work",
          ("head_of_line", "batch_too_large", "token_budget_large", "long_outputs", "own_prefill")),
    Audit("kv_memory", "The KV cache has room", ("kv_pool", "fragmentation", "block_leak", "cache_thrash")),
    Audit("prefix_cache", "Prompts that repeat are computed once",
          ("prefix_cache_off", "prefix_order", "prefix_recomputed", "prefix_sub_block", "cache_pollution",
           "eviction_policy")),
    Audit("tiers", "Slower tiers and transfers of KV cost less than they save",
          ("slow_kv_tier", "slow_kv_transfer", "slow_prefill_server")),
    Audit("device", "The device computes at its speed",
          ("slow_device", "slow_kernel", "slow_format", "slow_decode", "launch_bound", "pcie_bound")),
    Audit("host", "The host does not hold the device up", ("slow_host", "slow_sampler", "few_threads", "engine_stall")),
    Audit("front", "Text and sockets take little time",
          ("slow_tokeniser", "slow_detokeniser", "slow_front", "slow_grammar", "blocked_front", "slow_writer",
           "slow_moderation")),
    Audit("neighbours", "The server has its cores to itself", ("noisy_neighbour",)),
    Audit("speculation", "Drafts pay", ("rejected_drafts", "no_drafts")),
    Audit("limits", "Limits of tenants, adapters and models hold nobody back",
          ("rate_limit", "tenant_share", "adapter_slots", "cold_model")),
    Audit("network", "Network and readers keep up",
          ("slow_network", "slow_reader", "broken_connections", "cut_streams", "buffered_stream",
           "starved_load_generator")),
    Audit("fleet", "Servers of a fleet share the work", ("cache_blind_routing", "replica_imbalance", "straggler",
                                                         "slow_router")),
    Audit("parallel", "Ranks of a group wait little for each other",
          ("communication_overhead", "pipeline_bubbles", "slow_rank", "expert_imbalance", "needless_parallelism")),
)  # fmt: skip
AUDITS = (*MEASURED, *OF_CAUSES)


class Audited(msgspec.Struct, frozen=True, kw_only=True):
    """What one audit found."""

    key: str
    title: str
    status: Status
    says: str
    worth: float = 0.0  # attainment that its fixes regain, 0 to 1
    is_estimate: bool = False  # the worth is not of a replay
    fix: str = ""


def audited(
    diagnosis: Diagnosis, facts: Client, attainment: float = ATTAINMENT, failed: float = FAILED
) -> list[Audited]:
    """The whole list: what fails first, by what it is worth; then what could not be measured; then what passes.

    `attainment` and `failed` are shares of the sent requests, at least and at most.
    """
    found = [_load(diagnosis, facts), _failures(diagnosis, failed), _objectives(diagnosis, attainment)]
    visible, by = _seen(facts), BY.get(type(facts), "")
    found += [_of_causes(audit, diagnosis.findings, visible, by, _absent(audit, facts)) for audit in OF_CAUSES]
    order: Mapping[Status, int] = {"fail": 0, "not measurable": 1, "pass": 2}
    return sorted(found, key=lambda each: (order[each.status], -each.worth))


def _overall(diagnosis: Diagnosis) -> ClassGoodput | None:
    return next((each for each in diagnosis.goodput if each.klass == ALL), None)


def _absent(audit: Audit, facts: Client) -> str:
    """What the run lacks that the audit is of; "" where it has it."""
    if audit.key == "network" and facts.measured_by == "server":
        return NO_CLIENT
    records = facts if isinstance(facts, Records) else None
    if audit.key == "fleet" and (records is None or not records.servers):
        return "the run is of one server"
    if audit.key == "parallel" and (records is None or records.group() is None):
        return "no group of ranks recorded its steps"
    return ""


def _load(diagnosis: Diagnosis, facts: Client) -> Audited:
    delays = diagnosis.results.load.schedule_delay_ms if diagnosis.results else {}
    late, title = delays.get("p99"), MEASURED[0].title
    if diagnosis.results is None or late is None:
        return Audited(
            key="load", title=title, status="not measurable", says="no client of Sojourn sent these requests"
        )
    says = f"99% were sent within {late:,.1f} ms of their moment; up to {LATE_MS:g} ms changes no verdict"
    is_good = late <= LATE_MS and not diagnosis.unsafe
    return Audited(key="load", title=title, status="pass" if is_good else "fail", says=says,
                   fix="" if is_good else "send from a machine, or from several, that keeps the schedule")  # fmt: skip


def _failures(diagnosis: Diagnosis, most: float) -> Audited:
    overall, title = _overall(diagnosis), MEASURED[1].title
    if overall is None or not overall.sent:
        return Audited(key="failures", title=title, status="not measurable", says="no request was sent by a client")
    share = 1 - overall.completed / overall.sent
    says = f"{overall.sent - overall.completed:,} of {overall.sent:,} requests failed ({share:.1%}); at most {most:.1%}"
    return Audited(key="failures", title=title, status="pass" if share <= most else "fail", says=says)


def _objectives(diagnosis: Diagnosis, least: float) -> Audited:
    overall, title = _overall(diagnosis), MEASURED[2].title
    if overall is None or not overall.sent or not any(each.objectives for each in diagnosis.goodput):
        return Audited(key="objectives", title=title, status="not measurable",
                       says="no objective was named: give --slo 'ttft:500 tpot:50'")  # fmt: skip
    says = f"{overall.good:,} of {overall.sent:,} requests ({overall.attainment:.1%}); at least {least:.1%}"
    return Audited(key="objectives", title=title, status="pass" if overall.attainment >= least else "fail", says=says)


def _of_causes(audit: Audit, findings: Sequence[Finding], visible: Collection[str], by: str, absent: str) -> Audited:
    own = [each for each in findings if each.key in audit.causes and each.role == "cause"]
    if own:
        best = max(own, key=lambda each: each.goodput_gain or 0.0)
        return Audited(
            key=audit.key, title=audit.title, status="fail", says="; ".join(each.cause for each in own),
            worth=max(0.0, best.goodput_gain or 0.0), is_estimate=best.gain_is_estimate,
            fix=f"{label_fix(best.fix)}: {best.fix.change}",
        )  # fmt: skip
    seen = [] if absent else [key for key in audit.causes if key in visible]
    if not seen:
        says = absent or f"needs {CAUSES[audit.causes[0]].missing}"
        return Audited(key=audit.key, title=audit.title, status="not measurable", says=says)
    unseen = len(audit.causes) - len(seen)
    says = f"none of {len(seen)} causes was found{by}" if len(seen) > 1 else f"the cause was not found{by}"
    says += f"; {unseen} more cannot be seen" if unseen else ""
    return Audited(key=audit.key, title=audit.title, status="pass", says=says)


def _seen(facts: Client) -> set[str]:
    """The causes that the evidence of this run, or of a server of it, has a rule for."""
    found = {cause.key for cause, rule, part in rules_for(facts) if can_be_asked(rule, part)}
    servers = facts.servers.values() if isinstance(facts, Records) else ()
    return found.union(*(_seen(read()) for read in servers))
