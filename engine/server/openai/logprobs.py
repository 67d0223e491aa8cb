"""Tokens and their log-probabilities in the shapes of the OpenAI API and of vLLM.

An output has one entry for each token that its usage counts: those that end it, or are cut off with a stop string, too.
"""

from collections.abc import Sequence as List
from typing import Any

from engine.sampling import TokenLogprobs
from engine.server.core.sequence import Entry, Sequence
from engine.server.openai.protocol import GenerationRequest
from engine.token.text.tokenizer import TextStream
from engine.token.text.vocabulary import Vocabulary

LEAST_LOGPROB = -9999.0  # what the API says of a token of no probability: JSON has no infinity


def extras(sequence: Sequence, entries: List[Entry], body: GenerationRequest) -> dict[str, Any]:
    """What vLLM says of a choice beyond the OpenAI API: what the client named that ended it, and its ids."""
    words: dict[str, Any] = {}
    if sequence.stop_reason is not None:
        words["stop_reason"] = sequence.stop_reason
    if body.return_token_ids:
        words["token_ids"] = [entry.token_id for entry in entries]
    return words


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(entries: List[Entry], num_top: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Chat's `logprobs`: each token with its bytes, because a text cannot show half a character."""

    def word(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = vocabulary.bytes_of(token_id)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(spelled)}

    content = []
    for entry in entries:
        booked = entry.logprobs
        top = [word(*alternative) for alternative in booked.top[:num_top]]
        content.append(word(booked.token_id, booked.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Completions' `logprobs`: four lists of the same length, grown position by position."""

    def __init__(self, num_top: int, vocabulary: Vocabulary):
        self._num_top = num_top
        self._vocabulary = vocabulary
        self.value: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add_prompt(self, token_ids: List[int], booked: List[TokenLogprobs], stream: TextStream) -> None:
        """An echoed prompt. Nothing precedes its first token, which has no log-probability."""
        offset = 0
        for position, token_id in enumerate(token_ids):
            self._add(token_id, booked[position - 1] if position else None, offset)
            offset += len(stream.push(token_id))

    def add_output(self, entries: List[Entry], echoed_characters: int) -> None:
        for entry in entries:
            self._add(entry.token_id, entry.logprobs, echoed_characters + entry.text_offset)

    def _add(self, token_id: int, booked: TokenLogprobs | None, offset: int) -> None:
        word, top = self._word(token_id), None
        if booked is not None:
            top = {self._word(other): finite(logprob) for other, logprob in booked.top[: self._num_top]}
            top.setdefault(word, finite(booked.logprob))
        self.value["tokens"].append(word)
        self.value["token_logprobs"].append(None if booked is None else finite(booked.logprob))
        self.value["top_logprobs"].append(top)
        self.value["text_offset"].append(offset)

    def _word(self, token_id: int) -> str:
        """A token's text; its bytes where they are no text, so that two such tokens keep different names."""
        spelled = self._vocabulary.bytes_of(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def prompt_words(booked: List[TokenLogprobs], num_top: int, vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: token id → log-probability, rank and text at each position; null at the first."""

    def word(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": vocabulary.text_of(token_id)}

    words: list[dict[str, Any] | None] = [None]
    for position in booked:
        shown = {str(position.token_id): word(position.token_id, position.logprob, position.rank)}
        for rank, (token_id, logprob) in enumerate(position.top[:num_top], 1):
            shown.setdefault(str(token_id), word(token_id, logprob, rank))
        words.append(shown)
    return words
