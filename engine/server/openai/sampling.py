"""A checked body → how its sequences draw, and how their ids become text."""

from engine.sampling import SamplingParams
from engine.server.core.sequence import Reading
from engine.server.errors import ApiError
from engine.server.openai.prompts import PromptEncoder
from engine.server.openai.protocol import CompletionRequest, GenerationRequest

LEAST_TOP_P = 1e-9  # what a top_p of 0 means: every set holds at least the best token


def sampling(body: GenerationRequest, encoder: PromptEncoder, seed: int) -> SamplingParams:
    """What all sequences of a call share: `max_tokens` and the seeds of further choices are theirs.

    Raises ApiError 400 for ids that the model does not have.
    """
    own_end = [] if body.ignore_eos else encoder.tokenizer.stop_token_ids
    stop_token_ids = [*own_end, *encoder.checked_ids(body.stop_token_ids, "stop_token_ids")]
    num_logprobs = body.num_logprobs
    if num_logprobs is None and isinstance(body, CompletionRequest) and body.choices > body.n:
        num_logprobs = 0  # the best are chosen by them
    prompt_logprobs = body.prompt_logprobs
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return SamplingParams(
        max_tokens=1,
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p or LEAST_TOP_P,
        min_p=body.min_p,
        top_n_sigma=body.top_n_sigma,
        repetition_penalty=body.repetition_penalty,
        frequency_penalty=body.frequency_penalty,
        presence_penalty=body.presence_penalty,
        lz_penalty=body.lz_penalty,
        logit_bias=_logit_bias(body.logit_bias, encoder),
        bad_words=_bad_words(body.bad_words, encoder),
        allowed_token_ids=encoder.checked_ids(sorted(set(body.allowed_token_ids)), "allowed_token_ids"),
        min_tokens=body.min_tokens,
        seed=seed % 2**63,
        ignore_eos=body.ignore_eos and not body.stop_token_ids,
        stop_token_ids=stop_token_ids,
        logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def reading(body: GenerationRequest, params: SamplingParams, *, unread: bool = False) -> Reading:
    return Reading(
        stops=body.stops,
        stop_token_ids=frozenset(params.stop_token_ids),
        named_stop_token_ids=frozenset(body.stop_token_ids),
        show_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        min_tokens=body.min_tokens,
        entries=params.logprobs is not None or body.return_token_ids,
        unread=unread,
    )


def _logit_bias(biases: dict[str, float], encoder: PromptEncoder) -> dict[int, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            message = f"`logit_bias` has the key {name[:80]!r}, which is not a token id"
            raise ApiError(400, message, param="logit_bias", code="invalid_value")
    ids = encoder.checked_ids([int(name) for name in biases], "logit_bias")
    return dict(zip(ids, biases.values(), strict=True))


def _bad_words(words: list[str], encoder: PromptEncoder) -> list[list[int]]:
    """Both spellings of each word: as it begins a text, and as it follows a blank."""
    sequences = []
    for word in words:
        for spelling in (word, " " + word.lstrip(" ")):
            ids = encoder.checked_ids(encoder.tokenizer.encode(spelling, add_special_tokens=False), "bad_words")
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences
