"""Where a decode server finds the KV blocks that a prefill server computes: what `kv_transfer_params` say."""

import msgspec


class KVSource(msgspec.Struct, frozen=True):
    """The blocks of one prompt, in its order, in slots of the prefill server's host memory.

    Either the prompt is computed, and `slots` are held under a lease. Or both servers got the call at once: then
    `transfer_id` names the prompt, and the prefill server says which slots it may be read from as they fill.
    """

    engine_id: str  # of one life of one engine; with a transfer, what its /query answered
    host: str  # of the side channel; with a transfer, of the server that answers /query
    port: int
    lease_id: str = ""
    slots: list[int] = []  # of the prompt's full blocks, from the first on
    num_tokens: int = 0  # of the prompt
    transfer_id: str = ""


class KVAddress(msgspec.Struct, frozen=True):
    """Where decode servers find this life of an engine."""

    engine_id: str
    host: str  # of the side channel
    port: int
    model_id: str = ""  # of what it computes, the same in each life
