"""The sampling parameters of a request, and the log-probabilities that it may get."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

LEAST_TOP_P = 1e-9  # for a top_p of 0: every set holds at least the best token
GREEDY_BELOW = 1e-5  # temperatures under it would only lose digits on the way to the same token


class Grammar(msgspec.Struct, frozen=True):
    """The form that an output must have. `source` is JSON for a schema, else the expression itself.

    `head` is Lark of a rule of that name: what stands before, as a model's reasoning does.
    """

    kind: Literal["json_schema", "regex", "lark"]
    source: str
    head: str = ""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling controls of a request, already checked at the edge. The defaults change nothing.

    Applied in this order: penalties, bias and masks → temperature (greedy below GREEDY_BELOW) → truncation → softmax →
    sample. With the same `seed` a request gets the same tokens alone or in any batch, and after a preemption.
    """

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0  # 0 keeps all
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    top_n_sigma: Annotated[float, Meta(ge=0, le=1e6)] = 0.0  # 0 keeps all
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0  # of tokens in prompt and output
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # of tokens in the output, by count
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0  # of tokens in the output, once
    lz_penalty: Annotated[float, Meta(ge=0, le=1e6)] = 0.0  # strength, of tokens that continue a repetition
    logit_bias: dict[int, Annotated[float, Meta(ge=-1e6, le=1e6)]] = {}
    bad_words: list[list[int]] = []  # sequences that the output never holds
    allowed_token_ids: list[int] = []  # empty allows all
    min_tokens: Annotated[int, Meta(ge=0)] = 0  # before them no stop token is sampled
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []  # end of turn and end of text
    grammar: Grammar | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None  # of each sampled token and of this many most probable ones
    prompt_logprobs: Annotated[int, Meta(ge=0)] | None = None  # of each prompt token but the first, likewise

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.repetition_penalty, self.frequency_penalty, self.presence_penalty


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural log-probabilities at one position under the model's own softmax, before any sampling control."""

    token_id: int  # the token that stands there
    logprob: float
    rank: int  # 1 is the most probable
    top: list[tuple[int, float]]  # the most probable tokens, best first


def choice_seed(seed: int, index: int) -> int:
    """The seed of output `index` of a prompt that is completed several times; the first has the seed itself."""
    return (seed ^ (index * 0x9E3779B97F4A7C15)) % 2**63


def ended_by(params: SamplingParams, own_end_ids: Sequence[int]) -> SamplingParams:
    """With the end tokens of the model beside those of the request. `ignore_eos` ignores the model's only."""
    own = () if params.ignore_eos else own_end_ids
    ends = list(dict.fromkeys((*own, *params.stop_token_ids)))
    return msgspec.structs.replace(
        params, ignore_eos=params.ignore_eos and not params.stop_token_ids, stop_token_ids=ends
    )


def reads_output(params: SamplingParams) -> bool:
    """Whether the host must know every token before the next one can be sampled."""
    return params.grammar is not None or params.lz_penalty > 0 or any(len(word) > 1 for word in params.bad_words)


def keeps_rows(params: SamplingParams) -> bool:
    """Whether the request needs rows of the sampler's device tables."""
    return params.penalties != (1, 0, 0) or bool(params.logit_bias or params.allowed_token_ids or params.bad_words)


def contradiction(params: SamplingParams) -> str | None:
    """Why a request with a grammar cannot be served, as a sentence; None where it can."""
    if params.grammar is not None and params.ignore_eos:
        return "`ignore_eos` cannot be combined with structured output, which ends where its grammar ends; leave it out"
    return None


def unfit(params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> str | None:
    """The field that a model of so many tokens cannot honour, as a sentence; None where it can honour all."""
    ids = {
        "prompt": prompt,
        "logit_bias": params.logit_bias,
        "allowed_token_ids": params.allowed_token_ids,
        "stop_token_ids": params.stop_token_ids,
        "bad_words": [token for word in params.bad_words for token in word],
    }
    for name, tokens in ids.items():
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            bad = next(token for token in tokens if not 0 <= token < vocab_size)
            return f"`{name}` holds token id {bad}, but ids of this model are 0 to {vocab_size - 1}"
    if not all(params.bad_words):
        return "`bad_words` holds a word without tokens; leave it out"
    for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if wanted is not None and wanted > vocab_size:
            return f"`{name}`={wanted} is more than the model has tokens, {vocab_size}"
    return None
