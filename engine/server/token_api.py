"""POST /tokenize and /detokenize: text → ids and back, by the front alone."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import JSONResponse, Response

from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.chat_request import DetokenizeRequest, TokenizeRequest
from sojourn.engine.server.openai.prompts import OFF_LOOP_CHARACTERS, checked_ids
from sojourn.engine.server.service import Service


async def tokenize(service: Service, request: Request, body: TokenizeRequest) -> Response:
    """Ids of a text, or of messages as the chat template renders them. Raises ApiError 400."""
    encoder, limits = service.encoder, service.limits()
    if body.messages is not None:
        plan = service.plan_tools(body.tools, "auto", parallel=True)
        tools, special = plan and plan.template_value, bool(body.add_special_tokens)
        prompt = await encoder.encode_chat(body.messages, body, limits, tools=tools, add_special_tokens=special)
    else:
        special = body.add_special_tokens is not False
        (prompt,) = await encoder.encode(
            [body.prompt], limits, add_special_tokens=special, param="prompt", allow_empty=True
        )
    ids = prompt.token_ids
    strings = None
    if body.return_token_strs:
        strings = await _off_loop(service.tokenizer.token_strings, ids)
    answer = {
        "tokens": ids,
        "token_strs": strings,
        "count": len(ids),
        "max_model_len": service.core.ready.max_model_len,
    }
    return Response(msgspec.json.encode(answer), media_type="application/json")  # ids by the 100,000


async def detokenize(service: Service, request: Request, body: DetokenizeRequest) -> Response:
    """The text of ids, special tokens included.

    Raises ApiError 400 for ids that the model does not have, and for more than max_model_len.
    """
    ready = service.core.ready
    if ready is not None and len(body.tokens) > ready.max_model_len:
        message = f"`tokens` has {len(body.tokens):,} ids, but max_model_len is {ready.max_model_len:,}; send fewer"
        raise invalid("tokens", message)
    ids = checked_ids(body.tokens, service.tokenizer.vocab_size, "tokens")
    text = await _off_loop(service.tokenizer.decode, ids, skip_special_tokens=False)
    return JSONResponse({"prompt": text})


async def _off_loop(compute: Callable, ids: list[int], **options: Any) -> Any:
    """In a thread where there are many ids."""
    if len(ids) < OFF_LOOP_CHARACTERS:
        return compute(ids, **options)
    return await asyncio.to_thread(compute, ids, **options)
