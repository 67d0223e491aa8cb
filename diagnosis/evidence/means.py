"""What the own metrics of a server show that recorded nothing for us: means over all requests, and gauges."""

from dataclasses import dataclass

from sojourn.diagnosis.evidence.client import Client
from sojourn.interop.sources.view import ServerView


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Means(Client):
    server: ServerView
    batch_gain: float | None  # tokens/s of twice the batch over those of the batch; None: not seen
