"""A call on its way in, and the endpoint that it came to."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import Request
from starlette.responses import Response

from sojourn.engine.sampling import Grammar, SamplingParams
from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.core.call import Call, Caller
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.gateway.access.admission import Admission
from sojourn.engine.server.gateway.moderation.profile import Profile
from sojourn.engine.server.model import Model
from sojourn.engine.server.models.served_model import ServedModel
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.kv_transfer import NO_TRANSFER, Transfer
from sojourn.engine.server.openai.prompts import ModelLimits, Prompt
from sojourn.engine.server.openai.protocol import GenerationRequest
from sojourn.engine.server.openai.reasoning import PLAIN, TurnPlan


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A POST route: the model of its body, what answers a call that has come in, and how far calls come in.

    An API of its own says how its body becomes a chat, and how it calls the fields of that chat.
    """

    body: type[Strict]
    answer: Callable[[Any, "Arrival"], Awaitable[Response]]  # with the front
    reach: Literal["body", "prompt", "core"] = "core"
    as_chat: "Callable[[Arrival], Awaitable[ChatRequest]] | None" = None
    names: Mapping[str, str] = field(default_factory=dict)  # field of the chat → field of its body


@dataclass(slots=True)
class Arrival:
    """What the steps of the intake have found out so far. Each step writes its own fields, and reads earlier ones."""

    request: Request
    endpoint: Endpoint
    caller: Caller
    admission: Admission | None = None  # what it owes to its tenant's limits
    body: Any = None  # as it was sent
    served: ServedModel | None = None  # that it uses until it is answered, or in the core
    model: Model | None = None
    generation: GenerationRequest | None = None  # the body, or the chat that it stands for
    limits: ModelLimits | None = None
    inputs: list[str | list[int]] = field(default_factory=list)  # the prompts of a completion, before they are encoded
    prompts: list[Prompt] = field(default_factory=list)
    plan: TurnPlan = PLAIN
    grammar: Grammar | None = None
    output_tokens: list[int] = field(default_factory=list)  # the bound of each prompt
    transfer: Transfer = NO_TRANSFER
    profile: Profile | None = None
    params: SamplingParams | None = None
    call: Call | None = None

    @property
    def num_prompts(self) -> int:
        return max(1, len(self.inputs))

    @property
    def choices(self) -> int:
        return 1 if self.generation is None else self.generation.choices

    def rename(self, error: ApiError) -> None:
        """Names the fields of a chat as the body does that stands for it."""
        if self.endpoint.as_chat is not None and self.model is not None:
            for name, own in self.endpoint.names.items():
                error.message = error.message.replace(f"`{name}`", f"`{own}`")
            error.param = self.endpoint.names.get(error.param, error.param)
