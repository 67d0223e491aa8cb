"""POST /v1/messages and /v1/messages/count_tokens."""

from fastapi import Request
from starlette.responses import JSONResponse, Response

from sojourn.engine.server.anthropic.messages_request import MESSAGES_FIELDS, CountTokensRequest, MessagesRequest
from sojourn.engine.server.anthropic.messages_serializer import MessagesSerializer
from sojourn.engine.server.errors import ApiError, invalid
from sojourn.engine.server.openai.chat_request import ChatRequest
from sojourn.engine.server.openai.reasoning import switch_variables
from sojourn.engine.server.service import Service

VERSIONS = ("2023-06-01", "2026-10-21")  # of the header anthropic-version; what is here is the same in both


async def answer_message(service: Service, request: Request, body: MessagesRequest) -> Response:
    """Raises ApiError before the first byte."""
    _check_version(request)
    try:
        call, plan = await service.start_chat(request, _chat_of(service, body))
    except ApiError as error:
        raise _renamed(error) from None
    return service.follow(
        call, MessagesSerializer(call, body, service.called_name(call.caller), plan), stream=body.stream
    )


async def count_tokens(service: Service, request: Request, body: CountTokensRequest) -> Response:
    """The tokens of the prompt that the same message would have. Raises ApiError."""
    _check_version(request)
    try:
        prompt, _ = await service.encode_chat(_chat_of(service, body), service.limits())
    except ApiError as error:
        raise _renamed(error) from None
    return JSONResponse({"input_tokens": len(prompt.token_ids)})


def _chat_of(service: Service, body: CountTokensRequest) -> ChatRequest:
    chat = body.as_chat()
    chat.take_defaults(service.defaults)
    if body.thinking is not None and body.thinking.type != "disabled":
        if service.reasoning_format is None:
            raise invalid("thinking", "`thinking` is not supported, because this model does not reason; leave it out")
        chat.chat_template_kwargs = switch_variables(service.encoder.template, on=True)
    return chat


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        message = f"the header `anthropic-version` is {version[:80]!r}, but this server speaks {' and '.join(VERSIONS)}"
        raise invalid("anthropic-version", message)


def _renamed(error: ApiError) -> ApiError:
    """The error of a chat, in the words of a message."""
    for name, shown in MESSAGES_FIELDS.items():
        error.message = error.message.replace(f"`{name}`", f"`{shown}`")
    return error
