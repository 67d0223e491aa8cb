"""Servers that compute prompts for others."""

from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.excess import Excess


def mean_ms(facts: Client, excess: Excess, column: str) -> float:
    rows = facts.rows.loc[excess.missing]
    return float(rows[column].mean()) / 1e6 if column in rows else 0.0
