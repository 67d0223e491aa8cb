"""Tokens and their log-probabilities in the shapes of the OpenAI API and of vLLM.

An output has one entry for each token that its usage counts, also for a token that ends it or is cut off with a stop
string.
"""

from typing import Any

from sojourn.engine.sampling import TokenLogprobs
from sojourn.engine.server.core.sequence import Entry
from sojourn.engine.token.text.assembler import TextAssembler
from sojourn.engine.token.text.stream import TextStream
from sojourn.engine.token.text.vocabulary import Vocabulary

LEAST_LOGPROB = -9999.0  # of a token of no probability: JSON has no infinity


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(entries: list[Entry], num_top: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """Chat's `logprobs`: each token with its bytes, because a text cannot show half a character."""

    def shown(token_id: int, logprob: float) -> dict[str, Any]:
        spelled = vocabulary.bytes_of(token_id)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(spelled)}

    content = []
    for entry in entries:
        logprobs = entry.logprobs
        top = [shown(*alternative) for alternative in logprobs.top[:num_top]]
        content.append(shown(logprobs.token_id, logprobs.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Completions' `logprobs`: four lists of the same length, grown position by position."""

    def __init__(self, num_top: int, vocabulary: Vocabulary):
        self._num_top = num_top
        self._vocabulary = vocabulary
        self.value: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def add_prompt(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None, stream: TextStream) -> None:
        """An echoed prompt. Its first token follows nothing, and has no log-probability."""
        text = TextAssembler(stream)
        for token_id in token_ids:
            text.push(token_id)
        for position, (token_id, offset) in enumerate(zip(token_ids, text.offsets, strict=True)):
            self._add(token_id, (logprobs or ())[position - 1] if position else None, offset)

    def add_output(self, entries: list[Entry], echoed_characters: int) -> None:
        for entry in entries:
            self._add(entry.token_id, entry.logprobs, echoed_characters + entry.text_offset)

    def _add(self, token_id: int, logprobs: TokenLogprobs | None, offset: int) -> None:
        token, logprob, top = self._name_of(token_id), None, None
        if logprobs is not None:
            logprob = finite(logprobs.logprob)
            top = {self._name_of(other): finite(value) for other, value in logprobs.top[: self._num_top]}
            top.setdefault(token, logprob)
        for name, value in (("tokens", token), ("token_logprobs", logprob), ("top_logprobs", top)):
            self.value[name].append(value)
        self.value["text_offset"].append(offset)

    def _name_of(self, token_id: int) -> str:
        """The text of a token, or its bytes where they are no text: so two such tokens have different names."""
        spelled = self._vocabulary.bytes_of(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def prompt_logprobs(
    positions: list[TokenLogprobs] | None, num_top: int, vocabulary: Vocabulary
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: token id → log-probability, rank and text at each position; null at the first."""

    def shown(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": vocabulary.text_of(token_id)}

    listed: list[dict[str, Any] | None] = [None]
    for position in positions or ():
        entry = {str(position.token_id): shown(position.token_id, position.logprob, position.rank)}
        for rank, (token_id, logprob) in enumerate(position.top[:num_top], 1):
            entry.setdefault(str(token_id), shown(token_id, logprob, rank))
        listed.append(entry)
    return listed
