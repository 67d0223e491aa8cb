"""What techniques add to the front, and what stands in the place of each where it is not asked for.

The application loads a technique by its name (engine/techniques). Nothing in the server imports one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.config import EngineConfig
from sojourn.engine.sampling import Grammar
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.kv_transfer import NO_TRANSFER, Transfer, refuse_role, sort_transfer
from sojourn.engine.server.openai.prompts import Prompt
from sojourn.engine.server.openai.protocol import GenerationRequest
from sojourn.interop.exported.prometheus import Exporter


class Adapters(Protocol):
    """Adapters that calls may name as their model."""

    @property
    def names(self) -> Sequence[str]: ...

    def find(self, name: str) -> AdapterReference | None: ...

    def card(self, name: str) -> dict[str, Any]:
        """An adapter as GET /v1/models shows it."""
        ...

    def observe(self, exporter: Exporter, core: CoreClient) -> None:
        """Counts for GET /metrics which of them are used."""


class Grammars(Protocol):
    """Finds out whether the grammar of a client can be compiled."""

    def start(self) -> None: ...

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raises ApiError that names `param` unless the core can follow the grammar."""

    async def stop(self) -> None: ...


class Transfers(Protocol):
    """Reads what a call wants of other servers."""

    def of_call(self, body: GenerationRequest, prompts: Sequence[Prompt], output_tokens: Sequence[int]) -> Transfer:
        """Raises ApiError 400 for what this server cannot do."""
        ...


class NoAdapters:
    """The model alone."""

    names: tuple[str, ...] = ()

    def find(self, name: str) -> None:
        return None

    def card(self, name: str) -> dict[str, Any]:
        raise KeyError(name)

    def observe(self, exporter: Exporter, core: CoreClient) -> None:
        """There is nothing to count."""


class NoGrammars:
    """Refuses every grammar: this installation lacks the technique."""

    def start(self) -> None:
        """There is no worker."""

    async def check(self, grammar: Grammar, param: str) -> None:
        message = f"`{param}` needs the technique grammar, which this installation lacks; leave it out"
        raise invalid(param, message, "unsupported_parameter")

    async def stop(self) -> None:
        """There is no worker."""


class NoTransfers:
    """Refuses every transfer: the server has no role in one."""

    def of_call(self, body: GenerationRequest, prompts: Sequence[Prompt], output_tokens: Sequence[int]) -> Transfer:
        if (wanted := sort_transfer(body.kv_transfer_params)) is not None:
            raise refuse_role(wanted, None)
        return NO_TRANSFER


@dataclass(frozen=True, slots=True)
class Guests:
    """How the guests of a model are made, of its settings and its name, or of its folder. None where there is none."""

    adapters: Callable[[EngineConfig, str], Adapters] | None = None
    grammars: Callable[[Path], Grammars] | None = None
    transfers: Callable[[EngineConfig], Transfers] | None = None
