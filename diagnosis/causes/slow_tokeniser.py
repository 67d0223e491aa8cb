"""Prompts take long to become ids, on the event loop or before it."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements import front
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.symptom_tree.reading import FRONT_TIME, in_the_front


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    loop, own = front.front_loop(facts), front.own_share(facts, "encoding_ns", front.ENCODE)
    held = front.held_by(facts, "encoding")
    waits = excess.share(front.ENCODE)
    if held < front.HOLDS and (waits < 0.1 or (own is not None and own < front.FEW)):
        return None
    each_ms = front.unit_ms(facts, "encoding_ns", "")
    per_token = front.unit_ms(facts, "encoding_ns", "server_prompt_tokens")
    told = "" if each_ms is None else f"a prompt takes {each_ms:.1f} ms ({per_token * 1e3:,.0f} µs a token), "
    return Proposal(
        cause=f"the tokeniser is slow: {told}and its request waits for it"
        + (", with everybody on the event loop" if held >= front.HOLDS else ""),
        evidence=[
            *([evidence(f"{own:.0%} of {front.ENCODE} is work of template and tokeniser", own, "share",
                        "requests: encoding_ns, ledger_token_encode_ns", supports=own >= front.FEW, weight=2)]
              if own is not None else []),
            *([evidence(f"{loop.encoding:.0%} of the busy time of the front's event loop is text → ids",
                        loop.encoding, "share", front.OWN_WORK, weight=2)]
              if loop is not None and held >= front.HOLDS else []),
            *front.slower_work(facts, "encoding"),
            *excess_evidence(excess, (front.ENCODE, front.STREAM, front.ADMISSION)),
        ],
        measurement="`POST /tokenize` with one of the prompts on the idle server",
        if_cause=f"one prompt takes {each_ms or 0:.0f} ms with nobody else there",
        if_rival="only the longest prompt takes long",
        change="a faster tokeniser, shorter templates, prompts as token ids, or another front process",
        claims={front.ENCODE: 1.0, front.STREAM: held, front.ADMISSION: held, front.DECODE: held},
        fixes=(Change(removed={front.ENCODE: 1.0, front.STREAM: held, front.ADMISSION: held, front.DECODE: held}),),
    )  # fmt: skip


CAUSE = Cause(
    key="slow_tokeniser",
    lifecycles=("token", "request"),
    object="tokeniser",
    kind="fault",
    rival="one huge prompt: it alone would take long",
    in_front=True,
    asks="Does it take long to turn the prompt into ids?",
    measurement="one of these prompts through POST /tokenize",
    figures=(in_the_front("encode", "tokenisation"),),
    booked=FRONT_TIME,
    complaints={"high_ttft": 1, "low_device_utilisation": 1, "product_latency_poor": 2, "devices_do_not_help": 1},
    reads={
        Records: Rule(read_records, accounts=front.FRONT),
        Accounts: hold_time(
            accounts=("token.encode",),
            words="prompts wait to be parsed, templated and encoded",
            change="a faster tokeniser, or shorter templates",
            of_the_loop=True,
            rival="a front process that is busy with something else",
        ),
    },
)
