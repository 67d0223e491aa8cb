"""What a request waits for before it may be scheduled, where the runner or several techniques have a say."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sojourn.engine.request.plan import Preparation


@dataclass(frozen=True, slots=True)
class Refusal:
    """The preparation of a request that cannot be served."""

    is_done: ClassVar[bool] = True
    waits_for: ClassVar[str] = "grammar"
    adapter_ready_ns: ClassVar[int | None] = None

    error: str
    ready_ns: int


def refused(sentence: str) -> Refusal:
    return Refusal(sentence, time.monotonic_ns())


@dataclass(frozen=True, slots=True)
class AllOf:
    """Preparations that run side by side."""

    parts: Sequence[Preparation]

    @property
    def is_done(self) -> bool:
        return all(part.is_done for part in self.parts)

    @property
    def ready_ns(self) -> int:
        return max(part.ready_ns for part in self.parts)

    @property
    def error(self) -> str | None:
        return next((part.error for part in self.parts if part.error), None)

    @property
    def waits_for(self) -> str:
        return next((part.waits_for for part in self.parts if not part.is_done), self.parts[-1].waits_for)

    @property
    def adapter_ready_ns(self) -> int | None:
        return next((part.adapter_ready_ns for part in self.parts if part.adapter_ready_ns is not None), None)


def all_of(parts: Sequence[Preparation]) -> Preparation | None:
    """The preparation that is done when all are; None where there is nothing to wait for."""
    if len(parts) < 2:
        return parts[0] if parts else None
    return AllOf(parts)
