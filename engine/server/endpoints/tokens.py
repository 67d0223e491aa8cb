"""POST /tokenize and /detokenize: text → ids and back, by the front alone."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import JSONResponse, Response

from sojourn.engine.server.arrival import Arrival
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.front import Front
from sojourn.engine.server.openai.prompts import OFF_LOOP_CHARACTERS, check_ids


async def tokenize(front: Front, arrival: Arrival) -> Response:
    """Ids of a text, or of messages as the chat template renders them. Raises ApiError 400."""
    model, body = arrival.model, arrival.body
    encoder, limits = model.encoder, model.limits()
    if body.messages is not None:
        plan = model.plan_tools(body.tools, "auto", parallel=True)
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
        strings = await _off_loop(model.tokenizer.token_strings, ids)
    max_model_len = model.core.require_ready().max_model_len
    answer = {"tokens": ids, "token_strs": strings, "count": len(ids), "max_model_len": max_model_len}
    return Response(msgspec.json.encode(answer), media_type="application/json")  # ids by the 100,000


async def detokenize(front: Front, arrival: Arrival) -> Response:
    """The text of ids, special tokens included.

    Raises ApiError 400 for ids that the model does not have, and for more than max_model_len.
    """
    tokens, ready, tokenizer = arrival.body.tokens, arrival.model.core.ready, arrival.model.tokenizer
    if ready is not None and len(tokens) > ready.max_model_len:
        message = f"`tokens` has {len(tokens):,} ids, but max_model_len is {ready.max_model_len:,}; send fewer"
        raise invalid("tokens", message)
    ids = check_ids(tokens, tokenizer.vocab_size, "tokens")
    return JSONResponse({"prompt": await _off_loop(tokenizer.decode, ids, skip_special_tokens=False)})


async def _off_loop(compute: Callable, ids: list[int], **options: Any) -> Any:
    """In a thread where there are many ids."""
    if len(ids) < OFF_LOOP_CHARACTERS:
        return compute(ids, **options)
    return await asyncio.to_thread(compute, ids, **options)
