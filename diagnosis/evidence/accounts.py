"""What is known where accounts divide the time: of each request, or of the mean request by the server's own metrics."""

from dataclasses import dataclass

from sojourn.diagnosis.evidence.client import Client
from sojourn.diagnosis.memory_facts import PrefixUse
from sojourn.interop.sources.view import ServerView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accounts(Client):
    waits: dict[str, float]  # reason → share of the waiting for a place; what a step under way cost is left out
    prefix: PrefixUse | None  # of the served requests; only where the server records it
    work: "Work | None"
    cached_share: float | None  # of the prompt tokens, what came from the prefix cache
    server: ServerView | None  # None where a record of each request stands behind the accounts
    batch_gain: float | None  # as Means


@dataclass(frozen=True, slots=True)
class Work:
    """What one request asks of the device, on average over the served requests."""

    prompt_tokens: float
    computed_tokens: float  # of the prompt, not from the cache and not counted again after a preemption
    output_tokens: float
    context_tokens: float  # mean context of a decode step of one request
