"""How long each of several models was hot, slept or was cold: what keeping one warm costs, and what a cold start does.

A model that stays warm costs memory for as long as it is not used: bytes × seconds. A cold start costs the time of the
requests that wait for it. Neither is the better one by itself: the ratio says how much memory each second of waiting
has freed.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

GIB = 1 << 30


class StateTime(msgspec.Struct, frozen=True):
    """All times of a model in one state. Bytes are planned ones, as `models_gib` counts them."""

    state: str  # hot, sleeping, cold, loading, waking or failed
    count: int  # times that it came to it
    seconds: float  # in it, in all
    held_gib_seconds: float


class ModelResidence(msgspec.Struct, frozen=True):
    """One model of a front while the front lived."""

    name: str
    states: list[StateTime]  # in the order in which it came to them first
    hot_bytes: int  # that it holds when it is hot
    num_waited: int = 0  # calls that waited for it
    waited_ns: int = 0  # by all of them together

    def seconds(self, state: str) -> float:
        return sum(each.seconds for each in self.states if each.state == state)

    def count(self, state: str) -> int:
        return sum(each.count for each in self.states if each.state == state)

    @property
    def held_gib_seconds(self) -> float:
        return sum(each.held_gib_seconds for each in self.states)

    @property
    def freed_gib_seconds(self) -> float:
        """That it would have held besides, if it had been hot all the time."""
        hot_gib = self.hot_bytes / GIB
        return sum(max(0.0, each.seconds * hot_gib - each.held_gib_seconds) for each in self.states)

    @property
    def freed_per_second_waited(self) -> float | None:
        """GiB·s of memory for each second that calls waited; None where none waited."""
        return self.freed_gib_seconds / (self.waited_ns / 1e9) if self.waited_ns else None

    def sentence(self) -> str:
        """Both costs on one line."""
        states = ", ".join(
            f"{state} {self.seconds(state):,.1f} s"
            for state in ("hot", "sleeping", "cold")
            if self.seconds(state) >= 0.05
        )
        changes = ", ".join(
            f"{self.count(state)} {noun}{'s' if self.count(state) > 1 else ''} of {self.seconds(state):,.2f} s in all"
            for state, noun in (("loading", "load"), ("waking", "wake"))
            if self.count(state)
        )
        kept = f"{states}{'; ' if states and changes else ''}{changes}"
        waited = (
            f"{self.num_waited} call{'s' if self.num_waited > 1 else ''} waited {self.waited_ns / 1e9:,.2f} s"
            if self.num_waited
            else "no call waited"
        )
        ratio = self.freed_per_second_waited
        price = "" if ratio is None else f", {ratio:,.1f} GiB·s of memory for each second of waiting"
        return (
            f"{self.name}: {kept}; it held {self.held_gib_seconds:,.1f} GiB·s, and freed "
            f"{self.freed_gib_seconds:,.1f} GiB·s; {waited}{price}"
        )


def residences_of(meta: Mapping[str, Any]) -> list[ModelResidence]:
    """What run.json tells of its models; none where there was one that was always hot, or of another version."""
    try:
        return msgspec.convert(meta.get("models") or [], list[ModelResidence])
    except msgspec.ValidationError:
        return []
