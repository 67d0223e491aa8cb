"""Where a decode server finds the KV blocks that a prefill server computed: what `kv_transfer_params` say."""

import msgspec


class KVSource(msgspec.Struct, frozen=True):
    """The blocks of one prompt, in its order, held under a lease in slots of the prefill server's host memory."""

    engine_id: str  # of one life of one engine
    lease_id: str
    slots: list[int]  # of the prompt's full blocks, from the first on
    host: str  # of the side channel
    port: int
    num_tokens: int = 0  # of the prompt
