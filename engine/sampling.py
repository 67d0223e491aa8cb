"""How one request wants its tokens drawn."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling controls of a request, already checked at the edge.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep everything. With the same `seed` a request draws the same
    tokens alone or in any batch, and after a preemption.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = msgspec.field(default_factory=list)  # end of turn and end of text
