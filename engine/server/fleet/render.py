"""POST /v1/completions/render, and the like of chats and responses: the token ids that the engine would compute.

A router asks for them to know which blocks a prompt will have. Nothing is computed and no place in the queue is taken.
The answers have the fields of vLLM's renderer that a router reads.
"""

from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.prompts import Prompt, listed_prompts
from sojourn.engine.server.openai.protocol import CompletionRequest, GenerationRequest
from sojourn.engine.server.openai.responses_request import ResponsesRequest
from sojourn.engine.server.service import Service


async def completion(service: Service, request: Request, body: CompletionRequest) -> Response:
    """One rendered request for each prompt, in a list. Raises ApiError 400 as /v1/completions does."""
    limits = service.limits()
    prompts = listed_prompts(body.prompt, limits)
    encoded = await service.encoder.encode(prompts, limits, add_special_tokens=body.add_special_tokens, param="prompt")
    budgets = [limits.output_tokens(prompt, body.max_tokens, "prompt") for prompt in encoded]
    return _json([
        _rendered(service, request, body, index, prompt, most)
        for index, (prompt, most) in enumerate(zip(encoded, budgets, strict=True))
    ])  # fmt: skip


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """The rendered request. Raises ApiError 400 as /v1/chat/completions does."""
    limits = service.limits()
    prompt, _ = await service.encode_chat(body, limits)
    most = limits.output_tokens(prompt, body.max_completion_tokens or body.max_tokens, "messages")
    return _json(_rendered(service, request, body, 0, prompt, most))


async def respond(service: Service, request: Request, body: ResponsesRequest) -> Response:
    """The rendered request of a body of /v1/responses. Raises ApiError 400 as that does."""
    return await chat(service, request, body.as_chat())


def _rendered(
    service: Service, request: Request, body: GenerationRequest, index: int, prompt: Prompt, max_tokens: int
) -> dict[str, Any]:
    caller = request.state.caller
    return {
        "request_id": f"{caller.request_id}#{index}" if index else caller.request_id,
        "token_ids": prompt.token_ids,
        "sampling_params": {
            "max_tokens": max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "seed": body.seed,
            "n": body.n,
        },
        "model": service.called_name(caller),
        "stream": body.stream,
        "cache_salt": body.cache_salt or None,
        "priority": body.priority,
    }


def _json(answer: Any) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
