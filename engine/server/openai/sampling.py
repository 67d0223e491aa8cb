"""A checked body → the sampling parameters of its sequences, and how their ids become text."""

from engine.sampling import Grammar, SamplingParams
from engine.server.core.sequence import Reading
from engine.server.errors import invalid
from engine.server.openai.prompts import checked_ids
from engine.server.openai.protocol import CompletionRequest, GenerationRequest
from engine.token.text.tokenizer import Tokenizer

LEAST_TOP_P = 1e-9  # for a top_p of 0: every set holds at least the best token


def sampling_params(
    body: GenerationRequest, tokenizer: Tokenizer, seed: int, grammar: Grammar | None = None
) -> SamplingParams:
    """The parameters that all sequences of a call share. Each sequence has a `max_tokens` and a seed of its own.

    Raises ApiError 400 for ids that the model does not have.
    """
    vocab_size = tokenizer.vocab_size
    own_end = [] if body.ignore_eos else tokenizer.stop_token_ids
    stop_token_ids = [*own_end, *checked_ids(body.stop_token_ids, vocab_size, "stop_token_ids")]
    num_logprobs = body.num_logprobs
    if num_logprobs is None and isinstance(body, CompletionRequest) and body.choices > body.n:
        num_logprobs = 0  # best_of chooses by them
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
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        bad_words=_bad_words(body.bad_words, tokenizer),
        allowed_token_ids=checked_ids(sorted(set(body.allowed_token_ids)), vocab_size, "allowed_token_ids"),
        min_tokens=body.min_tokens,
        seed=seed % 2**63,
        ignore_eos=body.ignore_eos and not body.stop_token_ids,
        stop_token_ids=stop_token_ids,
        logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


def reading_of(body: GenerationRequest, params: SamplingParams, *, unread: bool = False) -> Reading:
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


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise invalid("logit_bias", f"`logit_bias` has the key {name[:80]!r}, which is not a token id")
    ids = checked_ids([int(name) for name in biases], vocab_size, "logit_bias")
    return dict(zip(ids, biases.values(), strict=True))


def _bad_words(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Two spellings of each word: at the beginning of a text, and after a blank."""
    sequences = []
    for word in words:
        for spelling in (word, " " + word.lstrip(" ")):
            ids = tokenizer.encode(spelling, add_special_tokens=False)
            checked_ids(ids, tokenizer.vocab_size, "bad_words")
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences
