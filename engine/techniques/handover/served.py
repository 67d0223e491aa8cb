"""What the front of a prefill or decode server does: it reads `kv_transfer_params`, and answers GET /query."""

import re
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI

from sojourn.engine.config import EngineConfig
from sojourn.engine.kv_source import KVSource
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.kv_transfer import (
    NAME,
    NO_TRANSFER,
    KVTransferParams,
    Transfer,
    refuse_role,
    sort_transfer,
)
from sojourn.engine.server.openai.prompts import Prompt
from sojourn.engine.server.openai.protocol import GenerationRequest
from sojourn.engine.settings.handover import gives, takes

HANDED_OVER = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")
FOLLOWED = ("remote_engine_id", "transfer_id", "remote_bootstrap_addr")
_ADDRESS = re.compile(r"http://(\[[0-9A-Fa-f:]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})/?")


class ServedTransfers:
    """The transfers that calls may ask for under the role of this server."""

    def __init__(self, config: EngineConfig):
        self._role = config.kv_role

    def of_call(self, body: GenerationRequest, prompts: Sequence[Prompt], output_tokens: Sequence[int]) -> Transfer:
        """What a call wants of other servers; `output_tokens` are the bounds of its prompts.

        Raises ApiError 400 with a sentence for what a server of this role cannot do.
        """
        params = body.kv_transfer_params
        wanted = sort_transfer(params)
        if wanted is None:
            return NO_TRANSFER
        if not (gives if wanted == "prefill" else takes)(self._role):
            raise refuse_role(wanted, self._role)
        if len(prompts) > 1 or body.choices > 1:
            raise invalid(NAME, f"`{NAME}` is for one prompt with one choice; send each in a call of its own")
        if wanted == "decode":
            return Transfer(source=_source(params, len(prompts[0].token_ids)))
        if body.stream or list(output_tokens) != [1]:
            message = "computes the prompt only; send `max_tokens` 1, and no `stream`"
            raise invalid(NAME, f"`{NAME}.do_remote_decode` {message}")
        return Transfer(hands_over=True, transfer_id=params.transfer_id or "")


def add_routes(app: FastAPI, config: EngineConfig, core: CoreClient) -> None:
    """GET /query of a server that gives KV."""
    if gives(config.kv_role):

        @app.get("/query")
        async def query() -> dict[str, Any]:
            """As the bootstrap server of vLLM's MooncakeConnector: by data-parallel rank the engine's id, and by
            tensor-parallel and pipeline rank where decode servers ask. Raises Rejection 503 until the model is loaded.
            """
            address = core.require_ready().kv_address
            assert address is not None, "a prefill server has a side channel"
            host = f"[{address.host}]" if ":" in address.host else address.host
            return {"0": {"engine_id": address.model_id, "worker_addr": {"0": {"0": f"tcp://{host}:{address.port}"}}}}


def _source(params: KVTransferParams, prompt_tokens: int) -> KVSource:
    is_followed = params.remote_bootstrap_addr is not None
    missing = [name for name in (FOLLOWED if is_followed else HANDED_OVER) if getattr(params, name) is None]
    if missing:
        message = (
            f"`{NAME}.{missing[0]}` is required with `do_remote_prefill`; pass on what the prefill server answered, or "
            "send both calls with one `transfer_id`, and this one with `remote_bootstrap_addr` and `remote_engine_id`"
        )
        raise invalid(NAME, message, "missing_required_parameter")
    if params.tp_size not in (None, 1):
        raise invalid(NAME, f"`{NAME}.tp_size`={params.tp_size} is not valid: this server reads KV of one process only")
    if params.remote_num_tokens not in (None, prompt_tokens):
        message = f"the prefill server computed {params.remote_num_tokens} tokens, and this prompt has {prompt_tokens}"
        raise invalid(NAME, f"`{NAME}` is of another prompt: {message}; send both servers the same body")
    if is_followed:
        host, port = _address(params.remote_bootstrap_addr)
        return KVSource(params.remote_engine_id, host, port, num_tokens=prompt_tokens, transfer_id=params.transfer_id)
    return KVSource(
        params.remote_engine_id, params.remote_host, params.remote_port, params.remote_request_id, params.block_ids,
        prompt_tokens,
    )  # fmt: skip


def _address(url: str) -> tuple[str, int]:
    found = _ADDRESS.fullmatch(url)
    if found is None or not 0 < int(found[2]) < 65536:
        message = f"`{NAME}.remote_bootstrap_addr`={url[:80]!r} is not valid; give the address as http://HOST:PORT"
        raise invalid(NAME, message)
    return found[1].strip("[]"), int(found[2])
