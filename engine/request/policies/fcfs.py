"""First come, first served."""

from sojourn.engine.request.policies.policy import Policy


class Fcfs(Policy):
    """A preempted request came before all that still wait for their first step.

    Starvation: a request waits for earlier ones, and for no other.
    """

    name = "fcfs"
