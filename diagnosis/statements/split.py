"""Servers that compute prompts for others."""

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts


def mean_ms(facts: Facts, excess: Excess, column: str) -> float:
    rows = facts.rows.loc[excess.missing]
    return float(rows[column].mean()) / 1e6 if column in rows else 0.0
