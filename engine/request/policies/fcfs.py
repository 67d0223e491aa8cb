"""First come, first served."""

from engine.request.policies.line import RankedLine
from engine.request.policies.policy import Policy


class Fcfs(Policy):
    """A preempted request came before all that still wait for their first step.

    Starvation: a request waits for those that came before it, and for nobody else.
    """

    def __init__(self) -> None:
        self.line = RankedLine(self.rank)
