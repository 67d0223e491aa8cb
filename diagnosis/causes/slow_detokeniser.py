"""Ids take long to become text, and hold the event loop of all streams meanwhile."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements import front
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.symptom_tree.reading import FRONT_TIME, in_the_front


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    loop = front.front_loop(facts)
    each_ms = front.unit_ms(facts, "decoding_ns", "server_output_tokens")
    if loop is None:
        if excess.share(front.DECODE) < front.HOLDS:
            return None
        held = 0.0
    else:
        held = front.held_by(facts, "decoding")
        if held < front.HOLDS:
            return None
    told = "" if each_ms is None else f"a token takes {each_ms:.2f} ms to become text, "
    return Proposal(
        cause=f"the detokeniser is slow: {told}and all streams wait for it",
        evidence=[
            *([evidence(f"{loop.decoding:.0%} of the busy time of the front's event loop is ids → text",
                        loop.decoding, "share", front.OWN_WORK, weight=3)] if loop is not None else []),
            *front.loop_evidence(loop),
            *front.slower_work(facts, "decoding"),
            *excess_evidence(excess, front.FRONT),
        ],
        measurement="the same scenario with one output token a request",
        if_cause=f"{front.DECODE} and {front.STREAM} fall to nothing with the tokens",
        if_rival=f"{front.STREAM} stays on few requests",
        change="a faster detokeniser, larger chunks, or another front process",
        claims={front.DECODE: 1.0, front.STREAM: held, front.ADMISSION: held, front.ENCODE: held},
        fixes=(Change(removed={front.DECODE: 1.0, front.STREAM: held, front.ADMISSION: held, front.ENCODE: held}),),
    )  # fmt: skip


CAUSE = Cause(
    key="slow_detokeniser",
    lifecycles=("token", "request"),
    object="detokeniser",
    kind="fault",
    rival="a slow reader: its chunks alone would wait",
    rival_key="slow_reader",
    in_front=True,
    asks="Does it take long to turn ids into text?",
    measurement="the same scenario with short answers",
    figures=(in_the_front("decode", "ids → text"),),
    booked=FRONT_TIME,
    complaints={"high_ttft": 2, "high_itl": 1, "low_device_utilisation": 2, "devices_do_not_help": 2},
    reads={
        Records: Rule(read_records, accounts=front.FRONT),
        Accounts: hold_time(
            accounts=("token.decode",),
            words="ids are ready and wait to become text",
            change="find what slows the decoding of ids to text",
            of_the_loop=True,
            rival="a front process that is busy with something else",
            rival_key="",
        ),
    },
)
