"""POST /v1/completions, /v1/chat/completions and /v1/responses: calls that have come into the core, in their format."""

import asyncio

from starlette.responses import Response

from sojourn.engine.server.arrival import Arrival
from sojourn.engine.server.front import Front
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.chat_serializer import ChatSerializer
from sojourn.engine.server.openai.completion_serializer import CompletionSerializer
from sojourn.engine.server.openai.responses_serializer import ResponsesSerializer

FEW_ITEMS = 200  # of an input: checked in 2 ms


async def answer_completion(front: Front, arrival: Arrival) -> Response:
    model, call = arrival.model, arrival.call
    fields = model.base_fields(call, "cmpl")
    return front.follow(arrival, CompletionSerializer(call, arrival.body, fields, model.tokenizer))


async def answer_chat(front: Front, arrival: Arrival) -> Response:
    model, call = arrival.model, arrival.call
    fields = model.base_fields(call, "chatcmpl")
    return front.follow(arrival, ChatSerializer(call, arrival.body, fields, model.tokenizer, arrival.plan))


async def answer_response(front: Front, arrival: Arrival) -> Response:
    model, call = arrival.model, arrival.call
    block_size = model.config.block_size if model.config.prefix_caching else 0
    serializer = ResponsesSerializer(
        call, arrival.body, model.name_for(call.caller), model.tokenizer.vocabulary, arrival.plan, block_size
    )
    return front.follow(arrival, serializer)


async def response_as_chat(arrival: Arrival) -> ChatRequest:
    """Raises ApiError 400. Many items take long to check, and a thread gives way to the streams."""
    body = arrival.body
    is_long = isinstance(body.input, list) and len(body.input) > FEW_ITEMS
    return await asyncio.to_thread(body.as_chat) if is_long else body.as_chat()
