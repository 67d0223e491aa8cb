"""POST /tokenize and /detokenize: text → ids and back, by the front alone."""

import asyncio

from fastapi import Request
from starlette.responses import JSONResponse, Response

from engine.server.openai.chat_request import DetokenizeRequest, TokenizeRequest
from engine.server.openai.prompts import OFF_LOOP_CHARACTERS, checked_ids
from engine.server.service import Service


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
    answer = {
        "tokens": ids,
        "token_strs": service.tokenizer.token_strings(ids) if body.return_token_strs else None,
        "count": len(ids),
        "max_model_len": service.core.ready.max_model_len,
    }
    return JSONResponse(answer)


async def detokenize(service: Service, request: Request, body: DetokenizeRequest) -> Response:
    """The text of ids, special tokens included. Raises ApiError 400 for ids that the model does not have."""
    ids = checked_ids(body.tokens, service.tokenizer.vocab_size, "tokens")
    if len(ids) < OFF_LOOP_CHARACTERS:
        text = service.tokenizer.decode(ids, skip_special_tokens=False)
    else:
        text = await asyncio.to_thread(service.tokenizer.decode, ids, skip_special_tokens=False)
    return JSONResponse({"prompt": text})
