"""Handing a chunk to its socket takes long, for most of the requests."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements import front
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.symptom_tree.reading import account

WRITES = 0.5  # of a request's stream account, in writes


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    own, hit = front.own_share(facts, "writing_ns", front.STREAM, excess), _hit_share(facts, "writing_ns")
    held, drained = front.held_by(facts, "writing"), front.drained_share(facts, excess)
    # A slow reader's buffer is full, others' are not
    is_few = hit < front.FEW and (drained is None or drained > front.DRAINED)
    if own is None or (held < front.HOLDS and (own < WRITES or is_few)):
        return None
    each_ms = front.unit_ms(facts, "writing_ns", "server_output_tokens") or 0.0
    loop, all_wait = front.front_loop(facts), held >= front.HOLDS
    claims = dict.fromkeys(front.FRONT, held) if all_wait else {front.STREAM: min(1.0, own)}
    return Proposal(
        cause=f"writes to the sockets take {each_ms:.1f} ms a token, and "
        + ("every stream waits for them on the event loop" if all_wait else "the next tokens wait behind them"),
        evidence=[
            evidence(f"{loop.writing:.0%} of the busy time of the front's event loop is writes", loop.writing, "share",
                     front.OWN_WORK, weight=3) if all_wait and loop is not None else
            evidence(f"{min(own, 1.0):.0%} of {front.STREAM} is spent in writes", own, "share",
                     "requests: writing_ns, ledger_request_stream_ns", weight=3),
            evidence(f"{hit:.0%} of the requests have slow writes"
                     + (": it is the server's" if hit >= front.FEW else ""), hit, "share",
                     "requests: writing_ns", supports=hit >= front.FEW),
            *([evidence(f"the last byte is read {drained:.0%} of the time in writes after it was written: buffers "
                        + ("are empty, and readers are fast" if drained <= front.DRAINED else "are full"), drained,
                        "share", "requests: writing_ns, written_ns; client: last_byte_ns",
                        supports=drained <= front.DRAINED, weight=2)] if drained is not None and not all_wait else []),
            *([evidence(f"the event loop is busy in {loop.busy:.0%} of the time", loop.busy, "share", front.TURNS,
                        weight=0.5, supports=all_wait or loop.busy < front.FULL_LOOP)] if loop is not None else []),
            *excess_evidence(excess, front.FRONT if all_wait else (front.STREAM,)),
        ],
        measurement="the same scenario without middleware between the server and its sockets",
        if_cause=f"writes fall from {each_ms:.1f} ms to some microseconds",
        if_rival=f"{missing_share(excess)} stays",
        change="find what stands between the server and its sockets: middleware, a proxy in the process, a full buffer",
        claims=claims,
        fixes=(Change(removed=claims),),
    )  # fmt: skip


def _hit_share(facts: Client, column: str) -> float:
    """Of the served requests, those whose cost of a token is at least a fifth of the dearest tenth's."""
    served = facts.rows[facts.rows.status == "ok"]
    each = (served[column].astype("float64") / served.server_output_tokens.astype("float64").clip(lower=1)).dropna()
    return float((each >= 0.2 * each.quantile(0.9)).mean()) if len(each) else 0.0


CAUSE = Cause(
    key="slow_writer",
    lifecycles=("request",),
    object="writes to sockets",
    kind="fault",
    rival="a blocked event loop: then all wait at the same moments",
    rival_key="blocked_front",
    in_front=True,
    name="writes to the socket",
    asks="Does text wait to be written?",
    measurement="one request alone, with request.stream of it",
    figures=(account("request.stream"),),
    booked=("request.stream",),
    complaints={"high_ttft": 16, "high_itl": 7, "devices_do_not_help": 5},
    reads={
        Records: Rule(read_records, accounts=front.FRONT),
        Accounts: hold_time(
            accounts=("request.stream",),
            words="text is ready and waits to be written",
            change="find what holds the writes: a slow reader, or the front's loop",
            of_the_loop=True,
            object="writes to the sockets",
            rival="one slow reader",
            rival_key="",
        ),
    },
)
