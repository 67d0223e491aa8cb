"""The way between client and server, and the load generator at its end."""

import numpy as np
import pandas as pd

from sojourn.diagnosis.client_stalls import ClientStalls, client_stalls
from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.run.server_alone import CLIENT_LEFT

FEW = 0.5  # of the requests: what hits fewer of them belongs to them
NEARLY_ALL = 0.9  # of the requests: these are no few readers, whatever their way in
NEAR_NOTHING = 0.1  # of the late requests' transit: the others have hardly any
IDLE_LOOP = 0.5  # busy: an event loop below it answers at once
FULL_CLIENT = 0.9  # of a core: one process of a load generator has one
BROKEN = ("stream ended before", "closed without a reply", "connection reset", "broken pipe", "connection refused",
          "connection aborted")  # fmt: skip
HOLDS_TEXT = 0.05  # of the time, in long turns of the front's loop: beyond it the front may hold what is not read
STILL = "client: due_ns, sent_ns, chunk_ns; requests: token_ns"
WAYS = "client: sent_ns, last_byte_ns; requests: arrived_ns, written_ns"


def is_broken(error: str) -> bool:
    """Whether an error is of a connection, not an answer of the server."""
    return any(words in error.lower() for words in BROKEN)


def is_timeout(error: str) -> bool:
    """Whether the client gave up: whatever makes requests late is the cause, not their end."""
    return "timeout" in error or "target." in error or error == CLIENT_LEFT


def ended_s(facts: Client, loss: Excess) -> float | None:
    """Seconds into the run from which each connection is refused: nothing listens any more. None where a later request
    is served, or where connections end in another way."""
    if "connection refused" not in loss.error.lower():
        return None
    rows = facts.rows
    begin_ns = rows.loc[loss.missing].due_ns.min()
    if (rows[rows.due_ns > begin_ns].status == "ok").any() or not (rows.status == "ok").any():
        return None
    return float(begin_ns - rows.due_ns.min()) / 1e9


def stalls_of(facts: Client) -> ClientStalls | None:
    if facts.measured_by == "server":
        return None
    loop = None if facts.machine is None else facts.machine.front
    return client_stalls(facts.rows, by_tokens=loop is not None and loop.long_share < HOLDS_TEXT)


def stalled_share(facts: Client, excess: Excess) -> float:
    """Of what late requests spent on the way to the client, 0 to 1: while the load generator stood still."""
    stalls = stalls_of(facts)
    if stalls is None or not len(stalls) or excess.objective == SERVED:
        return 0.0
    return min(1.0, stalls.waited_share(facts.rows.loc[excess.missing], first=excess.objective == "ttft_ms"))


def ways_ms(facts: Client) -> tuple[pd.Series, pd.Series]:
    """Of each request that the server recorded, in ms: sent → arrived without the front's busy loop, and written →
    read."""
    rows = facts.rows
    arrived, written, sent, read = (rows[name].astype("float64")
                                    for name in ("arrived_ns", "written_ns", "sent_ns", "last_byte_ns"))  # fmt: skip
    turns = rows.front_turns_ns.fillna(0) if "front_turns_ns" in rows else 0.0
    way_in = ((arrived - sent - turns) / 1e6).clip(lower=0)
    return way_in.dropna(), ((read - written) / 1e6).clip(lower=0)[way_in.notna()].fillna(0)


def hit_share(facts: Client, transit: pd.Series, excess: Excess) -> float:
    """The share of the requests of the class whose transit is at least a quarter of the late requests' median."""
    klass = facts.rows.index[facts.rows.klass == excess.klass].intersection(transit.index)
    late = transit.reindex(excess.missing).median()
    if not len(klass) or not np.isfinite(late) or late <= 0:
        return 1.0
    return float((transit[klass] >= 0.25 * late).mean())


def idle_server(facts: Client) -> list[Evidence]:
    """An event loop with nothing to do accepts and writes at once."""
    loop = None if facts.machine is None else facts.machine.front
    if loop is None:
        return []
    statement = f"the front's event loop is busy in {loop.busy:.0%} of the time"
    return [evidence(statement, loop.busy, "share", "system: loop_busy_ns", supports=loop.busy < IDLE_LOOP, weight=1)]


def client_evidence(facts: Client, *, supports: bool) -> list[Evidence]:
    machine = facts.machine
    if machine is None or machine.load_cores_worst is None:
        return []
    busiest, queued = machine.load_cores_worst, machine.load_queued or 0.0
    starved = busiest >= FULL_CLIENT or queued >= 0.1
    return [evidence(f"the load generator takes {busiest:.0%} of a core in its busiest second, and waits for a core in "
                     f"{queued:.0%} of the time", busiest, "share", "run.json: load_use",
                     supports=starved == supports, weight=1)]  # fmt: skip
