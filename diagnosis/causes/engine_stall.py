"""The engine stood still within a step: no request is to blame for that time."""

from dataclasses import replace

import pandas as pd

from sojourn.diagnosis.cause import (
    Accounts,
    Cause,
    Client,
    Evidence,
    Excess,
    Means,
    Proposal,
    Records,
    Refutation,
    Rule,
    evidence,
)
from sojourn.diagnosis.evidence import view_of
from sojourn.diagnosis.excess import SERVED
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH
from sojourn.diagnosis.stall_facts import StallFacts
from sojourn.diagnosis.statements import means
from sojourn.diagnosis.statements.accounts import DEFINING, hold_time
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.stops import propose_stop
from sojourn.diagnosis.statements.transit import is_timeout
from sojourn.diagnosis.symptom_tree.reading import Reading, account

STALL = "compute.stall"
IDLE_CORES = 0.1  # a process that computes takes more
BUSY_CORES = 0.7
CHANGE = "find what stopped it at these moments: its log, swapping, a debugger, a driver, a limit on its CPU time"
STACK = "a stack of the engine's process while it stands: py-spy dump --pid PID"
FEWEST_PAUSES = 3  # each machine stands for a moment
FEWEST, SILENT_S = 5, 10.0  # requests served before, and sent after; without a byte for anybody
HEARD = "client: first_token_ns, last_byte_ns, sent_ns, status"
SOURCE = "steps: device_ns, predicted_ns"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    stalls = facts.stalls()
    if stalls is None or excess.share(STALL) < EXPLAINS_ENOUGH:  # it may stand between two steps, too
        found = _read_stops(facts, excess)
        if found is not None or stalls is None:
            return found
    times = f"for {stalls.total_ns / 1e9:,.1f} s"
    known = "its own model" if stalls.has_prediction else "the slow steps of the run"
    return Proposal(
        cause=f"the engine stood still {times}: {stalls.sentence}{_likely(stalls)}",
        evidence=[
            evidence(f"step {stalls.step:,} took {stalls.device_ns / 1e6:,.0f} ms, {stalls.at_s:,.1f} s into the run; "
                     f"{known} bounds it at {(stalls.device_ns - stalls.longest_ns) / 1e6:,.0f} ms",
                     stalls.longest_ns / 1e6, "ms", SOURCE, weight=4),
            *excess_evidence(excess, (STALL,)),
            *_of_machine(stalls),
        ],
        measurement="the system's log and the server's log at that moment; `perf sched`, or a stack of the core "
        "(`py-spy dump`) while it stands",
        if_cause="they name a stop, a compilation, a collection, swapping or a hung driver at that moment",
        if_rival="nothing happened to the process, and the step had more to compute than its record says",
        change="remove what stopped it: warm up all shapes, freeze the garbage collector, pin the core, forbid swap",
        claims={STALL: 1.0},
        in_replay=False,
    )  # fmt: skip


def _read_stops(facts: Client, excess: Excess) -> Proposal | None:
    """Nobody hears anything again and again, and meanwhile the front answers and the engine makes no token."""
    return propose_stop(
        facts, excess, "engine",
        CHANGE,
        STACK,
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """No client hears anything, for good or again and again, while the front answers and the engine makes no token."""
    if excess.objective == SERVED:
        return read_silence(facts, excess)
    return _read_stops(facts, excess) or _read_pauses(facts, excess)


def _read_pauses(facts: Means, excess: Excess) -> Proposal | None:
    """Again and again no token is computed, and requests that come meanwhile wait in front of an idle queue."""
    view, waits = facts.server, means.before_core(facts.server)
    pauses, longest = view.courses.pauses, view.longest_prompt
    if pauses is None or waits is None or excess.objective == "tpot_ms" or longest is None:
        return None
    explained = min(waits, pauses.late_share)
    if pauses.count < FEWEST_PAUSES or explained < EXPLAINS_ENOUGH or longest > means.FULL_STEP:
        return None
    return Proposal(
        cause=f"the engine stood still {pauses.count} times, for about {pauses.longest_s:.0f} s at most and "
        f"{pauses.seconds:.0f} s in all",
        evidence=[
            evidence(f"{pauses.count} times no token was computed for up to {pauses.longest_s:.0f} s, and the next "
                     f"first tokens had waited in that time; the page was answered meanwhile", pauses.seconds, "s",
                     means.COUNTERS, weight=DEFINING),
            evidence(f"{waits:.0%} of the mean time to first token is neither queue nor prefill", waits, "share",
                     means.HISTOGRAMS, weight=2),
            evidence(f"prompts have at most {longest:,.0f} tokens: no step with one takes so long", longest, "tokens",
                     means.HISTOGRAMS, weight=1),
        ],
        measurement=STACK,
        settings={},
        if_cause="it stands in one place again and again: a lock, a collection, a driver, or it was stopped",
        if_rival="it runs or waits for a core: others have its cores at these moments",
        change=CHANGE,
        explained=explained,
        gain=means.time_gained(view, f"{explained:.0%} of the time to first token"),
        in_replay=False,
    )  # fmt: skip


def read_silence(facts: Client, loss: Excess) -> Proposal | None:
    """From one moment on no client hears anything, and each request ends by its own time limit."""
    rows = facts.rows
    served, late = rows[rows.status == "ok"], rows.loc[loss.missing]
    if not is_timeout(loss.error) or len(served) < FEWEST or facts.measured_by == "server":
        return None
    heard_ns = _heard_ns(rows)
    after = rows[rows.sent_ns.astype("float64") > heard_ns]
    silent_s = (float(late.last_byte_ns.astype("float64").fillna(late.due_ns).max()) - heard_ns) / 1e9
    if len(after) < FEWEST or silent_s < SILENT_S or (after.status == "ok").any():
        return None
    at_s = (heard_ns - float(rows.due_ns.min())) / 1e9
    return Proposal(
        cause=f"the engine hangs: {at_s:.0f} s into the run the last text came, and none of {len(after)} later "
        "requests got any",
        evidence=[
            evidence(f"{len(served)} requests were served until then, and for {silent_s:.0f} s nobody heard anything, "
                     "at the same load", silent_s, "s", HEARD, weight=DEFINING),
            evidence(f"{loss.missed} requests ended with “{loss.error}”", loss.missed, "requests", "client: error",
                     weight=1),
        ],
        measurement=STACK,
        if_cause="it waits in one place: a lock, a collective, a driver, or it was stopped",
        if_rival="it makes steps, and nothing of them reaches a client: the front or the way is at fault",
        change="restart the engine, with a health check that asks for a token",
        explained=1.0,
        in_replay=False,
    )  # fmt: skip


def _heard_ns(rows: pd.DataFrame) -> float:
    """When a client heard anything last."""
    served = rows[rows.status == "ok"]
    return float(pd.concat([served.last_byte_ns, rows.first_token_ns]).astype("float64").max())


def _went_on(facts: Client) -> str:
    """Tokens that the engine generated while no client heard anything."""
    view = view_of(facts)
    last_ns = view.courses.generated_ns if view is not None else None
    after_s = (last_ns - _heard_ns(facts.rows)) / 1e9 if last_ns is not None else 0.0
    if not after_s > SILENT_S:  # nor where no client was heard at all
        return ""
    return f"the engine generated tokens for {after_s:.0f} s in which nobody heard anything"


def _likely(stalls: StallFacts) -> str:
    """What the counters of the kernel leave open."""
    if stalls.core_on_cpu is None:
        return ""
    if stalls.core_on_cpu >= BUSY_CORES:
        return "; its process computed meanwhile: a compilation, a graph capture or a garbage collection"
    if (stalls.others_cores or 0.0) >= BUSY_CORES:
        return "; its process had no core, and others had them"
    return "; its process did not run: it was stopped, or waited for memory, the disk or a driver"


def _of_machine(stalls: StallFacts) -> list[Evidence]:
    if stalls.core_on_cpu is None:
        return []
    others = "" if stalls.others_cores is None else f", and other processes {stalls.others_cores:.2f}"
    return [evidence(f"meanwhile the engine's process used {stalls.core_on_cpu:.2f} cores{others}",
                     stalls.core_on_cpu, "cores", "system: core_cpu_seconds, host_cpu_percent", weight=0)]  # fmt: skip


def show_stalls(facts: Records) -> Reading | None:
    """Whether any step took far longer than what it held explains."""
    if facts.steps is None:
        return None
    stalls = facts.stalls()
    if stalls is None:
        return Reading("no step took far longer than what it held explains", True, SOURCE)
    return Reading(stalls.sentence, False, SOURCE)


_SILENCE = Rule(
    read_silence,
    needs=("loss",),
    lifecycles=("request", "compute"),
    rival="a front or a way that hangs",
    rival_key="",
    refuted_by=(Refutation("generated tokens", _went_on),),
)
CAUSE = Cause(
    key="engine_stall",
    lifecycles=("compute",),
    object="engine process",
    kind="fault",
    rival="other processes that take the engine's cores for a while",
    rival_key="noisy_neighbour",
    asks="Did the engine stand still for a moment?",
    measurement="the device time of each step against the step model",
    figures=(show_stalls, account(STALL)),
    booked=(STALL,),
    complaints={"high_ttft": 19, "high_itl": 10},
    reads={
        Records: Rule(read_records),
        Means: replace(_SILENCE, explain=read_means, needs=()),
        Accounts: hold_time(
            accounts=(STALL,),
            words="the engine stood still within a step",
            change="find what stopped the engine at that moment",
            rival="other processes that take the engine's cores",
        ),
    },
    lost=_SILENCE,
)
