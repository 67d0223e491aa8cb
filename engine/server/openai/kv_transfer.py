"""`kv_transfer_params`: how a proxy tells a prefill server and a decode server about each other.

The fields are those of two connectors of vLLM, as its proxies, vllm-router and llm-d's sidecar send them. A prefill
call has `do_remote_decode` and `max_tokens` 1. With NixlConnector the object of its answer goes to the decode server as
it is. With MooncakeConnector both calls have one `transfer_id`, and may be sent at once; the decode call names the
address at which the prefill server answers /query.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field

from sojourn.engine.kv_source import KVSource
from sojourn.engine.server.errors import invalid
from sojourn.engine.techniques.handover.settings import gives, takes

NAME = "kv_transfer_params"
HANDED_OVER = ("remote_engine_id", "remote_request_id", "remote_block_ids", "remote_host", "remote_port")
FOLLOWED = ("remote_engine_id", "transfer_id", "remote_bootstrap_addr")
_ADDRESS = re.compile(r"http://(\[[0-9A-Fa-f:]{2,45}\]|[A-Za-z0-9._-]{1,253}):([0-9]{1,5})/?")
MOST_BLOCKS = 1 << 18
BlockId = Annotated[int, Field(ge=0, lt=2**31)]
BlockIds = Annotated[list[BlockId], Field(max_length=MOST_BLOCKS, fail_fast=True)]


class KVTransferParams(BaseModel):
    """The object. Proxies send null for what only the answer of a prefill server has."""

    model_config = ConfigDict(extra="forbid", strict=True)

    do_remote_decode: bool = Field(False, description="compute the prompt, and hold its KV for a decode server")
    do_remote_prefill: bool = Field(False, description="read the prompt's KV from the prefill server named here")
    remote_engine_id: str | None = Field(None, max_length=200, description="of the prefill server's engine")
    remote_request_id: str | None = Field(None, max_length=400, description="names the lease")
    remote_block_ids: BlockIds | Annotated[list[BlockIds], Field(max_length=1)] | None = Field(
        None, description="where the prompt's full blocks are, in its order"
    )
    remote_host: str | None = Field(None, max_length=253, description="of the prefill server's side channel")
    remote_port: int | None = Field(None, ge=1, le=65535, description="... and its port")
    transfer_id: str | None = Field(
        None, min_length=1, max_length=200, description="one name in both calls, which may then be sent at once"
    )
    remote_bootstrap_addr: str | None = Field(
        None, max_length=300, description="http://HOST:PORT, where the prefill server answers GET /query"
    )
    tp_size: int | None = Field(None, description="only 1: the prefill server computes with one process")
    remote_num_tokens: int | None = Field(None, ge=0, lt=2**31, description="tokens of the prompt, as a check")

    @property
    def block_ids(self) -> list[int]:
        """vLLM has a list for each of its cache groups; here there is one."""
        ids: list[Any] = self.remote_block_ids or []
        return ids[0] if ids and isinstance(ids[0], list) else ids


class Transfer(NamedTuple):
    """What a call wants of other servers."""

    hands_over: bool = False  # a decode server will read the KV of its prompt
    transfer_id: str = ""  # ... and may follow it by this name
    source: KVSource | None = None  # a prefill server has it


class Tokens(Protocol):
    """A prompt, as far as it matters here."""

    @property
    def token_ids(self) -> list[int]: ...


class Transferable(Protocol):
    """A body, as far as it matters here."""

    kv_transfer_params: KVTransferParams | None
    stream: bool

    @property
    def choices(self) -> int: ...


def checked_transfer(
    body: Transferable, role: str | None, prompts: Sequence[Tokens], output_tokens: Sequence[int]
) -> Transfer:
    """What a call wants of other servers; `output_tokens` are the bounds of its prompts.

    Raises ApiError 400 with a sentence for what a server with this `role` cannot do.
    """
    params = body.kv_transfer_params
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return Transfer()
    if params.do_remote_decode and params.do_remote_prefill:
        raise invalid(NAME, f"`{NAME}` asks for a remote prefill and for a remote decode; leave one of them out")
    allowed, wanted = (gives, "prefill") if params.do_remote_decode else (takes, "decode")
    if not allowed(role):
        this = "has no part in KV transfers" if role is None else f"has kv_role={role}"
        message = f"`{NAME}` is for a {wanted} server, and this one {this}; start it with kv_role={wanted} or both"
        raise invalid(NAME, message, "unsupported_parameter")
    if len(prompts) > 1 or body.choices > 1:
        raise invalid(NAME, f"`{NAME}` is for one prompt with one choice; send each in a call of its own")
    if params.do_remote_prefill:
        return Transfer(source=_source(params, len(prompts[0].token_ids)))
    if body.stream or list(output_tokens) != [1]:
        message = "computes the prompt only; send `max_tokens` 1, and no `stream`"
        raise invalid(NAME, f"`{NAME}.do_remote_decode` {message}")
    return Transfer(hands_over=True, transfer_id=params.transfer_id or "")


def handoff_of(source: KVSource | None) -> dict[str, Any]:
    """The field of a prefill server's answer; nothing where no prompt was handed over."""
    if source is None:
        return {}
    params = KVTransferParams(
        do_remote_prefill=True, remote_engine_id=source.engine_id, remote_request_id=source.lease_id,
        remote_block_ids=[source.slots], remote_host=source.host, remote_port=source.port, tp_size=1,
        remote_num_tokens=source.num_tokens,
    )  # fmt: skip
    return {NAME: params.model_dump()}


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
