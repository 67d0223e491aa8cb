"""POST /tokenize and /detokenize: what the model reads, and what its ids say. The core has no part in it."""

import asyncio
from typing import Any

from engine.server.openai.chat_request import DetokenizeRequest, TokenizeRequest
from engine.server.openai.prompts import OFF_LOOP_CHARACTERS
from engine.server.service import Service


async def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """Ids of a text, or of messages as the chat template renders them. Raises ApiError 400."""
    encoder = service.encoder
    if body.messages is not None:
        plan = service.plan_tools(body.tools, "auto", parallel=True)
        prompt = await encoder.encode_chat(
            body.messages,
            body,
            tools=plan and plan.template_value,
            add_special_tokens=bool(body.add_special_tokens),
        )
    else:
        special = body.add_special_tokens is not False
        encoded = await encoder.encode([body.prompt], add_special_tokens=special, param="prompt", allow_empty=True)
        prompt = encoded[0]
    ids = prompt.token_ids
    return {
        "tokens": ids,
        "token_strs": service.tokenizer.token_strings(ids) if body.return_token_strs else None,
        "count": len(ids),
        "max_model_len": service.core.ready.max_model_len,
    }


async def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of ids, special tokens included. Raises ApiError 400 for ids that the model does not have."""
    ids = service.encoder.checked_ids(body.tokens, "tokens")
    if len(ids) < OFF_LOOP_CHARACTERS:
        text = service.tokenizer.decode(ids, skip_special_tokens=False)
    else:
        text = await asyncio.to_thread(service.tokenizer.decode, ids, skip_special_tokens=False)
    return {"prompt": text}
