"""The corridor that every call of an endpoint walks: its steps, and their one order.

A step writes its part of the Arrival, or raises the ApiError that refuses the call. One that owns state is an object.
"""

from collections.abc import Awaitable, Callable

import msgspec

from sojourn.engine.server.arrival import Arrival
from sojourn.engine.server.body.reader import BodyReader
from sojourn.engine.server.core.call import Call
from sojourn.engine.server.errors import ApiError, invalid
from sojourn.engine.server.gateway.access.access import Access
from sojourn.engine.server.gateway.access.admission import Admission
from sojourn.engine.server.gateway.moderation.moderation import Moderation, check_input, moderate_outputs, profile_of
from sojourn.engine.server.gateway.usage.usage_log import UsageLog
from sojourn.engine.server.models.registry import Models
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.prompts import list_prompts
from sojourn.engine.server.openai.protocol import GenerationRequest, trace_attributes
from sojourn.engine.server.openai.structured_output import output_grammar
from sojourn.engine.server.submission import sampling_params, sequences_of

Step = Callable[[Arrival], Awaitable[None]]


class Intake:
    """The steps by how far a call comes in: to its checked body, to its encoded prompt, or into the core."""

    def __init__(
        self, access: Access, bodies: BodyReader, models: Models, moderation: Moderation | None, usage: UsageLog | None
    ):
        enter, read, find, room = EnterGate(access), ReadBody(bodies), FindModel(models), FindRoom(models)
        to_body = (enter, read, pass_gate, find, UseModel(models, computes=False))
        self._steps: dict[str, tuple[Step, ...]] = {
            "body": to_body,
            "prompt": (*to_body, read_prompts, encode),
            "core": (
                enter, room, read, pass_gate, find, UseModel(models, computes=True), read_prompts, room, encode,
                find_grammar, bound_outputs, reserve_tokens, Moderate(moderation), choose_sampling, room, Submit(usage),
            ),
        }  # fmt: skip

    async def walk(self, arrival: Arrival) -> None:
        """Raises the ApiError of the step that refuses the call, in the words of its API, and ClientDisconnect."""
        try:
            for step in self._steps[arrival.endpoint.reach]:
                await step(arrival)
        except ApiError as error:
            arrival.rename(error)
            raise


class EnterGate:
    """Asks for a place under the limits of the tenant, before the body is read."""

    def __init__(self, access: Access):
        self._access = access

    async def __call__(self, arrival: Arrival) -> None:
        arrival.admission = Admission(self._access, arrival.request, arrival.caller)
        await arrival.admission.begin()


class FindRoom:
    """Refuses a call for which the core has no room. It stands at three places: a call without a chance should cost
    neither its body nor its encoding, and before the core others may have come meanwhile."""

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


async def pass_gate(arrival: Arrival) -> None:
    """Waits for the place, once the body is here."""
    await arrival.admission.wait()


class FindModel:
    """Finds the tenant, the model and the adapter that the body names."""

    def __init__(self, models: Models):
        self._models = models

    async def __call__(self, arrival: Arrival) -> None:
        caller, body = arrival.caller, arrival.body
        if not arrival.request.state.tenant.key_id:  # with a key the key alone says whose call it is
            caller.tenant = caller.tenant or body.tenant[:128]
        arrival.served = self._models.find(body.served_model)
        if arrival.served is None:
            arrival.served, caller.adapter = self._models.first, self._models.find_adapter(body.served_model)
        arrival.admission.check(body)


class UseModel:
    """Uses the model until the call is answered, or in the core. Where the call `computes`, it waits for the core."""

    def __init__(self, models: Models, *, computes: bool):
        self._models, self._computes = models, computes

    async def __call__(self, arrival: Arrival) -> None:
        arrival.model = await self._models.use(arrival.served, arrival.request, arrival.caller, computes=self._computes)
        if isinstance(arrival.body, GenerationRequest):
            arrival.body.take_defaults(arrival.model.defaults)


async def read_prompts(arrival: Arrival) -> None:
    """Turns the body of another API into the chat that it stands for, and lists the prompts of a completion."""
    if arrival.endpoint.as_chat is None:
        arrival.generation = arrival.body
    else:
        arrival.generation = await arrival.endpoint.as_chat(arrival)
        arrival.generation.take_defaults(arrival.model.defaults)
    arrival.limits = arrival.model.limits()
    if not isinstance(arrival.generation, ChatRequest):
        arrival.inputs = list_prompts(arrival.generation.prompt, arrival.limits)


async def encode(arrival: Arrival) -> None:
    """Template and tokenizer: the ids of the prompts, and how the output of a chat is read."""
    model, body = arrival.model, arrival.generation
    if isinstance(body, ChatRequest):
        prompt, arrival.plan = await model.encode_chat(body, arrival.limits)
        arrival.prompts = [prompt]
    else:
        arrival.prompts = await model.encoder.encode(
            arrival.inputs, arrival.limits, add_special_tokens=body.add_special_tokens, param="prompt"
        )
    arrival.caller.encoding_ns = sum(prompt.encoding_ns for prompt in arrival.prompts)


async def find_grammar(arrival: Arrival) -> None:
    """The grammar that the output follows, which a worker has found to be compilable."""
    model = arrival.model
    wanted = output_grammar(arrival.generation, arrival.plan, model.tokenizer.added_tokens)
    if wanted is not None:
        arrival.grammar, param = wanted
        if arrival.grammar.head:  # alone first: then an error tells places in the client's own text
            await model.grammars.check(msgspec.structs.replace(arrival.grammar, head=""), param)
        await model.grammars.check(arrival.grammar, param)


async def bound_outputs(arrival: Arrival) -> None:
    """How many tokens each output may have, and what other servers have to do with them."""
    body, limits = arrival.generation, arrival.limits
    bounds = [limits.output_tokens(prompt, body.output_limit, body.prompt_field) for prompt in arrival.prompts]
    bounds = arrival.output_tokens = arrival.admission.bound_outputs(bounds, body.output_limit)
    if body.min_tokens > min(bounds):
        message = f"`min_tokens`={body.min_tokens} is more than the output may have, {min(bounds)} tokens"
        raise invalid("min_tokens", message)
    arrival.transfer = arrival.model.transfers.of_call(body, arrival.prompts, bounds)


async def reserve_tokens(arrival: Arrival) -> None:
    """Books the tokens that the call may use, or waits for them."""
    body, input_tokens = arrival.generation, sum(len(prompt.token_ids) for prompt in arrival.prompts)
    await arrival.admission.reserve(input_tokens, arrival.output_tokens, body.choices, body.output_limit)


class Moderate:
    """Checks what the model would see."""

    def __init__(self, moderation: Moderation | None):
        self._moderation = moderation

    async def __call__(self, arrival: Arrival) -> None:
        profile = arrival.profile = profile_of(self._moderation, arrival.admission.tenant)
        if profile is not None:
            body, tokenizer = arrival.generation, arrival.model.tokenizer
            messages = body.messages if isinstance(body, ChatRequest) else None
            await check_input(profile, arrival.caller, arrival.prompts, tokenizer, body.prompt_field, messages)


async def choose_sampling(arrival: Arrival) -> None:
    body, model = arrival.generation, arrival.model
    seed = model.draw_seed() if body.seed is None else body.seed
    arrival.params = sampling_params(body, model.tokenizer, seed, arrival.grammar)


class Submit:
    """Hands the sequences to the core: the choices of each prompt, in that order. The usage log has the call before the
    core. Nothing waits between the last FindRoom and the core."""

    def __init__(self, usage: UsageLog | None):
        self._usage = usage

    async def __call__(self, arrival: Arrival) -> None:
        model = arrival.model
        sequences = sequences_of(arrival)
        if arrival.profile is not None:
            moderate_outputs(arrival.profile, sequences)
        call = arrival.call = Call(model.core, arrival.caller, sequences)
        arrival.caller.attributes = trace_attributes(arrival.generation)
        if self._usage is not None:
            self._usage.begin(call)
        for sequence in sequences:
            model.core.submit(sequence)
