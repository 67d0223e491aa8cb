"""A checked body → the sequences that the core gets: how they are sampled, and how their ids become text."""

import asyncio
import time

import msgspec

from sojourn.engine.messages import Submit
from sojourn.engine.sampling import LEAST_TOP_P, Grammar, SamplingParams, choice_seed, ended_by
from sojourn.engine.server.arrival import Arrival
from sojourn.engine.server.core.sequence import DecodeSpans, SequenceStream
from sojourn.engine.server.errors import invalid
from sojourn.engine.server.openai.prompts import check_ids
from sojourn.engine.server.openai.protocol import CompletionRequest, GenerationRequest
from sojourn.engine.token.text.assembler import assembler_of
from sojourn.engine.token.text.tokenizer import Tokenizer

# Fields of a body that are sampling parameters of the same name and meaning.
UNCHANGED = (
    "temperature", "min_p", "top_n_sigma", "repetition_penalty", "frequency_penalty", "presence_penalty", "lz_penalty",
    "min_tokens",
)  # fmt: skip


def sampling_params(
    body: GenerationRequest, tokenizer: Tokenizer, seed: int, grammar: Grammar | None = None
) -> SamplingParams:
    """The parameters that all sequences of a call share. Each sequence has a `max_tokens` and a seed of its own.

    Raises ApiError 400 for ids that the model does not have.
    """
    vocab_size = tokenizer.vocab_size
    num_logprobs = body.num_logprobs
    if num_logprobs is None and isinstance(body, CompletionRequest) and body.choices > body.n:
        num_logprobs = 0  # best_of chooses by them
    prompt_logprobs = body.prompt_logprobs
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    sampling = SamplingParams(
        **{name: getattr(body, name) for name in UNCHANGED},
        max_tokens=1,
        top_k=max(0, body.top_k),
        top_p=body.top_p or LEAST_TOP_P,
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        bad_words=_bad_words(body.bad_words, tokenizer),
        allowed_token_ids=check_ids(sorted(set(body.allowed_token_ids)), vocab_size, "allowed_token_ids"),
        seed=seed % 2**63,
        ignore_eos=body.ignore_eos,
        stop_token_ids=check_ids(body.stop_token_ids, vocab_size, "stop_token_ids"),
        logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )
    return ended_by(sampling, tokenizer.stop_token_ids)


def sequences_of(arrival: Arrival) -> list[SequenceStream]:
    """`choices` sequences of each prompt, in that order. The further choices of a prompt are forks of its first.

    The bound of a prompt's output may be 0, which discards the output.
    """
    body, caller, params = arrival.generation, arrival.caller, arrival.params
    transfer, tokenizer = arrival.transfer, arrival.model.tokenizer
    shown_token_ids = arrival.plan.shown_token_ids(tokenizer.added_tokens)  # where other special tokens have no text
    encoded_ns, updated, decode_spans = time.monotonic_ns(), asyncio.Event(), DecodeSpans()
    sequences: list[SequenceStream] = []
    for prompt_index, prompt in enumerate(arrival.prompts):
        max_tokens = arrival.output_tokens[prompt_index]
        for choice in range(body.choices):
            own_params = msgspec.structs.replace(
                params,
                max_tokens=max_tokens or 1,
                seed=choice_seed(params.seed, choice),
                prompt_logprobs=params.prompt_logprobs if choice == 0 else None,
            )
            request = Submit(
                # No client can name an id with a `#`: no other call has this id.
                request_id=f"{caller.request_id}#{len(sequences)}" if sequences else caller.request_id,
                prompt_token_ids=prompt.token_ids,
                sampling=own_params,
                encoded_ns=encoded_ns,
                cache_salt=body.cache_salt,
                tenant=caller.tenant,
                priority=caller.priority,
                weight=caller.weight,
                adapter=caller.adapter,
                hands_over=transfer.hands_over,
                transfer_id=transfer.transfer_id,
                kv_source=transfer.source,
                fork_of=sequences[-choice].request.request_id if choice else None,
            )
            text = assembler_of(
                tokenizer,
                prompt.token_ids,
                own_params,
                body.stops,
                show_stop=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens,
                shown_token_ids=shown_token_ids,
            )
            sequence = SequenceStream(
                request,
                text,
                updated,
                decode_spans,
                front=caller.front_times(encoded_ns),
                prompt_text=prompt.text,
                prompt_index=prompt_index,
                choice=choice,
                client_stop_ids=frozenset(body.stop_token_ids),
                needs_entries=params.logprobs is not None or body.return_token_ids,
                discards_output=max_tokens == 0,
            )
            sequences.append(sequence)
    return sequences


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    for name in biases:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise invalid("logit_bias", f"`logit_bias` has the key {name[:80]!r}, which is not a token id")
    ids = check_ids([int(name) for name in biases], vocab_size, "logit_bias")
    return dict(zip(ids, biases.values(), strict=True))


def _bad_words(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Two spellings of each word: at the beginning of a text, and after a blank."""
    sequences = []
    for word in words:
        for spelling in (word, " " + word.lstrip(" ")):
            ids = tokenizer.encode(spelling, add_special_tokens=False)
            check_ids(ids, tokenizer.vocab_size, "bad_words")
            if ids and ids not in sequences:
                sequences.append(ids)
    return sequences
