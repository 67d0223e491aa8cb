"""All dashboards: two tiers for every engine, and our own engine's by lifecycle and as a fleet."""

from dataclasses import dataclass

from sojourn.dashboards.content import DASHBOARDS, Row
from sojourn.dashboards.fleet import FLEET
from sojourn.dashboards.neutral import PRESENT
from sojourn.dashboards.tiers import DRILL, SATURATION

OURS = "sojourn_request_running"


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. `present` is a gauge of every server that it can show; its variables are that gauge's labels."""

    name: str
    shows: str
    rows: tuple[Row, ...]
    lifecycle: str = "request"  # whose colour it wears
    present: str = OURS

    @property
    def uid(self) -> str:
        return f"sojourn-{self.name}"


BOARDS = (
    Board("saturation", "Are users affected, and which resource is full? Sojourn, vLLM and SGLang servers.", SATURATION,
          present=PRESENT),
    Board("drilldown", "One server or several by lifecycle. Sojourn, vLLM and SGLang servers.", DRILL, present=PRESENT),
    *(Board(name, f"The {name} lifecycle of a Sojourn server.", rows, name) for name, rows in DASHBOARDS.items()),
    Board("fleet", "Several Sojourn servers behind a router, by `instance`.", FLEET),
)  # fmt: skip
