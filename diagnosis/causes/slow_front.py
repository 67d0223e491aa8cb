"""The front has more to do than one process can: its loop is always busy, with no single work to blame."""

from sojourn.diagnosis.capacity import COMFORTABLE
from sojourn.diagnosis.cause import Cause, Change, Client, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH
from sojourn.diagnosis.statements import front, means
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.refutations import IDLE_FRONT, LONG_STEPS
from sojourn.diagnosis.statements.stops import MOSTLY, stopped_share
from sojourn.diagnosis.symptom_tree.reading import FRONT_TIME, Reading, account
from sojourn.interop.sources.source import FRONT_CPU


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


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """First tokens wait in front of the core, and the process of the front has no CPU left."""
    view, waits = facts.server, means.before_core(facts.server)
    cpu = view.further.get(FRONT_CPU)
    if waits is None or excess.objective == "tpot_ms" or waits < EXPLAINS_ENOUGH:
        return None
    if view.courses.pauses is not None and view.courses.pauses.late_share >= MOSTLY:
        return None
    if max(stopped_share(facts, excess, "engine"), stopped_share(facts, excess, "front")) >= MOSTLY:
        return None  # it waits for what stands, and not for a turn
    busy = cpu / view.seconds if cpu is not None and view.seconds else None
    known = f"its process used {busy:.0%} of one core" if busy is not None else "how busy it is, is not shown"
    return Proposal(
        kind="capacity" if busy is not None else "fault",
        cause=f"{waits:.0%} of the time to first token passes in the front, before the core's queue; {known}",
        evidence=[
            evidence(f"{waits:.0%} of the mean time to first token is neither queue nor prefill", waits, "share",
                     means.HISTOGRAMS, weight=3),
            evidence(f"the process of the page used {busy:.0%} of one core, and an event loop can use no more", busy,
                     "share", means.COUNTERS, weight=3)
            if busy is not None else
            evidence("the page has no CPU time of its process: several processes share it", 0.0, "unknown",
                     means.COUNTERS, supports=False),
        ],
        measurement="a second front process (--api-server-count) at the same load",
        settings={},
        if_cause=f"{missing_share(excess)} falls, and the queue of the core grows",
        if_rival=f"{missing_share(excess)} stays: one call holds the loop, or the way to the core is slow",
        change="more front processes, shorter prompts to tokenise, or fewer and larger chunks of text",
        explained=waits,
        gain=means.time_gained(view, f"{waits:.0%} of the time to first token"),
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
    reads={
        Records: Rule(read_records, accounts=front.FRONT),
        Means: Rule(
            read_means,
            rival="one long call that holds the loop",
            rival_key="blocked_front",
            refuted_by=(IDLE_FRONT, LONG_STEPS),
        ),
    },
)
