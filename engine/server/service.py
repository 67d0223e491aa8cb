"""What the routes share: the tokenizer, the template, the core and the telemetry of one model."""

import asyncio
import time
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.config import EngineConfig, model_folder
from engine.sampling import SamplingParams
from engine.server import protocol
from engine.server.core_client import CoreClient
from engine.server.errors import ApiError
from engine.server.generation import Generation, Origin, admit
from engine.server.responses import GenerationResponse, Shape
from engine.server.telemetry import Telemetry
from engine.token.template import ChatTemplate, TemplateError
from engine.token.tokenizer import Tokenizer

OFF_LOOP_CHARACTERS = 10_000  # longer prompts are tokenised in a thread, so that no other stream waits for them
GREEDY_BELOW = 1e-5  # temperatures under it would only lose digits on the way to the same token


class Service:
    """One served model, from a checked body to the response that follows it."""

    def __init__(self, config: EngineConfig):
        folder = model_folder(config.model)
        self.config = config
        self.name = config.served_model_name or folder.name
        self.tokenizer = Tokenizer(folder)
        self.template = ChatTemplate(folder)
        self.telemetry = telemetry = Telemetry(config)
        self.core = CoreClient(config, telemetry.ready, telemetry.outputs, telemetry.exporter.observe_core_restart)
        self.started = int(time.time())
        self._unseeded = 0

    async def complete(self, request: Request, body: protocol.CompletionRequest) -> Response:
        """Answers POST /v1/completions. Raises ApiError before the first byte."""
        self._admit()
        return self._respond(request, body, await self._prompt_ids(body.prompt))

    async def chat(self, request: Request, body: protocol.ChatRequest) -> Response:
        """Answers POST /v1/chat/completions. Raises ApiError before the first byte."""
        self._admit()
        return self._respond(request, body, await self.encode_chat(body.messages))

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.name:
            message = f"the model `{name[:100]}` does not exist; this server has `{self.name}`"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def encode(self, text: str, *, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Ids of a text. Refuses, before it does the work, a text that is too long for the model in any case."""
        least = len(text.encode()) // self.tokenizer.longest_token_bytes
        if least > self._capacity()[0]:
            raise self._too_long(f"at least {least:,}", param)
        if len(text) < OFF_LOOP_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: list[protocol.Message]) -> list[int]:
        values = [message.template_value() for message in messages]
        try:
            text = await asyncio.to_thread(self.template.render, values)
        except TemplateError as error:
            raise ApiError(400, str(error), param="messages") from None
        return await self.encode(text, add_special_tokens=False, param="messages")

    def _admit(self) -> None:
        try:
            admit(self.core, self.config.max_waiting)
        except ApiError as error:
            self.telemetry.exporter.observe_rejection(error.code)
            raise

    def _respond(self, request: Request, body: protocol.GenerationRequest, ids: list[int]) -> Response:
        max_tokens = self._max_tokens(body, ids)
        origin = self._origin(request, body.user)
        sampling = self._sampling(body, max_tokens)
        generation = Generation(self.core, self.tokenizer, origin, ids, sampling, body.stops, body.cache_salt)
        options = body.stream_options or protocol.StreamOptions()
        kind = "chat" if isinstance(body, protocol.ChatRequest) else "completion"
        return GenerationResponse(
            generation,
            Shape(kind, origin.request_id, self.name),
            self.telemetry.request,
            stream=body.stream,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage_stats,
        )

    async def _prompt_ids(self, prompt: Any) -> list[int]:
        """Ids of a completion's prompt, given as text or as ids. Raises ApiError 400."""
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            ids = await self.encode(prompt, add_special_tokens=True)
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            ids = self._checked_ids(prompt)
        else:
            listed = f"a list of {len(prompt)} things" if isinstance(prompt, list) else type(prompt).__name__
            message = f"`prompt` must be one text or one list of token ids, not {listed}; send one request for each"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        if not ids:
            raise ApiError(400, "`prompt` is empty; send at least one token", param="prompt", code="invalid_value")
        return ids

    def _checked_ids(self, ids: list[int]) -> list[int]:
        size = self.tokenizer.vocab_size
        bad = next((token for token in ids if not 0 <= token < size), None)
        if bad is not None:
            message = f"`prompt` holds token id {bad}, but ids of this model are 0 to {size - 1}"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return ids

    def _capacity(self) -> tuple[int, str]:
        """Tokens that one request may have, prompt and output, and the sentence that says why."""
        ready = self.core.ready
        if ready is None:
            raise ApiError(503, "the engine is loading", code="engine_loading", retry_after_seconds=2)
        pool = ready.num_kv_blocks * ready.block_size
        if pool < ready.max_model_len:
            return pool, f"the KV pool holds {pool} tokens"
        return ready.max_model_len, f"max_model_len is {ready.max_model_len} tokens"

    def _too_long(self, tokens: str, param: str) -> ApiError:
        self.telemetry.exporter.observe_rejection("context_length_exceeded")
        message = f"the prompt has {tokens} tokens, but {self._capacity()[1]}, output included; shorten the prompt"
        return ApiError(400, message, param=param, code="context_length_exceeded")

    def _max_tokens(self, body: protocol.GenerationRequest, ids: list[int]) -> int:
        """Output tokens that a request may have. Raises ApiError 400 for what can never fit."""
        capacity, limit = self._capacity()
        chat = isinstance(body, protocol.ChatRequest)
        if len(ids) >= capacity:
            raise self._too_long(str(len(ids)), "messages" if chat else "prompt")
        asked = body.max_tokens
        if chat:
            asked = body.max_completion_tokens or body.max_tokens or capacity - len(ids)
        if len(ids) + asked > capacity:
            self.telemetry.exporter.observe_rejection("context_length_exceeded")
            message = (
                f"the prompt has {len(ids)} tokens and max_tokens is {asked}, together {len(ids) + asked}, "
                f"but {limit}; shorten the prompt or ask for at most {capacity - len(ids)} tokens"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        return asked

    def _sampling(self, body: protocol.GenerationRequest, max_tokens: int) -> SamplingParams:
        seed = body.seed
        if seed is None:
            self._unseeded += 1
            seed = self.config.seed + self._unseeded
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=body.temperature if body.temperature >= GREEDY_BELOW else 0.0,
            top_k=max(0, body.top_k),
            top_p=body.top_p,
            seed=seed % 2**63,
            ignore_eos=body.ignore_eos,
            stop_token_ids=self.tokenizer.stop_token_ids,
        )

    def _origin(self, request: Request, user: str) -> Origin:
        request_id = request.state.request_id
        if request_id in self.core.works:  # a client that names two requests alike still gets both answers
            request_id = f"{request_id}-{time.monotonic_ns()}"
        return Origin(
            request_id=request_id,
            arrived_ns=request.state.arrived_ns,
            tenant=request.headers.get("x-sojourn-tenant", user)[:128],
            klass=request.headers.get("x-sojourn-class", "")[:128],
        )

    def card(self) -> dict[str, Any]:
        """The model as GET /v1/models shows it, with the settings and facts of its engine once it is loaded."""
        card = {"id": self.name, "object": "model", "created": self.started, "owned_by": "sojourn"}
        ready = self.core.ready
        if ready is None:
            return card
        facts = {name: getattr(ready, name) for name in ready.__struct_fields__ if name != "shape"}
        settings = self.config.model_dump(mode="json", exclude={"run_dir", "host", "port"})
        return card | {"max_model_len": ready.max_model_len, "engine": settings | facts}
