"""What a scheduling policy decides, and what most of them decide alike."""

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from engine.request.plan import StepPlan
from engine.request.request import Request


class Part(Enum):
    """What a step may be made of."""

    DECODES = "running requests with one token to compute"
    PROMPTS = "running requests with more"
    ARRIVALS = "waiting requests that are admitted"


Courses = tuple[tuple[Part, ...], ...]
MIXED: Courses = ((Part.DECODES, Part.PROMPTS, Part.ARRIVALS),)
PROMPTS_FIRST: Courses = ((Part.PROMPTS, Part.ARRIVALS), (Part.DECODES,))


class Line(Protocol):
    """The waiting requests that could be admitted, in the policy's order."""

    def push(self, request: Request) -> None: ...

    def remove(self, request: Request) -> None:
        """It was admitted, was set aside or is gone."""
        ...

    def head(self) -> Request | None:
        """Whose turn it is. Stays in the line."""
        ...


class Policy(Protocol):
    """Decides who is next, who gives way and what a step is made of. One object serves one scheduler.

    What is written here holds for policies that do not say otherwise.
    """

    line: Line

    def rank(self, request: Request) -> tuple:
        """Unique, and the same for a request's whole life: where memory is short, the last in rank gives way.

        The first in rank never does, so that somebody always gets on.
        """
        return (request.order,)

    def displaced_by(self, waiting: Request, running: Sequence[Request]) -> list[Request]:
        """Running requests that may be thrown out for the head of the line. All are after it in rank."""
        return []

    def courses(self, running: Sequence[Request]) -> Courses:
        """What the next step may be made of: it is the first course in which there is anything to compute."""
        return MIXED

    def admitted(self, request: Request) -> None:
        """A request got its place: `num_computed_tokens` of it need no work."""

    def computed(self, plan: StepPlan) -> None:
        """A step was planned, and will be computed."""
