"""Drafts of speculation, shaped for showing."""

import numpy as np
import pandas as pd

from sojourn.metrics import cells
from sojourn.ui.text import duration, number, percent

UNDRAFTED_MEANING = {
    "acceptance": "few drafts were accepted",
    "step_time": "the longer step would cost more than they bring",
    "memory": "no free blocks",
    "last_token": "none may follow",
}


def acceptance(steps: pd.DataFrame) -> pd.DataFrame:
    """A row a position of a draft behind the last known token: `position, drafted, accepted, share` (of the drafted)
    and `given`: at least so many of those behind accepted drafts. Empty of a run that verified none."""
    if "drafted_by_position" not in steps:
        return pd.DataFrame()
    drafted, accepted = (cells.sums_by_place(steps[f"{name}_by_position"]) for name in ("drafted", "accepted"))
    if not len(drafted):
        return pd.DataFrame()
    accepted = np.pad(accepted, (0, len(drafted) - len(accepted)))
    # A draft can be accepted only if those before it were. Sums do not tell how many of them had one behind them.
    reached = np.minimum(drafted, np.concatenate((drafted[:1], accepted[:-1])))
    with np.errstate(invalid="ignore", divide="ignore"):
        return pd.DataFrame({
            "position": np.arange(1, len(drafted) + 1), "drafted": drafted, "accepted": accepted,
            "share": accepted / drafted, "given": accepted / reached,
        })  # fmt: skip


def acceptance_table(found: pd.DataFrame) -> pd.DataFrame:
    """`acceptance` as text."""
    return pd.DataFrame({
        "position": found.position.map(str),
        "verified": found.drafted.map(number),
        "accepted": found.accepted.map(number),
        "share": found.share.map(percent),
        "behind accepted ones, at least": found.given.map(percent),
    })  # fmt: skip


def draft_sentence(steps: pd.DataFrame, requests: pd.DataFrame) -> str:
    """What proposing and rejecting took, and why requests got no drafts."""
    rejected = requests.rejected_ns.fillna(0).sum() if "rejected_ns" in requests else 0
    sentence = (
        f"Proposing took {duration(float(steps.draft_ns.sum()))}. Rejected drafts took {duration(float(rejected))} of "
        "the requests' decode time."
    )
    totals = cells.sums_by_key(steps.undrafted, cells.keys_of(steps.undrafted)).sum()
    if len(totals):
        named = (f"{number(count)} times {UNDRAFTED_MEANING.get(name, name)}" for name, count in totals.items())
        sentence += f" A request got no drafts: {'; '.join(named)}."
    return sentence
