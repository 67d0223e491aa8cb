"""The steps of a call on its way in. Each writes its part of the Arrival, or raises the ApiError that refuses it.

Those that own state have it from the front: the tenants' gates, the bodies under way, the models, the open bills.
"""

from typing import Protocol

import msgspec

from sojourn.engine.server.body.reader import BodyReader
from sojourn.engine.server.core.call import Call
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.gateway.access.access import Access
from sojourn.engine.server.gateway.access.admission import Admission
from sojourn.engine.server.gateway.moderation.moderation import (
    Moderation,
    check_input,
    moderate_outputs,
    profile_of,
)
from sojourn.engine.server.gateway.usage.usage_log import UsageLog
from sojourn.engine.server.intake.arrival import Arrival
from sojourn.engine.server.models.registry import Models
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.prompts import list_prompts
from sojourn.engine.server.openai.protocol import GenerationRequest, trace_attributes
from sojourn.engine.server.openai.structured_output import output_grammar
from sojourn.engine.server.openai.submission import sampling_params, sequences_of


class Step(Protocol):
    async def __call__(self, arrival: Arrival) -> None: ...


class EnterGate:
    """Asks for a place under the limits of the tenant, before the body is read. Raises Rejection 429."""

    def __init__(self, access: Access):
        self._access = access

    async def __call__(self, arrival: Arrival) -> None:
        arrival.admission = Admission(self._access, arrival.request, arrival.caller)
        await arrival.admission.begin()


class FindRoom:
    """Refuses a call for which the core has no room. It stands at three places: before the body is read, before a
    prompt is encoded, since a call without a chance should cost neither, and before the core gets the call, since
    others came meanwhile. Raises Rejection 429 and 503, and ApiError 400 for more sequences than a call may have."""

    def __init__(self, models: Models):
        self._models = models

    async def __call__(self, arrival: Arrival) -> None:
        model = arrival.model or self._models.only_hot
        if model is not None:
            model.admit(arrival.num_prompts, arrival.choices)


class ReadBody:
    """Reads and checks the body. A slow upload is the client's time."""

    def __init__(self, bodies: BodyReader):
        self._bodies = bodies

    async def __call__(self, arrival: Arrival) -> None:
        arrival.body = await self._bodies.parse(arrival.endpoint.body, arrival.request)
        arrival.caller.arrived_ns = arrival.request.state.arrived_ns


class PassGate:
    """Waits for the place, once the body is here. Raises Rejection 429, and ClientDisconnect."""

    async def __call__(self, arrival: Arrival) -> None:
        await arrival.admission.wait()


class FindModel:
    """Finds the tenant, the model and the adapter that the body names. Raises ApiError 404, 403 and 400."""

    def __init__(self, models: Models):
        self._models = models

    async def __call__(self, arrival: Arrival) -> None:
        caller, body = arrival.caller, arrival.body
        if not arrival.request.state.tenant.key_id:  # with a key the key alone says whose call it is
            caller.tenant = caller.tenant or body.tenant[:128]
        served = self._models.find(body.served_model)
        if served is None:
            caller.adapter = self._models.find_adapter(body.served_model)
            served = self._models.first
        arrival.admission.check(body)
        arrival.served = served


class UseModel:
    """Uses the model until the call is answered, or in the core. Where the call `computes` it waits until the core is
    up. Raises Rejection 429 where too many calls wait, ApiError 503 where the model cannot be used."""

    def __init__(self, models: Models, *, computes: bool):
        self._models, self._computes = models, computes

    async def __call__(self, arrival: Arrival) -> None:
        arrival.model = await self._models.use(arrival.served, arrival.request, arrival.caller, computes=self._computes)
        if isinstance(arrival.body, GenerationRequest):
            arrival.body.take_defaults(arrival.model.defaults)


class ReadPrompts:
    """Turns the body of another API into the chat that it stands for, and lists the prompts of a completion."""

    async def __call__(self, arrival: Arrival) -> None:
        if arrival.endpoint.as_chat is None:
            arrival.generation = arrival.body
        else:
            arrival.generation = await arrival.endpoint.as_chat(arrival)
            arrival.generation.take_defaults(arrival.model.defaults)
        arrival.limits = arrival.model.limits()
        if not isinstance(arrival.generation, ChatRequest):
            arrival.inputs = list_prompts(arrival.generation.prompt, arrival.limits)


class Encode:
    """Template and tokenizer: the ids of the prompts, and how the output of a chat is read."""

    async def __call__(self, arrival: Arrival) -> None:
        model, body = arrival.model, arrival.generation
        if isinstance(body, ChatRequest):
            prompt, arrival.plan = await model.encode_chat(body, arrival.limits)
            arrival.prompts = [prompt]
        else:
            arrival.prompts = await model.encoder.encode(
                arrival.inputs, arrival.limits, add_special_tokens=body.add_special_tokens, param="prompt"
            )
        arrival.caller.encoding_ns = sum(prompt.encoding_ns for prompt in arrival.prompts)


class CheckGrammar:
    """The grammar that the output follows, which a worker has found to be compilable."""

    async def __call__(self, arrival: Arrival) -> None:
        model = arrival.model
        wanted = output_grammar(arrival.generation, arrival.plan, model.tokenizer.added_tokens)
        if wanted is not None:
            arrival.grammar, param = wanted
            if arrival.grammar.head:  # alone first: then an error tells places in the client's own text
                await model.grammars.check(msgspec.structs.replace(arrival.grammar, head=""), param)
            await model.grammars.check(arrival.grammar, param)


class BoundOutputs:
    """How many tokens each output may have, by the body, the model and the tenant's tier, and what other servers have
    to do with them."""

    async def __call__(self, arrival: Arrival) -> None:
        body, limits = arrival.generation, arrival.limits
        bounds = [limits.output_tokens(prompt, body.output_limit, body.prompt_field) for prompt in arrival.prompts]
        bounds = arrival.output_tokens = arrival.admission.bound_outputs(bounds, body.output_limit)
        if body.min_tokens > min(bounds):
            message = f"`min_tokens`={body.min_tokens} is more than the output may have, {min(bounds)} tokens"
            raise invalid("min_tokens", message)
        arrival.transfer = arrival.model.transfers.of_call(body, arrival.prompts, bounds)


class ReserveTokens:
    """Books the tokens that the call may use, or waits for them. Raises what Admission.reserve raises."""

    async def __call__(self, arrival: Arrival) -> None:
        body = arrival.generation
        input_tokens = sum(len(prompt.token_ids) for prompt in arrival.prompts)
        await arrival.admission.reserve(input_tokens, arrival.output_tokens, body.choices, body.output_limit)


class Moderate:
    """Checks what the model would see. Raises ApiError 400 for content that is blocked, 503 without a verdict."""

    def __init__(self, moderation: Moderation | None):
        self._moderation = moderation

    async def __call__(self, arrival: Arrival) -> None:
        profile = arrival.profile = profile_of(self._moderation, arrival.admission.tenant)
        if profile is not None:
            body = arrival.generation
            messages = body.messages if isinstance(body, ChatRequest) else None
            await check_input(
                profile, arrival.caller, arrival.prompts, arrival.model.tokenizer, body.prompt_field, messages
            )


class ChooseSampling:
    """How tokens are drawn. Raises ApiError 400 for ids that the model does not have."""

    async def __call__(self, arrival: Arrival) -> None:
        body, model = arrival.generation, arrival.model
        seed = model.draw_seed() if body.seed is None else body.seed
        arrival.params = sampling_params(body, model.tokenizer, seed, arrival.grammar)


class Submit:
    """Hands the sequences to the core: the choices of each prompt, in that order. Usage has the call before the core.
    Nothing waits between the last FindRoom and the core."""

    def __init__(self, usage: UsageLog | None):
        self._usage = usage

    async def __call__(self, arrival: Arrival) -> None:
        body, caller, model = arrival.generation, arrival.caller, arrival.model
        shown = arrival.plan.shown_token_ids(model.tokenizer.added_tokens)
        sequences = sequences_of(
            body, caller, arrival.prompts, arrival.output_tokens, arrival.params, model.tokenizer, shown,
            arrival.transfer,
        )  # fmt: skip
        if arrival.profile is not None:
            moderate_outputs(arrival.profile, sequences)
        call = arrival.call = Call(model.core, caller, sequences)
        caller.attributes = trace_attributes(body)
        if self._usage is not None:
            self._usage.begin(call)
        for sequence in sequences:
            model.core.submit(sequence)
