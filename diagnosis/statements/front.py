"""The front's event loop: what holds it, and what its own work costs."""

import math

from sojourn.diagnosis.evidence import Client, Records
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.compute.machine_facts import FrontLoop

STREAM, ADMISSION, ENCODE, DECODE = "request.stream", "request.admission", "token.encode", "token.decode"
FRONT = (STREAM, ADMISSION, ENCODE, DECODE)
HOLDS = 0.4  # of the loop's busy time, beyond what is normal: no other work of the front has as much
SLOWER = 3.0  # times its normal cost: the reference knows a bare call on a quiet machine
# Normal costs in nanoseconds of a character, or an output token, where no reference knows them: a tokeniser reads a
# megabyte of text a second, a detokeniser looks up some ids, a write is some calls of Python and one of the kernel.
USUAL_NS = {"encoding": 1_000.0, "decoding": 30_000.0, "writing": 100_000.0}
UNITS = {"encoding": "prompt_characters", "decoding": "server_output_tokens", "writing": "server_output_tokens"}
DRAINED = 0.1  # of the time in writes: a reader that is slow keeps its buffer full for longer
BLOCKED = 0.1  # of the time, in turns that a reader may notice: a tenth of the requests arrive in one
FULL_LOOP = 0.8  # busy: beyond it queues grow as those of any server near its capacity
FEW = 0.5  # of the requests: what hits fewer of them belongs to them, not to the server
TURNS = "system: loop_busy_ns, loop_turn_ns, front_loop_cpu_ns"
OWN_WORK = "requests: encoding_ns, decoding_ns, writing_ns; system: loop_busy_ns"


def front_loop(facts: Client) -> FrontLoop | None:
    return None if facts.machine is None else facts.machine.front


def held_by(facts: Records, name: str) -> float:
    """Of the loop's busy time, 0 to 1, what one kind of its own work took beyond its normal cost.

    Of work in threads of its own, and of writes that sleep, there may be more than the loop was busy: writes then did
    not hold it, while encoding holds the interpreter.
    """
    loop = front_loop(facts)
    if loop is None or (name == "writing" and loop.writing > 1.0):
        return 0.0
    slowdown = _slowdown(facts, name)
    return min(1.0, getattr(loop, name) * (1 - 1 / slowdown)) if slowdown >= SLOWER else 0.0


def _slowdown(facts: Records, name: str) -> float:
    """What such work took, in its normal costs; beyond measure where nobody knows these."""
    speed = facts.speed()
    if speed is not None and (pace := getattr(speed, name)) is not None:
        return pace.slowdown
    each_ms = unit_ms(facts, f"{name}_ns", UNITS[name]) if UNITS[name] in facts.rows else None
    return each_ms * 1e6 / USUAL_NS[name] if each_ms else math.inf


def drained_share(facts: Client, excess: Excess) -> float | None:
    """Of late requests: the time from the last write to the last read, of the time in writes; None where nobody knows.

    A write waits only for a reader whose buffers are full, and these hold more than was written meanwhile. So a slow
    reader still reads for long when the last byte is written.
    """
    late = facts.rows.loc[excess.missing]
    if "writing_ns" not in late or not late.writing_ns.astype("float64").sum() > 0:
        return None
    drained = (late.last_byte_ns.astype("float64") - late.written_ns.astype("float64")).clip(lower=0)
    return None if drained.isna().all() else float(drained.sum() / late.writing_ns.astype("float64").sum())


def loop_evidence(loop: FrontLoop | None) -> list[Evidence]:
    if loop is None:
        return []
    busy = f"the front's event loop is busy in {loop.busy:.0%} of the time, {loop.busy_worst:.0%} in its worst second"
    return [evidence(busy, loop.busy, "share", TURNS, supports=loop.busy_worst >= 0.5), *loop_queue_evidence(loop)]


def loop_queue_evidence(loop: FrontLoop) -> list[Evidence]:
    """A front that waits for a core is slow for another reason."""
    if loop.queued is None or loop.queued < 0.5:
        return []
    return [evidence(f"the loop's thread waits for a core for {loop.queued:.0%} of its busy time", loop.queued,
                     "share", "system: front_loop_queued_ns", supports=False, weight=0.5)]  # fmt: skip


def slower_work(facts: Records, name: str) -> list[Evidence]:
    """What a text costs against its reference. A calibration measures the bare call: only a multiple tells anything."""
    speed = facts.speed()
    pace = None if speed is None else getattr(speed, name)
    if pace is None:
        return []
    slow = pace.slowdown >= SLOWER
    said = f"{name} takes {pace.slowdown:.1f} times as long as in the reference" + ("" if slow else ": its normal time")
    return [evidence(said, pace.slowdown, "ratio", f"requests: {name}_ns; run.json: speed_reference", supports=slow,
                     weight=1 if slow else 3)]  # fmt: skip


def own_share(facts: Client, column: str, account: str, excess: Excess | None = None) -> float | None:
    """Of an account over all served requests, or the late ones, the front's own work for them."""
    booked = f"ledger_{account.replace('.', '_')}_ns"
    served = facts.rows[facts.rows.status == "ok"] if excess is None else facts.rows.loc[excess.missing]
    if column not in served or served[column].isna().all():
        return None
    whole = float(served[booked].astype("float64").sum())
    return float(served[column].astype("float64").sum()) / whole if whole > 0 else 0.0


def unit_ms(facts: Client, column: str, units: str) -> float | None:
    """Mean cost of a request, or of one of its `units`."""
    served = facts.rows[facts.rows.status == "ok"]
    if column not in served or served[column].isna().all() or not len(served):
        return None
    count = float(served[units].astype("float64").sum()) if units else float(len(served))
    return float(served[column].astype("float64").sum()) / 1e6 / max(count, 1.0)
