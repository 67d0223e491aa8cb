"""Causes in the front process: what holds its event loop, its texts, its sockets, and its checks.

One loop serves all streams. So a front that is late is one of three: one kind of its work costs more than it should,
something that is none of its work holds the loop, or there is more to do than a process can. The front's own work is
timed, so that what it costs beyond its normal cost tells which.
"""

import math

from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.machine_facts import FrontLoop
from sojourn.diagnosis.rules.cause import Proposal, cause
from sojourn.diagnosis.rules.shared_evidence import excess_evidence, missing_share
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.prediction import Change

STREAM, ADMISSION, ENCODE, DECODE = "request.stream", "request.admission", "token.encode", "token.decode"
FRONT = (STREAM, ADMISSION, ENCODE, DECODE)
MODERATION = "request.moderation"
HOLDS = 0.4  # of the loop's busy time, beyond what is normal: no other work of the front has as much
SLOWER = 3.0  # times its normal cost: the reference knows a bare call on a quiet machine
# Normal costs in nanoseconds of a character, or an output token, where no reference knows them: a tokeniser reads a
# megabyte of text a second, a detokeniser looks up some ids, a write is some calls of Python and one of the kernel.
USUAL_NS = {"encoding": 1_000.0, "decoding": 30_000.0, "writing": 100_000.0}
UNITS = {"encoding": "prompt_characters", "decoding": "server_output_tokens", "writing": "server_output_tokens"}
DRAINED = 0.1  # of the time in writes: a reader that is slow keeps its buffer full for longer
STUTTERS, A_PAUSE_MS = 0.2, 200.0  # such turns, with one that anybody notices: it counts though objectives are kept
BLOCKED = 0.1  # of the time, in turns that a reader may notice: a tenth of the requests arrive in one
FULL_LOOP = 0.8  # busy: beyond it queues grow as those of any server near its capacity
WRITES = 0.5  # of a request's stream account, in writes
FEW = 0.5  # of the requests: what hits fewer of them belongs to them, not to the server
TURNS = "system: loop_busy_ns, loop_turn_ns, front_loop_cpu_ns"
OWN_WORK = "requests: encoding_ns, decoding_ns, writing_ns; system: loop_busy_ns"


def front_loop(facts: Facts) -> FrontLoop | None:
    return None if facts.machine is None else facts.machine.front


def held_by(facts: Facts, name: str) -> float:
    """Of the loop's busy time, 0 to 1, what one kind of its own work took beyond its normal cost.

    Of work in threads of its own, and of writes that sleep, there may be more than the loop was busy: writes then did
    not hold it, while encoding holds the interpreter.
    """
    loop = front_loop(facts)
    if loop is None or (name == "writing" and loop.writing > 1.0):
        return 0.0
    slowdown = _slowdown(facts, name)
    return min(1.0, getattr(loop, name) * (1 - 1 / slowdown)) if slowdown >= SLOWER else 0.0


def _slowdown(facts: Facts, name: str) -> float:
    """What such work took, in its normal costs; beyond measure where nobody knows these."""
    speed = facts.speed()
    if speed is not None and (pace := getattr(speed, name)) is not None:
        return pace.slowdown
    each_ms = _each_ms(facts, f"{name}_ns", UNITS[name]) if UNITS[name] in facts.rows else None
    return each_ms * 1e6 / USUAL_NS[name] if each_ms else math.inf


@cause(lifecycles=("token", "request"), object="detokeniser", kind="fault", accounts=FRONT, in_front=True,
       rival="a slow reader: its chunks alone would wait", rival_key="slow_reader")  # fmt: skip
def slow_detokeniser(facts: Facts, excess: Excess) -> Proposal | None:
    """Ids take long to become text, and hold the event loop of all streams meanwhile."""
    loop = front_loop(facts)
    each_ms = _each_ms(facts, "decoding_ns", "server_output_tokens")
    if loop is None:
        if excess.share(DECODE) < HOLDS:
            return None
        held = 0.0
    else:
        held = held_by(facts, "decoding")
        if held < HOLDS:
            return None
    told = "" if each_ms is None else f"a token takes {each_ms:.2f} ms to become text, "
    return Proposal(
        cause=f"the detokeniser is slow: {told}and all streams wait for it",
        evidence=[
            *([evidence(f"{loop.decoding:.0%} of the busy time of the front's event loop is ids → text",
                        loop.decoding, "share", OWN_WORK, weight=3)] if loop is not None else []),
            *_loop_evidence(loop),
            *_slower(facts, "decoding"),
            *excess_evidence(excess, FRONT),
        ],
        measurement="the same scenario with one output token a request",
        settings=None,
        if_cause=f"{DECODE} and {STREAM} fall to nothing with the tokens",
        if_rival=f"{STREAM} stays on few requests",
        change="a faster detokeniser, larger chunks, or another front process",
        claims={DECODE: 1.0, STREAM: held, ADMISSION: held, ENCODE: held},
        fixes=(Change(removed={DECODE: 1.0, STREAM: held, ADMISSION: held, ENCODE: held}),),
    )  # fmt: skip


@cause(lifecycles=("token", "request"), object="tokeniser", kind="fault", accounts=FRONT, in_front=True,
       rival="one huge prompt: it alone would take long")  # fmt: skip
def slow_tokeniser(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompts take long to become ids, on the event loop or before it."""
    loop, own = front_loop(facts), _own_share(facts, "encoding_ns", ENCODE)
    held = held_by(facts, "encoding")
    waits = excess.share(ENCODE)
    if held < HOLDS and (waits < 0.1 or (own is not None and own < FEW)):
        return None
    each_ms = _each_ms(facts, "encoding_ns", "")
    per_token = _each_ms(facts, "encoding_ns", "server_prompt_tokens")
    told = "" if each_ms is None else f"a prompt takes {each_ms:.1f} ms ({per_token * 1e3:,.0f} µs a token), "
    return Proposal(
        cause=f"the tokeniser is slow: {told}and its request waits for it"
        + (", with everybody on the event loop" if held >= HOLDS else ""),
        evidence=[
            *([evidence(f"{own:.0%} of {ENCODE} is work of template and tokeniser", own, "share",
                        "requests: encoding_ns, ledger_token_encode_ns", supports=own >= FEW, weight=2)]
              if own is not None else []),
            *([evidence(f"{loop.encoding:.0%} of the busy time of the front's event loop is text → ids",
                        loop.encoding, "share", OWN_WORK, weight=2)]
              if loop is not None and held >= HOLDS else []),
            *_slower(facts, "encoding"),
            *excess_evidence(excess, (ENCODE, STREAM, ADMISSION)),
        ],
        measurement="`POST /tokenize` with one of the prompts on the idle server",
        settings=None,
        if_cause=f"one prompt takes {each_ms or 0:.0f} ms with nobody else there",
        if_rival="only the longest prompt takes long",
        change="a faster tokeniser, shorter templates, prompts as token ids, or another front process",
        claims={ENCODE: 1.0, STREAM: held, ADMISSION: held, DECODE: held},
        fixes=(Change(removed={ENCODE: 1.0, STREAM: held, ADMISSION: held, DECODE: held}),),
    )  # fmt: skip


@cause(lifecycles=("request", "token"), object="event loop of the front", kind="fault", accounts=FRONT, in_front=True,
       needs=(), symptom="low_device_utilisation",
       rival="a slow network: it holds single requests, and the loop is idle", rival_key="slow_network")  # fmt: skip
def blocked_front(facts: Facts, excess: Excess | None) -> Proposal | None:
    """Something that is neither tokeniser nor detokeniser holds the front's event loop again and again."""
    loop = front_loop(facts)
    known = sum(held_by(facts, name) for name in UNITS)
    if loop is None or known >= HOLDS or (excess is not None and excess.objective == SERVED):
        return None
    # Without its waits for a core: another process had it, and nothing held the loop
    long_share = loop.long_share * (1 - (loop.queued_by_others or 0.0))
    if long_share < (BLOCKED if excess is not None else STUTTERS) or (excess is None and loop.longest_ms < A_PAUSE_MS):
        return None
    held = min(1.0, long_share / max(loop.busy, 1e-9))
    how = f"working ({loop.on_cpu:.0%} of its busy time on a core)" if (loop.on_cpu or 0.0) >= 0.5 else "asleep"
    return Proposal(
        cause=f"something holds the front's event loop for up to {loop.longest_ms:,.0f} ms, and every stream waits",
        evidence=[
            evidence(f"{loop.long_turns} turns of the loop of 10 ms and more take {loop.long_share:.0%} of the time, "
                     f"the longest {loop.longest_ms:,.0f} ms, {how}", loop.long_share, "share", TURNS, weight=3),
            evidence(f"tokeniser and detokeniser have {loop.encoding + loop.decoding:.0%} of the loop's busy time: it "
                     "is neither", loop.encoding + loop.decoding, "share", OWN_WORK, weight=1),
            *_queue_evidence(loop),
            *excess_evidence(excess, FRONT),
        ],
        measurement="`py-spy dump --pid` of the front process while it blocks: the stack names the code",
        settings=None,
        if_cause="one stack returns again and again",
        if_rival="the stack is that of a loop that waits for events",
        change="take the synchronous work off the event loop: a thread, a process, or an asynchronous call",
        claims=dict.fromkeys(FRONT, held),
        fixes=(Change(removed=dict.fromkeys(FRONT, held)),),
    )  # fmt: skip


@cause(lifecycles=("request",), object="front process", kind="fault", accounts=FRONT, in_front=True,
       rival="one slow thing, not a busy process", rival_key="blocked_front")  # fmt: skip
def slow_front(facts: Facts, excess: Excess) -> Proposal | None:
    """The front has more to do than one process can: its loop is always busy, with no single work to blame."""
    loop = front_loop(facts)
    if loop is not None and (loop.busy < FULL_LOOP or max(held_by(facts, name) for name in UNITS) >= HOLDS):
        return None
    accounts = FRONT if loop is not None else (STREAM,)  # the texts have causes of their own
    if loop is None and excess.share(*accounts) < 0.3:
        return None
    return Proposal(
        kind="capacity" if loop is not None else "fault",  # without the loop's turns nobody knows what holds it
        cause="the front process does not keep up: its event loop is always busy"
        if loop is not None else "the front process does not keep up: text waits to be decoded or written",
        evidence=[
            *_loop_evidence(loop),
            *([evidence(f"{loop.long_share:.0%} of the time is in long turns", loop.long_share, "share", TURNS,
                        supports=loop.long_share < BLOCKED)] if loop is not None else []),
            *excess_evidence(excess, accounts),
        ],
        measurement="the same load over two servers",
        settings=None,
        if_cause=f"{STREAM} falls with half the streams",
        if_rival=f"{STREAM} stays",
        change="another front process, or fewer and larger chunks",
        claims=dict.fromkeys(accounts, 1.0),
        fixes=(Change(removed=dict.fromkeys(accounts, 1.0)),),
    )  # fmt: skip


@cause(lifecycles=("request",), object="writes to sockets", kind="fault", accounts=FRONT, in_front=True,
       rival="a blocked event loop: then all wait at the same moments", rival_key="blocked_front")  # fmt: skip
def slow_writer(facts: Facts, excess: Excess) -> Proposal | None:
    """Handing a chunk to its socket takes long, for most of the requests."""
    own, hit = _own_share(facts, "writing_ns", STREAM, excess), _hit_share(facts, "writing_ns")
    held, drained = held_by(facts, "writing"), drained_share(facts, excess)
    is_few = hit < FEW and (drained is None or drained > DRAINED)  # a slow reader's buffer is full, others' are not
    if own is None or (held < HOLDS and (own < WRITES or is_few)):
        return None
    each_ms = _each_ms(facts, "writing_ns", "server_output_tokens") or 0.0
    loop, all_wait = front_loop(facts), held >= HOLDS
    claims = dict.fromkeys(FRONT, held) if all_wait else {STREAM: min(1.0, own)}
    return Proposal(
        cause=f"writes to the sockets take {each_ms:.1f} ms a token, and "
        + ("every stream waits for them on the event loop" if all_wait else "the next tokens wait behind them"),
        evidence=[
            evidence(f"{loop.writing:.0%} of the busy time of the front's event loop is writes", loop.writing, "share",
                     OWN_WORK, weight=3) if all_wait and loop is not None else
            evidence(f"{min(own, 1.0):.0%} of {STREAM} is spent in writes", own, "share",
                     "requests: writing_ns, ledger_request_stream_ns", weight=3),
            evidence(f"{hit:.0%} of the requests have slow writes" + (": it is the server's" if hit >= FEW else ""),
                     hit, "share", "requests: writing_ns", supports=hit >= FEW),
            *([evidence(f"the last byte is read {drained:.0%} of the time in writes after it was written: buffers "
                        + ("are empty, and readers are fast" if drained <= DRAINED else "are full"), drained, "share",
                        "requests: writing_ns, written_ns; client: last_byte_ns", supports=drained <= DRAINED,
                        weight=2)] if drained is not None and not all_wait else []),
            *([evidence(f"the event loop is busy in {loop.busy:.0%} of the time", loop.busy, "share", TURNS,
                        weight=0.5, supports=all_wait or loop.busy < FULL_LOOP)] if loop is not None else []),
            *excess_evidence(excess, FRONT if all_wait else (STREAM,)),
        ],
        measurement="the same scenario without middleware between the server and its sockets",
        settings=None,
        if_cause=f"writes fall from {each_ms:.1f} ms to some microseconds",
        if_rival=f"{missing_share(excess)} stays",
        change="find what stands between the server and its sockets: middleware, a proxy in the process, a full buffer",
        claims=claims,
        fixes=(Change(removed=claims),),
    )  # fmt: skip


def drained_share(facts: Facts, excess: Excess) -> float | None:
    """Of late requests: the time from the last write to the last read, of the time in writes; None where nobody knows.

    A write waits only for a reader whose buffers are full, and these hold more than was written meanwhile. So a slow
    reader still reads for long when the last byte is written.
    """
    late = facts.rows.loc[excess.missing]
    if "writing_ns" not in late or not late.writing_ns.astype("float64").sum() > 0:
        return None
    drained = (late.last_byte_ns.astype("float64") - late.written_ns.astype("float64")).clip(lower=0)
    return None if drained.isna().all() else float(drained.sum() / late.writing_ns.astype("float64").sum())


@cause(lifecycles=("request",), object="checks of content", kind="fault", accounts=(MODERATION,),
       rival="a queue before the core")  # fmt: skip
def slow_moderation(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait for the checks of their input or output."""
    share = excess.share(MODERATION)
    waited_ms = share * excess.total_ms
    return Proposal(
        cause=f"checks of content hold late requests for {waited_ms:,.0f} ms",
        evidence=[
            evidence(f"{share:.0%} of the time above the objective is {MODERATION}", share, "share",
                     "requests: ttft_request_moderation_ns", weight=2),
            *excess_evidence(excess, (MODERATION,)),
        ],
        measurement="the same scenario with a tenant that no profile moderates",
        settings=None,
        if_cause=f"{missing_share(excess)} falls, and {MODERATION} is 0",
        if_rival=f"{missing_share(excess)} stays",
        change="a faster classifier, fewer rules, or checks beside the prompt's computation",
        claims={MODERATION: 1.0},
        fixes=(Change(removed={MODERATION: 1.0}),),
    )  # fmt: skip


def _loop_evidence(loop: FrontLoop | None) -> list[Evidence]:
    if loop is None:
        return []
    busy = f"the front's event loop is busy in {loop.busy:.0%} of the time, {loop.busy_worst:.0%} in its worst second"
    return [evidence(busy, loop.busy, "share", TURNS, supports=loop.busy_worst >= 0.5), *_queue_evidence(loop)]


def _queue_evidence(loop: FrontLoop) -> list[Evidence]:
    """A front that waits for a core is slow for another reason."""
    if loop.queued is None or loop.queued < 0.5:
        return []
    return [evidence(f"the loop's thread waits for a core for {loop.queued:.0%} of its busy time", loop.queued,
                     "share", "system: front_loop_queued_ns", supports=False, weight=0.5)]  # fmt: skip


def _slower(facts: Facts, name: str) -> list[Evidence]:
    """What a text costs against its reference. A calibration measures the bare call: only a multiple tells anything."""
    speed = facts.speed()
    pace = None if speed is None else getattr(speed, name)
    if pace is None:
        return []
    slow = pace.slowdown >= SLOWER
    said = f"{name} takes {pace.slowdown:.1f} times as long as in the reference" + ("" if slow else ": its normal time")
    return [evidence(said, pace.slowdown, "ratio", f"requests: {name}_ns; run.json: speed_reference", supports=slow,
                     weight=1 if slow else 3)]  # fmt: skip


def _own_share(facts: Facts, column: str, account: str, excess: Excess | None = None) -> float | None:
    """Of an account over all served requests, or the late ones, the front's own work for them."""
    booked = f"ledger_{account.replace('.', '_')}_ns"
    served = facts.rows[facts.rows.status == "ok"] if excess is None else facts.rows.loc[excess.missing]
    if column not in served or served[column].isna().all():
        return None
    whole = float(served[booked].astype("float64").sum())
    return float(served[column].astype("float64").sum()) / whole if whole > 0 else 0.0


def _each_ms(facts: Facts, column: str, units: str) -> float | None:
    """Mean cost of a request, or of one of its `units`."""
    served = facts.rows[facts.rows.status == "ok"]
    if column not in served or served[column].isna().all() or not len(served):
        return None
    count = float(served[units].astype("float64").sum()) if units else float(len(served))
    return float(served[column].astype("float64").sum()) / 1e6 / max(count, 1.0)


def _hit_share(facts: Facts, column: str) -> float:
    """Of the served requests, those whose cost of a token is at least a fifth of the dearest tenth's."""
    served = facts.rows[facts.rows.status == "ok"]
    each = (served[column].astype("float64") / served.server_output_tokens.astype("float64").clip(lower=1)).dropna()
    return float((each >= 0.2 * each.quantile(0.9)).mean()) if len(each) else 0.0
