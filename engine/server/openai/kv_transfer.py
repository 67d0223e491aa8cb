"""`kv_transfer_params`: how a proxy tells a prefill server and a decode server about each other.

The fields are those of two connectors of vLLM, as its proxies, vllm-router and llm-d's sidecar send them. A prefill
call has `do_remote_decode` and `max_tokens` 1. With NixlConnector the object of its answer goes to the decode server as
it is. With MooncakeConnector both calls have one `transfer_id`, and may be sent at once; the decode call names the
address at which the prefill server answers /query.
"""

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from sojourn.engine.kv_source import KVSource
from sojourn.engine.server.errors import ApiError, invalid

NAME = "kv_transfer_params"
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
    transfer_id: str = ""  # a decode server may follow its prompt by this name
    source: KVSource | None = None  # a prefill server has it


NO_TRANSFER = Transfer()


def sort_transfer(params: KVTransferParams | None) -> Literal["prefill", "decode"] | None:
    """The kind of server that a call needs; None where it asks for no transfer. Raises ApiError 400 for both."""
    if params is None or not (params.do_remote_decode or params.do_remote_prefill):
        return None
    if params.do_remote_decode and params.do_remote_prefill:
        raise invalid(NAME, f"`{NAME}` asks for a remote prefill and for a remote decode; leave one of them out")
    return "prefill" if params.do_remote_decode else "decode"


def refuse_role(wanted: str, role: str | None) -> ApiError:
    """The refusal of a call that is for another kind of server."""
    this = "has no part in KV transfers" if role is None else f"has kv_role={role}"
    message = f"`{NAME}` is for a {wanted} server, and this one {this}; start it with kv_role={wanted} or both"
    return invalid(NAME, message, "unsupported_parameter")


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
