"""POST /v1/completions/render, and the like of chats and responses: the token ids that the engine would compute.

A router asks for them to know which blocks a prompt will have. Nothing is computed and no place in the queue is taken.
The answers have the fields of vLLM's renderer that a router reads.
"""

from typing import Any

import msgspec
from starlette.responses import Response

from sojourn.engine.server.arrival import Arrival
from sojourn.engine.server.front import Front


async def render_completion(front: Front, arrival: Arrival) -> Response:
    """One rendered request for each prompt, in a list. Raises ApiError 400 as /v1/completions does."""
    return _json([_request(arrival, index) for index in range(len(arrival.prompts))])


async def render_chat(front: Front, arrival: Arrival) -> Response:
    """The rendered request of a chat, or of a body that stands for one. Raises ApiError 400 as its endpoint does."""
    return _json(_request(arrival, 0))


def _request(arrival: Arrival, index: int) -> dict[str, Any]:
    caller, body, prompt = arrival.caller, arrival.generation, arrival.prompts[index]
    return {
        "request_id": f"{caller.request_id}#{index}" if index else caller.request_id,
        "token_ids": prompt.token_ids,
        "sampling_params": {
            "max_tokens": arrival.limits.output_tokens(prompt, body.output_limit, body.prompt_field),
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "seed": body.seed,
            "n": body.n,
        },
        "model": arrival.model.name_for(caller),
        "stream": body.stream,
        "cache_salt": body.cache_salt or None,
        "priority": body.priority,
    }


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")  # ids by the 100,000
