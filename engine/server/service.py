"""One served model: its tokenizer, template, core and telemetry, and a call from the body to the response."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, get_args

import msgspec
from fastapi import Request
from starlette.responses import Response

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.sampling import Grammar
from sojourn.engine.server.body.reader import BodyReader
from sojourn.engine.server.call_response import CallResponse
from sojourn.engine.server.core.call import Call, Caller
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.errors import ApiError, Rejection, invalid
from sojourn.engine.server.fleet.kv_event_publisher import KVEventPublisher
from sojourn.engine.server.gateway.access.access import Access
from sojourn.engine.server.gateway.moderation.moderation import Moderation, check_input, moderate_outputs
from sojourn.engine.server.gateway.moderation.profile import Profile
from sojourn.engine.server.gateway.usage.usage_log import UsageLog
from sojourn.engine.server.grammar.checks import GrammarChecks
from sojourn.engine.server.http.connections import Connections
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.chat_serializer import ChatSerializer
from sojourn.engine.server.openai.completion_serializer import CompletionSerializer
from sojourn.engine.server.openai.kv_transfer import checked_transfer
from sojourn.engine.server.openai.prompts import ModelLimits, Prompt, PromptEncoder, listed_prompts
from sojourn.engine.server.openai.protocol import MAX_SEQUENCES, CompletionRequest, GenerationRequest, trace_attributes
from sojourn.engine.server.openai.reasoning import PLAIN, TurnPlan, asked_variables, effort_variables
from sojourn.engine.server.openai.responses_request import RESPONSES_PARAMS, ResponsesRequest
from sojourn.engine.server.openai.responses_serializer import ResponsesSerializer
from sojourn.engine.server.openai.serializer import Serializer
from sojourn.engine.server.openai.structured_output import output_grammar
from sojourn.engine.server.openai.submission import sampling_params, sequences_of
from sojourn.engine.server.openai.tools import ChatTool, ToolChoice, ToolPlan, plan_tools
from sojourn.engine.server.telemetry.full import Telemetry
from sojourn.engine.server.telemetry.off import NoTelemetry
from sojourn.engine.techniques.lora.served import ServedAdapters
from sojourn.engine.token.generation_config import sampling_defaults
from sojourn.engine.token.text.reasoning import chosen_format
from sojourn.engine.token.text.template import ChatTemplate
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.interop.exported.spans import parent_of
from sojourn.metrics.records import RequestRecord

log = logging.getLogger(__name__)
# From clients: addresses, and the paths of the operator's files.
HIDDEN_SETTINGS = {"host", "port", "otlp_endpoint", "kv_events", "kv_events_replay"} | {
    name for name, field in EngineConfig.model_fields.items() if Path in get_args(field.annotation)
}
SHOWN_MODELS = 20  # names in the sentence about one that does not exist
FEW_ITEMS = 200  # of an input: checked in 2 ms
OnEnd = Callable[[Caller, int, str | None, RequestRecord | None], None]  # as `Service.ended`


class Service:
    """One served model, from a checked body to the response that follows it.

    A further model of a front shares with the `first` one what is of the front: access, bodies, connections, moderation
    and the calls without an end. Its core is started when it is wanted."""

    def __init__(self, config: EngineConfig, first: "Service | None" = None):
        folder = model_folder(config.model)
        self.config = config
        self.name = config.served_model_name or folder.name
        self.tokenizer = Tokenizer(folder)
        self.telemetry = Telemetry(config) if config.telemetry == "full" else NoTelemetry(config)
        self.encoder = PromptEncoder(self.tokenizer, ChatTemplate(folder))
        self.reasoning_format = chosen_format(config.reasoning_format, self.encoder.template.reasoning_format)
        self.defaults = sampling_defaults(folder, config.generation_config)
        self.adapters = ServedAdapters(config, self.name)
        self.first = first
        self.models: Any = None  # of the first one: engine.server.models.registry.Models
        self.kv_events = None if config.kv_events is None else KVEventPublisher(config)
        self.core = CoreClient(config, self.telemetry, self.kv_events, None if first is None else first.core.spare)
        self.grammar_checks = GrammarChecks(folder)
        self._watches: list[asyncio.Task] = []
        if first is None:
            self.access = Access(config, self.telemetry.exporter)
            self.moderation = None if config.moderation is None else Moderation(config.moderation)
            self.bodies, self.connections = BodyReader(config), Connections(config)
            self._open: set[str] = set()  # ids of the calls without an end
        else:
            self.core.state = "cold"
            self.access, self.moderation, self._open = first.access, first.moderation, first._open
            self.bodies, self.connections = first.bodies, first.connections
        self.started = int(time.time())
        self._unseeded = 0
        self.usage = UsageLog(config, self.name) if config.usage_dir is not None else None
        self.telemetry.usage = self.usage
        self.on_end: list[OnEnd] = [self.usage.ended] if self.usage is not None else []  # beside the telemetry

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        """Answers POST /v1/completions. Raises ApiError before the first byte."""
        limits = self.limits()
        prompts = listed_prompts(body.prompt, limits)
        self.admit(len(prompts), body.choices)  # spares the server to encode a prompt that has no chance
        grammar = await self.grammar(body)
        add_special_tokens = body.add_special_tokens
        encoded = await self.encoder.encode(prompts, limits, add_special_tokens=add_special_tokens, param="prompt")
        call = await self.start(request, body, encoded, limits, body.max_tokens, "prompt", grammar=grammar)
        serializer = CompletionSerializer(call, body, self.repeated_fields(call, "cmpl"), self.tokenizer)
        return self.follow(call, serializer, stream=body.stream)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        """Answers POST /v1/chat/completions. Raises ApiError before the first byte."""
        call, plan = await self.start_chat(request, body)
        serializer = ChatSerializer(call, body, self.repeated_fields(call, "chatcmpl"), self.tokenizer, plan)
        return self.follow(call, serializer, stream=body.stream)

    async def respond(self, request: Request, body: ResponsesRequest) -> Response:
        """Answers POST /v1/responses. Raises ApiError before the first byte."""
        try:
            # Many items take long to check, and a thread gives way to the streams.
            is_long = isinstance(body.input, list) and len(body.input) > FEW_ITEMS
            chat = await asyncio.to_thread(body.as_chat) if is_long else body.as_chat()
            call, plan = await self.start_chat(request, chat)
        except ApiError as error:
            for name, shown in RESPONSES_PARAMS.items():
                error.message = error.message.replace(f"`{name}`", f"`{shown}`")
            error.param = RESPONSES_PARAMS.get(error.param, error.param)
            raise
        block_size = self.config.block_size if self.config.prefix_caching else 0
        serializer = ResponsesSerializer(
            call, body, self.called_name(call.caller), self.tokenizer.vocabulary, plan, block_size
        )
        return self.follow(call, serializer, stream=body.stream)

    async def start_chat(self, request: Request, body: ChatRequest) -> tuple[Call, TurnPlan]:
        """Renders a checked chat and hands it to the core."""
        self.admit(1, body.choices)
        limits = self.limits()
        prompt, plan = await self.encode_chat(body, limits)
        grammar = await self.grammar(body, plan)
        max_tokens = body.max_completion_tokens or body.max_tokens
        call = await self.start(request, body, [prompt], limits, max_tokens, "messages", plan, grammar)
        return call, plan

    async def encode_chat(self, body: ChatRequest, limits: ModelLimits) -> tuple[Prompt, TurnPlan]:
        """The prompt of a checked chat, and how its output is read. Raises ApiError 400."""
        template, reasoning = self.encoder.template, self.reasoning_format
        tools = self.plan_tools(body.tools, body.tool_choice, parallel=body.parallel_tool_calls)
        variables = effort_variables(body.reasoning_effort, template, reasons=reasoning is not None)
        asked = asked_variables(body.chat_template_kwargs, template, reasons=reasoning is not None)
        body.chat_template_kwargs = variables | asked
        prompt = await self.encoder.encode_chat(
            body.messages,
            body,
            limits,
            tools=tools and tools.template_value,
            add_special_tokens=body.add_special_tokens,
        )
        if reasoning is None:
            return prompt, TurnPlan(tools)
        continues = body.continue_final_message
        end = body.messages[-1].text if continues else prompt.text
        return prompt, TurnPlan(tools, reasoning.after(end, continues=continues))

    async def grammar(self, body: GenerationRequest, plan: TurnPlan = PLAIN) -> Grammar | None:
        """The grammar of the output, which a worker has found to be compilable. Raises ApiError."""
        wanted = output_grammar(body, plan, self.tokenizer.added_tokens)
        if wanted is None:
            return None
        grammar, param = wanted
        if grammar.head:  # alone first: then an error tells places in the client's own text
            await self.grammar_checks.check(msgspec.structs.replace(grammar, head=""), param)
        await self.grammar_checks.check(grammar, param)
        return grammar

    def plan_tools(self, tools: list[ChatTool], choice: ToolChoice | None, *, parallel: bool) -> ToolPlan | None:
        """How prompt and output carry the tools of a body. Raises ApiError 400 where the model's format cannot."""
        return plan_tools(
            tools,
            choice,
            parallel=parallel,
            template=self.encoder.template,
            tool_format=self.config.tool_format,
            added_tokens=self.tokenizer.added_tokens,
        )

    def check_model(self, name: str | None) -> AdapterReference | None:
        """The adapter of that name; None for the model itself. Raises ApiError 404."""
        if name is None or name == self.name:
            return None
        if (adapter := self.adapters.find(name)) is not None:
            return adapter
        names = [*(model.name for model in self.models.all), *self.adapters.names]
        served = ", ".join(f"`{each}`" for each in names[:SHOWN_MODELS])
        message = f"the model `{name[:100]}` does not exist; this server has {served}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def cards(self) -> list[dict[str, Any]]:
        """The models and adapters, as GET /v1/models shows them."""
        models = [model.card() for model in self.models.all]
        return [*models, *(self.adapters.card(name) for name in self.adapters.names)]

    def called_name(self, caller: Caller) -> str:
        """Of the model, or of the adapter that the caller named."""
        return self.name if caller.adapter is None else caller.adapter.name

    def admit(self, num_prompts: int, choices: int) -> None:
        """Raises ApiError unless the core is up and has room for all sequences of a call; 400 where it never will."""
        wanted, limit = num_prompts * choices, min(MAX_SEQUENCES, self.config.max_waiting + self.config.max_num_seqs)
        if wanted > limit:
            message = f"{num_prompts} prompts × {choices} choices are {wanted} sequences, but a call may have {limit}"
            raise invalid("n" if choices > 1 else "prompt", message)
        self.core.admit(wanted)

    async def start(
        self,
        request: Request,
        body: GenerationRequest,
        prompts: list[Prompt],
        limits: ModelLimits,
        max_tokens: int | None,
        param: str,
        plan: TurnPlan = PLAIN,
        grammar: Grammar | None = None,
    ) -> Call:
        """Hands the sequences of a checked body to the core: `body.choices` of each prompt, in that order.

        `max_tokens` is for each of them; None is what fits. `param` names the field that holds the prompts.
        Raises ApiError 400 for what the model cannot do and for content that moderation blocks, and what
        Admission.reserve raises.
        """
        caller = request.state.caller
        output_tokens = [limits.output_tokens(prompt, max_tokens, param) for prompt in prompts]
        output_tokens = caller.admission.bounded(output_tokens, max_tokens)
        if body.min_tokens > min(output_tokens):
            message = f"`min_tokens`={body.min_tokens} is more than the output may have, {min(output_tokens)} tokens"
            raise invalid("min_tokens", message)
        transfer = checked_transfer(body, self.config.kv_role, prompts, output_tokens)
        caller.encoding_ns = sum(prompt.encoding_ns for prompt in prompts)
        input_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        await caller.admission.reserve(input_tokens, output_tokens, body.choices, max_tokens)
        profile = self.profile_of(caller)
        if profile is not None:
            messages = body.messages if isinstance(body, ChatRequest) else None
            await check_input(profile, caller, prompts, self.tokenizer, param, messages)
        seed = body.seed
        if seed is None:
            self._unseeded += 1
            seed = self.config.seed + self._unseeded
        params = sampling_params(body, self.tokenizer, seed, grammar)
        self.admit(len(prompts), body.choices)  # again: meanwhile others came
        shown = plan.shown_token_ids(self.tokenizer.added_tokens)
        sequences = sequences_of(body, caller, prompts, output_tokens, params, self.tokenizer, shown, transfer)
        if profile is not None:
            moderate_outputs(profile, sequences)
        call = Call(self.core, caller, sequences)
        caller.attributes = trace_attributes(body, max_tokens)
        if self.usage is not None:
            self.usage.begin(call)
        for sequence in sequences:
            self.core.submit(sequence)
        return call

    def profile_of(self, caller: Caller) -> Profile | None:
        """The moderation profile of a call; None where its content is not checked. Raises Rejection 503 without it."""
        name = caller.admission.tenant.tier.moderation
        if name is not None and (self.moderation is None or name not in self.moderation.profiles):
            message = (
                f"this server has no moderation profile {name!r}, which the tenant's tier needs; tell its operator"
            )
            raise Rejection(503, message, code="moderation_unavailable", retry_after_seconds=60)
        return None if self.moderation is None else self.moderation.profile(name)

    def follow(self, call: Call, serializer: Serializer, *, stream: bool) -> Response:
        """The response that follows a call until its record is there."""
        before_last = None if self.usage is None else partial(self.usage.answered, call)
        return CallResponse(call, serializer, partial(self.ended, call.caller), before_last, stream=stream)

    def ended(self, caller: Caller, status: int, code: str | None = None, record: RequestRecord | None = None) -> None:
        """Takes the end of a call of an endpoint: each call, however it ends, comes here exactly once.

        `status` and `code` are those of the error where it failed behind the first byte, too: (499, "cancelled") where
        the client left, (500, "server_fault") where the server failed on it. `record` is None if the core never got it.
        """
        self._open.remove(caller.request_id)
        if caller.admission is not None:
            caller.admission.end(record)
        if record is not None:
            self.telemetry.request(record, caller.attributes)
            self._record_with_the_first(record)
        for notify in self.on_end:
            try:
                notify(caller, status, code, record)
            except Exception:  # the others must hear of it, too
                log.exception("the end of request %s was not taken by %r", caller.request_id, notify)

    def usage_watches(self) -> list[Coroutine]:
        """What goes on for as long as the server does, so that a kill loses little."""
        return [] if self.usage is None else [self.usage.run()]

    def watch(self) -> None:
        """Samples and folds for a further model, from its first core on."""
        if self.first is not None and not self._watches:
            self._watches = [asyncio.create_task(watch) for watch in self.telemetry.watches(self.core.pid)]

    async def stop(self) -> None:
        """Ends what a further model has beside its core."""
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        await self.grammar_checks.stop()
        self.close()

    def _record_with_the_first(self, record: RequestRecord) -> None:
        """A run holds the requests of all models in one table. Steps are counted by model."""
        if self.first is not None and (recorder := self.first.telemetry.recorder) is not None:
            recorder.append("requests", msgspec.structs.replace(record, first_step=None, last_step=None))

    def close(self) -> None:
        """Writes the rest of records and usage, and checks no more bodies. Raises nothing: `failure`."""
        if self.first is None:
            self.bodies.close()
        self.telemetry.close()
        if self.usage is not None:
            self.usage.close()
        if self.kv_events is not None:
            self.kv_events.close()

    @property
    def failure(self) -> str | None:
        """Once closed: what was lost of records and usage, as a sentence."""
        lost = [self.telemetry.failure, None if self.usage is None else self.usage.failure]
        return "; ".join(sentence for sentence in lost if sentence) or None

    def repeated_fields(self, call: Call, prefix: str) -> dict[str, Any]:
        """The fields that every chunk of a call repeats."""
        return {
            "id": f"{prefix}-{call.caller.request_id}",
            "created": int(time.time()),
            "model": self.called_name(call.caller),
            "system_fingerprint": self._fingerprint(),
        }

    def card(self) -> dict[str, Any]:
        """The model as GET /v1/models shows it, with the settings and facts of its engine once it is loaded."""
        card = {"id": self.name, "object": "model", "created": self.started, "owned_by": "sojourn"}
        ready = self.core.ready
        if ready is None:
            return card
        facts = msgspec.to_builtins(ready)
        for hidden in ("type", "shape", "memory", "startup"):
            facts.pop(hidden, None)
        facts |= {"memory_bytes": ready.memory.parts, "sampling_defaults": self.defaults.shown}
        settings = self.config.model_dump(mode="json", exclude=HIDDEN_SETTINGS)
        return card | {"max_model_len": ready.max_model_len, "engine": settings | facts}

    def limits(self) -> ModelLimits:
        """Of the loaded model. Raises ApiError 503 before there is one."""
        ready = self.core.ready
        if ready is None:
            raise Rejection(503, "the engine is loading", code="engine_loading", retry_after_seconds=2)
        pool, usual = ready.pool_tokens, self.defaults.max_tokens
        if pool < ready.max_model_len:
            return ModelLimits(pool, f"the KV pool holds {pool} tokens", usual)
        return ModelLimits(ready.max_model_len, f"max_model_len is {ready.max_model_len} tokens", usual)

    def _fingerprint(self) -> str:
        """Changes with the model, its precision and the device: with all that changes the output of a seed."""
        ready = self.core.ready
        facts = (
            self.name, ready.num_parameters, ready.weight_bytes, ready.weights, ready.dtype, ready.device,
            ready.block_size, self.defaults.shown,
        )  # fmt: skip
        return f"fp_{hashlib.blake2b(repr(facts).encode(), digest_size=5).hexdigest()}"

    def caller(self, request: Request) -> Caller:
        """Who sends the call of which the head is here. Its end must reach `ended`."""
        request_id = request.state.request_id
        if request_id in self._open:  # two calls of a client may have one name
            request_id = request.state.request_id = f"{request_id}-{time.monotonic_ns()}"
        self._open.add(request_id)
        traceparent = request.headers.get("traceparent")
        session = request.headers.get("x-session-id", "")[:128]
        return Caller(
            request_id=request_id,
            arrived_ns=request.state.arrived_ns,
            tenant=request.state.tenant.name,
            klass=request.headers.get("x-sojourn-class", "")[:128],
            route=request.url.path,
            key_id=request.state.tenant.key_id or None,
            session=session or None,
            traceparent=traceparent if parent_of(traceparent) is not None else None,
        )
