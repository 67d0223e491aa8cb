"""What a diagnosis said of a run, reduced to what is scored. Made from the document that `diagnosis.json` holds."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from sojourn.diagnosis.verdict import Evidence

ASSIGNMENT = re.compile(r"\b([a-z_]+)=([^\s,;]+)")  # in the words of a fix that came without a replay


class SaidCause(msgspec.Struct, frozen=True, kw_only=True):
    """One finding."""

    key: str
    lifecycle: str
    kind: str
    statement: str
    goodput_lost: float | None = None
    confidence: float | None = None  # None where the diagnosis gave none
    settings: dict[str, Any] = {}  # that its fix sets
    features: dict[str, float] = {}  # what its confidence is made of
    is_cause: bool = True  # and no alternative
    evidence: list[Evidence] = []


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict on one run. `state` is one of verdict.State, or "failed" where the diagnosis ended with an error."""

    state: str
    headline: str
    causes: list[SaidCause] = []  # in the order of the diagnosis
    bottleneck: str | None = None
    seconds: float = 0.0  # that the diagnosis took

    @property
    def lifecycle(self) -> str | None:
        """The lifecycle that is blamed first."""
        return self.causes[0].lifecycle if self.causes else self.bottleneck


def said_of(document: Mapping[str, Any], seconds: float = 0.0) -> Said:
    """From a Diagnosis as plain data (`msgspec.to_builtins`, or `diagnosis.json`)."""
    return Said(
        state=document["state"],
        headline=document["headline"],
        causes=[_cause(finding) for finding in document["findings"]],
        bottleneck=document["bottleneck"],
        seconds=seconds,
    )


def _cause(finding: Mapping[str, Any]) -> SaidCause:
    change = finding.get("change")
    words = dict(ASSIGNMENT.findall(finding["fix"]["change"]))
    return SaidCause(
        key=finding.get("key") or finding["object"],
        lifecycle=finding["lifecycles"][0],
        kind=finding["kind"],
        statement=finding["cause"],
        goodput_lost=finding["goodput_lost"],
        confidence=finding.get("confidence"),
        features=finding.get("confidence_features") or {},
        is_cause=finding.get("role", "cause") == "cause",
        settings=dict(change["settings"]) if change else {name: _value(text) for name, text in words.items()},
        evidence=msgspec.convert(finding["evidence"], list[Evidence]),
    )


def _value(text: str) -> Any:
    """`512` → 512, `on` → "on"."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
