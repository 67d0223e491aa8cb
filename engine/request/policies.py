"""In which order waiting requests are admitted. A policy is one function of a request; add it to POLICIES."""

from collections.abc import Callable
from typing import Protocol

from engine.request.request import Request


class Policy(Protocol):
    """Gives the key by which waiting requests are sorted: the smallest is admitted first. It must be unique."""

    def __call__(self, request: Request) -> tuple: ...


def fcfs(request: Request) -> tuple:
    """First come, first served. A preempted request came before all that still wait for their first step."""
    return (request.order,)


POLICIES: dict[str, Callable[[Request], tuple]] = {"fcfs": fcfs}
