"""The order in which requests are served."""

from typing import Any

import numpy as np

from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.excess import Excess

ORDERS = {
    "prefill-first": "prompts go before running decodes, and stop them for whole steps",
    "priority": "requests of a higher priority go first, whenever they came",
    "shortest-prefill-first": "requests with shorter prompts go first, whenever they came",
    "fair-share": "the tenant with the least service goes first, whenever its requests came",
}
OF_POLICY = ("priority_ageing", "shortest_ageing", "fair_output_weight", "prefill_patience")
MOSTLY = 0.5
OVERTAKEN = 1.0  # later arrivals that go ahead of a late request, on average: in order of arrival there are none


def policy(name: str, facts: Client) -> dict[str, Any]:
    """The settings that choose a policy; those that belong to the one in force are taken back."""
    return {"policy": name} | {each: None for each in OF_POLICY if facts.engine.get(each) is not None}


def overtaken_share(facts: Client, excess: Excess) -> float:
    """Requests that came after a late one and got a place before it, on average."""
    rows = facts.rows[facts.rows.scheduled_ns.notna() & facts.rows.arrived_ns.notna()].sort_values("arrived_ns")
    placed = rows.scheduled_ns.to_numpy(dtype="float64")
    late = np.isin(rows.index.to_numpy(), excess.missing.to_numpy())
    counts = [int((placed[at + 1 :] < placed[at]).sum()) for at in np.flatnonzero(late)]
    return float(np.mean(counts)) if counts else 0.0
