"""Connections end before the answer does, and the server says nothing of an error."""

from sojourn.diagnosis.cause import Cause, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.causes.cut_streams import is_cut
from sojourn.diagnosis.statements.transit import ended_s, is_broken
from sojourn.diagnosis.symptom_tree.reading import show_crashes


def read_records(facts: Records, loss: Excess) -> Proposal | None:
    if not is_broken(loss.error) or is_cut(facts) or ended_s(facts, loss) is not None:
        return None  # a time limit, or a server that is gone
    lost = facts.rows.loc[loss.missing]
    span = lost.due_ns.min(), lost.due_ns.max()
    meanwhile = facts.rows[(facts.rows.status == "ok") & facts.rows.due_ns.between(*span)]
    begun = float(lost.first_token_ns.notna().mean())
    return Proposal(
        cause=f"connections end before the answer is complete: {loss.missed} of {loss.sent} requests"
        + (f" of {loss.klass}" if loss.klass else ""),
        evidence=[
            evidence(f"{loss.missed} requests ended with “{loss.error}”", loss.missed, "requests", "client: error",
                     weight=2),
            evidence(f"{len(meanwhile)} others were served meanwhile: the server lived", len(meanwhile), "requests",
                     "client: due_ns, status", supports=len(meanwhile) > 0, weight=2),
            evidence(f"{begun:.0%} of them had text before", begun, "share", "client: first_token_ns", weight=0),
        ],
        measurement="a capture of the packets at the server's port: which side sends the reset",
        if_cause="the reset comes from the server, or from what stands before it, in the middle of an answer",
        if_rival="the server's log names the end of its core",
        change="find what closes the connections: middleware, a proxy, a limit of open files, a client that gives up",
        explained=1.0,
        in_replay=False,
    )  # fmt: skip


CAUSE = Cause(
    key="broken_connections",
    lifecycles=("request", "client"),
    object="connections",
    kind="fault",
    rival="a core that died: the server says so to its clients",
    rival_key="core_death",
    asks="Do connections end before the answer?",
    measurement="a capture of the packets at the server's port",
    figures=(show_crashes,),
    complaints={"high_ttft": 19, "high_itl": 10, "devices_do_not_help": 8},
    reads={Records: Rule(read_records, needs=("loss",))},
    lost=Rule(read_records, needs=("loss",), lifecycles=("request",), rival="a core that died", rival_key=""),
)
