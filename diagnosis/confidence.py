"""How sure a verdict is: the share of such verdicts that were right on planted faults.

A logistic regression over a few features, each 0 to 1. Its coefficients are fitted on planted faults and stand in
`confidence.json` beside this file; no rule knows them.
"""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from sojourn.diagnosis.adjudicate import Judged, Judgement
from sojourn.diagnosis.evidence import Client, steps_of

COEFFICIENTS = Path(__file__).with_name("confidence.json")
# What each level shows, of what a diagnosis can use: a server's means cannot tell one late request from another.
LEVEL_SHOWS = {"client": 0.0, "metrics": 0.25, "requests": 0.6, "steps": 1.0, "kernels": 1.0, "all": 1.0}
FEATURES = ("explained", "regained", "margin", "support", "level", "replayed")
INTERCEPT = "intercept"


@cache
def coefficients() -> dict[str, float]:
    """Feature → coefficient, with INTERCEPT."""
    return json.loads(COEFFICIENTS.read_text(encoding="utf-8"))["coefficients"]


def features(facts: Client, each: Judged, judgement: Judgement) -> dict[str, float]:
    """What the confidence in a verdict is made of, 0 to 1 each."""
    shows = LEVEL_SHOWS[facts.level]
    found = {
        "explained": min(1.0, each.explained),
        "regained": each.regained,
        "margin": _margin(each, judgement),
        "support": each.suspect.support,
        "level": shows if steps_of(facts) is not None else min(shows, LEVEL_SHOWS["requests"]),
        "replayed": 0.0 if each.is_estimate else 1.0 if judgement.unchanged.is_trusted else 0.5,
    }
    return {name: float(value) for name, value in found.items()}


def confidence(found: Mapping[str, float], weights: Mapping[str, float] | None = None) -> float:
    """0 to 1, from features; `weights` stand in for the stored coefficients. A feature without one says nothing."""
    known = {INTERCEPT: 1.0, **found}
    weights = coefficients() if weights is None else weights
    return 1 / (1 + math.exp(-sum(weight * known.get(name, 0.0) for name, weight in weights.items())))


def _margin(each: Judged, judgement: Judgement) -> float:
    """How far the next best suspect is behind, as a share of this one's score; 1 if there is none."""
    key = each.suspect.key
    behind = [other.alone for other in judgement.alternatives if other is not each and key not in other.suspect.follows]
    if not behind:
        return 1.0
    return max(0.0, min(1.0, 1 - max(behind) / max(each.alone, 1e-9)))
