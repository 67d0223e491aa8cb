"""Something that is neither tokeniser nor detokeniser holds the front's event loop again and again."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Client, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.client_signs import signs_of
from sojourn.diagnosis.excess import SERVED
from sojourn.diagnosis.proposal import WORTH_A_LOOK
from sojourn.diagnosis.statements import front
from sojourn.diagnosis.statements.accounts import DEFINING, LOOP_LAG, STALLED_LOOP_S, mean_of, propose
from sojourn.diagnosis.statements.client_only import CHUNKS, IN_ONE_READ, STALLS, hint, stall_evidence
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.refutations import GRAMMARS_WAIT
from sojourn.diagnosis.statements.stops import propose_stop
from sojourn.diagnosis.symptom_tree.reading import FRONT_TIME, NEGLIGIBLE, Reading, account

STUTTERS, A_PAUSE_MS = 0.2, 200.0  # such turns, with one that anybody notices: it counts though objectives are kept


def read_records(facts: Records, excess: Excess | None) -> Proposal | None:
    loop = front.front_loop(facts)
    known = sum(front.held_by(facts, name) for name in front.UNITS)
    if loop is None:
        return read_means(facts, excess) if excess is not None else None
    if known >= front.HOLDS or (excess is not None and excess.objective == SERVED):
        return None
    if excess is not None and excess.share(*front.FRONT) < WORTH_A_LOOK:
        return None
    # Without its waits for a core: another process had it, and nothing held the loop
    long_share = loop.long_share * (1 - (loop.queued_by_others or 0.0))
    if long_share < (front.BLOCKED if excess is not None else STUTTERS):
        return None
    if excess is None and loop.longest_ms < A_PAUSE_MS:
        return None
    held = min(1.0, long_share / max(loop.busy, 1e-9))
    how = f"working ({loop.on_cpu:.0%} of its busy time on a core)" if (loop.on_cpu or 0.0) >= 0.5 else "asleep"
    return Proposal(
        cause=f"something holds the front's event loop for up to {loop.longest_ms:,.0f} ms, and every stream waits",
        evidence=[
            evidence(f"{loop.long_turns} turns of the loop of 10 ms and more take {loop.long_share:.0%} of the time, "
                     f"the longest {loop.longest_ms:,.0f} ms, {how}", loop.long_share, "share", front.TURNS, weight=3),
            evidence(f"tokeniser and detokeniser have {loop.encoding + loop.decoding:.0%} of the loop's busy time: it "
                     "is neither", loop.encoding + loop.decoding, "share", front.OWN_WORK, weight=1),
            *front.loop_queue_evidence(loop),
            *excess_evidence(excess, front.FRONT),
        ],
        measurement="`py-spy dump --pid` of the front process while it blocks: the stack names the code",
        if_cause="one stack returns again and again",
        if_rival="the stack is that of a loop that waits for events",
        change="take the synchronous work off the event loop: a thread, a process, or an asynchronous call",
        claims=dict.fromkeys(front.FRONT, held),
        fixes=(Change(removed=dict.fromkeys(front.FRONT, held)),),
    )  # fmt: skip


def read_means(facts: Means | Records, excess: Excess) -> Proposal | None:
    """Nobody hears anything again and again, and the page is not answered either."""
    return propose_stop(
        facts, excess, "front",
        "find what holds the loop of the front: a synchronous call, a collection of garbage, a limit on its CPU time",
        "`py-spy dump --pid` of the API server's process while it stands",
    )  # fmt: skip


def read_accounts(facts: Accounts, excess: Excess) -> Proposal | None:
    """The timer of the front's event loop comes late."""
    lag_s = mean_of(facts, LOOP_LAG)
    if lag_s is None or lag_s < STALLED_LOOP_S:
        return None
    late = evidence(f"the timer of the front's event loop comes {1000 * lag_s:,.0f} ms late on average", 1000 * lag_s,
                    "ms", f"scrapes: {LOOP_LAG}", weight=DEFINING)  # fmt: skip
    accounts = ("request.stream", "token.decode", "token.encode", "client.network")
    found = [late, *excess_evidence(excess, accounts)]
    return propose(excess, "something holds the event loop of the front", found, "find what holds the loop")


def read_client(facts: Client, excess: Excess) -> Proposal | None:
    """Text stops, and then comes in one read: it was made meanwhile, and something between held it."""
    signs = signs_of(facts)
    if excess.objective == "ttft_ms" or signs.stalled < STALLS or signs.clumped < IN_ONE_READ:
        return None
    meanwhile = f"after a stall {signs.clumped:.0%} of the tokens come in one read: they were made meanwhile"
    found = [stall_evidence(signs), evidence(meanwhile, signs.clumped, "share", CHUNKS, weight=2)]
    return hint(excess, "text stops and then comes at once: something behind the engine holds it", found, 0.5,
                "find what holds the event loop of the front")  # fmt: skip


def show_front_blocked(facts: Client) -> Reading | None:
    """Of the event loop; without its records, what text waits to be written."""
    if facts.machine is None or facts.machine.front is None:
        return account("request.stream")(facts)
    loop = facts.machine.front
    return Reading(
        f"{loop.long_turns} turns of the front's event loop took 10 ms or more, {loop.longest_ms:,.0f} ms at most: "
        f"{loop.long_share:.0%} of the time",
        loop.long_share < NEGLIGIBLE,
        "system: front turns",
        min(1.0, loop.long_share),
    )


CAUSE = Cause(
    key="blocked_front",
    lifecycles=("request", "token"),
    object="event loop of the front",
    kind="fault",
    rival="a slow network: it holds single requests, and the loop is idle",
    rival_key="slow_network",
    in_front=True,
    asks="Does something block the front process?",
    measurement="the loop lag of the front (sojourn_request_loop_lag_seconds) during the run",
    figures=(show_front_blocked,),
    booked=FRONT_TIME,
    complaints={"high_ttft": 14, "high_itl": 5, "low_device_utilisation": 7, "devices_do_not_help": 3},
    reads={
        Records: Rule(read_records, needs=(), symptom="low_device_utilisation"),
        Means: Rule(
            read_means, rival="a grammar that it compiles", rival_key="slow_grammar", refuted_by=(GRAMMARS_WAIT,)
        ),
        Accounts: Rule(
            read_accounts,
            accounts=("request.stream", "token.decode", "token.encode", "client.network"),
            rival="a slow network",
        ),
        Client: Rule(read_client, rival="a slow network"),
    },
)
