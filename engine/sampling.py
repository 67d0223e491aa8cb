"""How one request wants its tokens drawn, and what it is told about them."""

from typing import Literal

import msgspec


class Grammar(msgspec.Struct, frozen=True):
    """What an output must look like. `source` is JSON for a schema, else the expression itself."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling controls of a request, already checked at the edge. The defaults change nothing.

    Applied in this order: penalties, bias and masks → temperature (0 is greedy) → truncation → softmax → draw. With the
    same `seed` a request draws the same tokens alone or in any batch, and after a preemption.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0  # 0 keeps all
    repetition_penalty: float = 1.0  # of tokens in prompt and output
    frequency_penalty: float = 0.0  # of tokens in the output, by count
    presence_penalty: float = 0.0  # ... once
    lz_penalty: float = 0.0  # strength, of tokens that continue a repetition
    logit_bias: dict[int, float] = {}
    bad_words: list[list[int]] = []  # sequences whose last token is never drawn after the others
    allowed_token_ids: list[int] = []  # empty allows all
    min_tokens: int = 0  # before them no stop token is drawn
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []  # end of turn and end of text
    grammar: Grammar | None = None
    logprobs: int | None = None  # of each drawn token and of this many most probable ones
    prompt_logprobs: int | None = None  # of each prompt token but the first, likewise


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one position under the model's own softmax, before any sampling control."""

    token_id: int  # the token that stands there
    logprob: float
    rank: int  # 1 is the most probable
    top: list[tuple[int, float]]  # the most probable tokens, best first
