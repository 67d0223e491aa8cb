"""Requests that no counter shows: connections that stay open while an engine that looks idle gives no token.

An engine that stops between two steps shows the requests of its last step, which may be none. What comes then waits in
the front, and no family of the page counts it. Each client holds a connection, and so an open file of the front. What
this cannot tell: requests over connections that were open before, and a page without that gauge, which a front of
several processes has not.
"""

import math
from dataclasses import dataclass

FEWEST, FEWEST_TIMES = 5, 3  # more connections, at as many scrapes at least: one client may open several at once
MANY, MANY_TIMES = 10, 5  # that no client opens for nothing


@dataclass(slots=True)
class Connections:
    """While a page shows no token, no step, no end and no request: its open files, and how they grew."""

    since_ns: int  # when there were the fewest
    firsts: tuple[float, float]  # seconds to first tokens until then, and their number
    fewest: float  # open files
    now: float = math.inf
    most: float = 0.0  # more than the fewest, once they were many
    times: int = 0  # scrapes at which there were more than at the one before
    ended_ns: int | None = None  # when something moved again

    def add(self, ns: int, files: float) -> None:
        self.times += files > self.now
        self.now = files
        if self.are_many:
            self.most = max(self.most, self.more)
        elif files <= self.fewest and not self.most:
            self.since_ns, self.fewest, self.times = ns, files, 0

    @property
    def more(self) -> float:
        return self.now - self.fewest

    @property
    def are_some(self) -> bool:
        """Also where clients gave up: nobody was served since."""
        return self.most > 0 or (self.more >= FEWEST and self.times >= FEWEST_TIMES)

    @property
    def are_many(self) -> bool:
        return self.more >= MANY and self.times >= MANY_TIMES
