"""What is known where the server recorded its requests, and mostly its steps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sojourn.diagnosis.chunk_facts import Chunks
from sojourn.diagnosis.evidence.accounts import Accounts
from sojourn.diagnosis.evidence.client import Client
from sojourn.diagnosis.fleet_facts import FleetFacts
from sojourn.diagnosis.kv_facts import KvFacts
from sojourn.diagnosis.launch_facts import Launches
from sojourn.diagnosis.stall_facts import StallFacts
from sojourn.diagnosis.step_facts import StepFacts
from sojourn.metrics.compute.group_facts import GroupFacts
from sojourn.metrics.compute.speed_facts import SpeedFacts
from sojourn.metrics.request.offenders import Book


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records(Accounts):
    """The functions among the fields work at their first use."""

    joined: int  # served requests that have a server record; 0 where none was served
    steps: StepFacts | None
    device_busy: float | None  # share of the time with a request in the server in which the device worked
    chunks: Chunks | None  # how prompts were cut; None without step records
    launches: Launches | None  # of a GPU
    book: Callable[[], Book | None]  # which request delayed which
    speed: Callable[[], SpeedFacts | None]  # against normal speed
    kv: Callable[[], KvFacts | None]  # blocks and prefix cache
    stalls: Callable[[], StallFacts | None]  # steps in which the engine stood still
    group: Callable[[], GroupFacts | None]  # of several ranks
    fleet: Callable[[], FleetFacts | None]  # of several servers
    servers: Mapping[str, Callable[[], Client]]  # of a fleet: each by itself

    @property
    def token_budget(self) -> int | None:
        """The setting, or what most steps had where the server chooses it."""
        setting = self.engine.get("max_num_batched_tokens")
        if isinstance(setting, int) or self.steps is None:
            return setting if isinstance(setting, int) else None
        return int(self.steps.budget_p50) or None
