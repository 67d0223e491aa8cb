"""POST /v1/messages and /v1/messages/count_tokens."""

from fastapi import Request
from starlette.responses import JSONResponse, Response

from sojourn.engine.server.anthropic.messages_serializer import MessagesSerializer
from sojourn.engine.server.arrival import Arrival
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.front import Front
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.reasoning import switch_variables

VERSIONS = ("2023-06-01", "2026-10-21")  # of the header anthropic-version; what is here is the same in both


async def answer_message(front: Front, arrival: Arrival) -> Response:
    model, call = arrival.model, arrival.call
    return front.follow(arrival, MessagesSerializer(call, arrival.body, model.name_for(call.caller), arrival.plan))


async def count_tokens(front: Front, arrival: Arrival) -> Response:
    """The tokens of the prompt that the same message would have."""
    return JSONResponse({"input_tokens": len(arrival.prompts[0].token_ids)})


async def message_as_chat(arrival: Arrival) -> ChatRequest:
    """Raises ApiError 400."""
    _check_version(arrival.request)
    body, model = arrival.body, arrival.model
    chat = body.as_chat()
    if body.thinking is not None and body.thinking.type != "disabled":
        if model.reasoning_format is None:
            raise invalid("thinking", "`thinking` is not supported, because this model does not reason; leave it out")
        chat.chat_template_kwargs = switch_variables(model.encoder.template, on=True)
    return chat


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        message = f"the header `anthropic-version` is {version[:80]!r}, but this server speaks {' and '.join(VERSIONS)}"
        raise invalid("anthropic-version", message)
