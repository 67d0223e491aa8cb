"""The core process died: its requests are lost, and others wait or are refused until another one is up."""

import numpy as np

from sojourn.diagnosis.cause import Accounts, Cause, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.excess import SERVED
from sojourn.diagnosis.statements.accounts import DEFINING, hold_time
from sojourn.diagnosis.statements.client_only import hint
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.transit import ended_s, is_broken, is_timeout
from sojourn.diagnosis.symptom_tree.reading import account, show_crashes

LOST = "request.lost"
CORE_DIED = ("the engine core", "core died", "engine_restarting", "engine is restarting")


def read_records(facts: Records, excess: Excess | None) -> Proposal | None:
    if excess is None:
        return None
    is_loss = excess.objective == SERVED
    ended = excess.error.lower()
    lost_share = 0.0 if is_loss else excess.share(LOST)
    gone_s = ended_s(facts, excess) if is_loss else None
    if is_loss and gone_s is None and not any(words in ended for words in CORE_DIED):
        return None
    if not is_loss and lost_share < 0.1:
        return None
    gap_s = _longest_gap_s(facts)
    return Proposal(
        cause="the core process died, and the requests in it were lost"
        + (f"; the server made no step for {gap_s:.1f} s" if gap_s is not None else ""),
        evidence=[
            *([evidence(f"{excess.missed} requests ended with “{excess.error}”", excess.missed, "requests",
                        "client: error", weight=3),
               *([] if gone_s is None else [
                   evidence(f"from {gone_s:.0f} s on each connection is refused: no process listens", gone_s, "s",
                            "client: due_ns, status", weight=DEFINING)])] if is_loss else
              [evidence(f"{lost_share:.0%} of the time above the objective is {LOST}", lost_share, "share",
                        "requests: ledger_request_lost_ns", weight=3), *excess_evidence(excess, (LOST,))]),
        ],
        measurement="the server's log: it says when the core died, and with which exit code",
        if_cause="the log names a signal or an exit code at the time of the lost requests",
        if_rival="the core lived all the time",
        change="find why the core died: memory, a driver, a bug; `spare_core` shortens the outage",
        claims={LOST: 1.0},
        explained=1.0 if is_loss else None,
        in_replay=False,
    )  # fmt: skip


def read_loss(facts: Client, loss: Excess) -> Proposal | None:
    """Requests end with another error than a refusal."""
    if (gone_s := ended_s(facts, loss)) is not None:
        return _gone(loss, gone_s)
    if loss.error.startswith("HTTP 4") or is_timeout(loss.error) or is_broken(loss.error):
        return None
    found = [evidence(f"{loss.missed} requests ended with “{loss.error}”", loss.missed, "requests", "client: error",
                      weight=2)]  # fmt: skip
    return hint(
        loss,
        f"the server failed {loss.missed} of {loss.sent} requests",
        found,
        1.0,
        "a server that no longer fails (its log says why)",
    )


def _gone(loss: Excess, gone_s: float) -> Proposal:
    found = [evidence(f"{loss.missed} requests ended with “{loss.error}”, and none was served after {gone_s:.0f} s",
                      loss.missed, "requests", "client: error", weight=2)]  # fmt: skip
    return hint(
        loss, "the server ended: no process listens at its port", found, 1.0, "a server that runs (see its log)"
    )


def _longest_gap_s(facts: Client) -> float | None:
    finished = facts.rows.token_ns.dropna() if "token_ns" in facts.rows else []
    stamps = np.sort(np.concatenate([np.zeros(0), *(np.asarray(each, dtype="float64") for each in finished)]))
    return float(np.diff(stamps).max() / 1e9) if len(stamps) > 2 else None


CAUSE = Cause(
    key="core_death",
    lifecycles=("request", "compute"),
    object="core process",
    kind="fault",
    rival="a limit that refuses requests",
    rival_key="queue_limit",
    asks="Did the server stop in between?",
    measurement="the log of the server around the first failed request",
    figures=(show_crashes, account("request.lost")),
    complaints={"high_ttft": 18, "high_itl": 9, "devices_do_not_help": 7},
    reads={
        Records: Rule(read_records, needs=()),
        Accounts: hold_time(
            accounts=("request.lost",),
            words="requests were in a core that died",
            change="find why the core died",
            lifecycles=("request",),
            rival="a server that was stopped",
            rival_key="",
        ),
    },
    lost=Rule(read_loss, needs=("loss",), lifecycles=("request",), rival="a network that fails", rival_key=""),
)
