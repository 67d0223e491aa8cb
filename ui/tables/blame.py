"""Who delayed whom, shaped for showing: pure functions from a run's book of waits to small tables."""

from collections.abc import Collection

import pandas as pd

from sojourn.metrics.request.blame import between, offenders, worst
from sojourn.metrics.request.offenders import Book
from sojourn.metrics.request.waits import reasons
from sojourn.ui.tables.request import cohorts
from sojourn.ui.text import number, percent

TRAITS = {"klass": "classes", "tenant": "tenants", "band": "prompt lengths", "worst": "worst offenders"}
WORST = 10
MOST_VICTIMS = 20
# A step that takes so many times what its work explains was slowed by something else; it has to be this share of all.
SLOWED, WORTH_SAYING = 2.0, 0.05


def traits(book: Book) -> list[str]:
    """Those of TRAITS by which the requests of this run differ; the worst offenders always."""
    requests = book.requests
    several = [name for name in ("klass", "tenant") if requests[name].fillna("").nunique() > 1]
    return [*several, "band", "worst"]


def blame(book: Book, trait: str, victims: Collection[str] | None = None) -> pd.DataFrame:
    """The matrix by one of TRAITS, in ns; of the worst offenders, for the requests that waited longest. `victims`: the
    requests whose waits count; all by default."""
    if trait == "worst":
        table = worst(book, WORST)
        if victims is not None:
            table = table[table.index.isin(victims)]
        return table.loc[table.sum(axis=1).sort_values(ascending=False, kind="stable").index[:MOST_VICTIMS]]
    return between(book, trait, victims)


def slowed_steps(steps: pd.DataFrame) -> str:
    """A sentence where the device took much longer than the work of its steps explains; empty elsewhere. The matrix
    charges that time to who was in the steps, who can do nothing for it."""
    if steps.empty:
        return ""
    slowed = steps[steps.device_ns > SLOWED * steps.predicted_ns.astype("float64")]  # no expectation: not slowed
    surplus_ns = float((slowed.device_ns - slowed.predicted_ns.astype("float64")).sum())
    share = surplus_ns / max(float(steps.device_ns.sum()), 1.0)
    if share < WORTH_SAYING:
        return ""
    return (
        f"Beware: {percent(share)} of the device's time is more than the work of {len(slowed):,} steps explains, each "
        f"above {SLOWED:g} times what was expected (a device that slowed down, other work on its host). It is charged "
        "to the requests in those steps."
    )


def waits_by_reason(requests: pd.DataFrame) -> pd.DataFrame:
    """Nanoseconds waited by reason, a row a cohort, and `requests`: its size. Reasons as the scheduler booked them;
    where an older run tells none, the accounts."""
    recorded = [reasons(cell) for cell in requests.waits]
    if any(recorded):
        waited = pd.DataFrame(recorded, index=requests.index).fillna(0.0)
    else:
        names = {"request_queue": "queue", "memory_blocked": "kv_blocks", "memory_preempted": "preempted"}
        waited = pd.DataFrame({name: requests[f"ledger_{column}_ns"] for column, name in names.items()}).fillna(0.0)
    waited["prompts of others"] = requests.ledger_request_interference_ns.fillna(0.0)
    groups = cohorts(requests[requests.ledger_request_queue_ns.notna()])
    sums = {
        name: waited.loc[members.index].sum().to_dict() | {"requests": len(members)}
        for name, members in groups.items()
        if len(members)
    }
    return pd.DataFrame.from_dict(sums, orient="index")


def worst_offenders(book: Book, count: int = 10) -> pd.DataFrame:
    """Those who delayed the others most, as text: who, how long a prompt, seconds, share."""
    table = offenders(book)
    whole = float(table.caused_ns.sum()) or 1.0
    top = table.head(count)
    table = pd.DataFrame(
        {
            "request": top.request_id,
            "tenant": top.tenant.fillna("–"),
            "class": top.klass.fillna("–"),
            "prompt tokens": top.prompt_tokens.map(number),
            "delayed others by (s)": (top.caused_ns / 1e9).map(number),
            "share": (top.caused_ns / whole).map(percent),
        }
    )
    return table.drop(columns=[name for name in ("tenant", "class") if table[name].isin(("", "–")).all()])
