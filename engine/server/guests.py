"""What techniques add to the front, each with what it is without the technique.

The application loads a technique by its name (engine/techniques). Nothing in the server imports one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.config import EngineConfig
from sojourn.engine.sampling import Grammar
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.kv_transfer import NO_TRANSFER, Transfer, refuse_role, sort_transfer
from sojourn.engine.server.openai.prompts import Prompt
from sojourn.engine.server.openai.protocol import GenerationRequest
from sojourn.interop.exported.prometheus import Exporter


class Adapters:
    """Adapters that calls may name as their model: none, without the technique."""

    @property
    def names(self) -> Sequence[str]:
        return ()

    def find(self, name: str) -> AdapterReference | None:
        return None

    def card(self, name: str) -> dict[str, Any]:
        """An adapter of `names` as GET /v1/models shows it."""
        raise KeyError(name)

    def observe(self, exporter: Exporter, core: CoreClient) -> None:
        """Counts for GET /metrics which of them are used."""


class Grammars:
    """Finds out whether the core can follow the grammar of a client: none, without the technique."""

    def start(self) -> None:
        """Prepares for the first grammar."""

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises ApiError that names `param` unless the core can follow the grammar."""
        message = f"`{param}` needs the technique grammar, which this installation lacks; leave it out"
        raise invalid(param, message, "unsupported_parameter")

    async def stop(self) -> None:
        """Leaves no process."""


class Transfers:
    """Reads what a call wants of other servers: nothing, without a role in KV transfers."""

    def of_call(self, body: GenerationRequest, prompts: Sequence[Prompt], output_tokens: Sequence[int]) -> Transfer:
        """Raises ApiError 400 for what this server cannot do."""
        if (wanted := sort_transfer(body.kv_transfer_params)) is not None:
            raise refuse_role(wanted, None)
        return NO_TRANSFER


@dataclass(frozen=True, slots=True)
class Guests:
    """How the guests of a model are made, of its settings and its name, or of its folder. None where there is none."""

    adapters: Callable[[EngineConfig, str], Adapters] | None = None
    grammars: Callable[[Path], Grammars] | None = None
    transfers: Callable[[EngineConfig], Transfers] | None = None
