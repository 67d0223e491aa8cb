"""The front has more to do than one process can: its loop is always busy, with no single work to blame."""

from sojourn.diagnosis.capacity import COMFORTABLE
from sojourn.diagnosis.cause import Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements import front
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.symptom_tree.reading import FRONT_TIME, Reading, account


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    loop = front.front_loop(facts)
    held = max(front.held_by(facts, name) for name in front.UNITS)
    if loop is not None and (loop.busy < front.FULL_LOOP or held >= front.HOLDS):
        return None
    accounts = front.FRONT if loop is not None else (front.STREAM,)  # the texts have causes of their own
    if loop is None and excess.share(*accounts) < 0.3:
        return None
    return Proposal(
        kind="capacity" if loop is not None else "fault",  # without the loop's turns nobody knows what holds it
        cause="the front process does not keep up: its event loop is always busy"
        if loop is not None else "the front process does not keep up: text waits to be decoded or written",
        evidence=[
            *front.loop_evidence(loop),
            *([evidence(f"{loop.long_share:.0%} of the time is in long turns", loop.long_share, "share", front.TURNS,
                        supports=loop.long_share < front.BLOCKED)] if loop is not None else []),
            *excess_evidence(excess, accounts),
        ],
        measurement="the same load over two servers",
        if_cause=f"{front.STREAM} falls with half the streams",
        if_rival=f"{front.STREAM} stays",
        change="another front process, or fewer and larger chunks",
        claims=dict.fromkeys(accounts, 1.0),
        fixes=(Change(removed=dict.fromkeys(accounts, 1.0)),),
    )  # fmt: skip


def show_front_busy(facts: Client) -> Reading | None:
    """Of the event loop; without its records, what text waits to be written."""
    if facts.machine is None or facts.machine.front is None:
        return account("request.stream")(facts)
    loop = facts.machine.front
    return Reading(
        f"the front's event loop is busy {loop.busy:.0%} of the time, {loop.busy_worst:.0%} in its worst second",
        loop.busy_worst < COMFORTABLE,
        "system: front turns",
        min(1.0, loop.busy),
    )


CAUSE = Cause(
    key="slow_front",
    lifecycles=("request",),
    object="front process",
    kind="fault",
    rival="one slow thing, not a busy process",
    rival_key="blocked_front",
    in_front=True,
    asks="Is the front process too busy?",
    measurement="the same scenario at half the rate, with the CPU use of the front in view",
    figures=(show_front_busy,),
    booked=FRONT_TIME,
    complaints={"high_ttft": 15, "high_itl": 6, "low_device_utilisation": 8, "devices_do_not_help": 4},
    reads={Records: Rule(read_records, accounts=front.FRONT)},
)
