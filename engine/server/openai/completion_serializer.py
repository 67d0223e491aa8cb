"""A call in the words of POST /v1/completions."""

from typing import Any

from engine.server.core.call import Call
from engine.server.core.sequence import Entry, Piece, Sequence
from engine.server.errors import ApiError
from engine.server.openai.logprobs import CompletionLogprobs, extras, prompt_words
from engine.server.openai.protocol import CompletionRequest, StreamOptions
from engine.server.openai.serializer import Chunks, failure_event, timings_of, to_json, usage_of
from engine.token.text.tokenizer import Tokenizer


class CompletionSerializer:
    """Text completions: choice c of prompt p has the index p × n + c."""

    def __init__(self, call: Call, body: CompletionRequest, base: dict[str, Any], tokenizer: Tokenizer):
        self._call = call
        self._body = body
        self._base = base | {"object": "text_completion"}
        self._tokenizer = tokenizer
        options = (body.stream and body.stream_options) or StreamOptions()
        self._chunks = Chunks(call, self._base, options)
        self._begun: set[int] = set()  # indexes whose prompt was echoed
        self._texts: dict[Sequence, list[str]] = {sequence: [] for sequence in call.sequences}
        self._entries: dict[Sequence, list[Entry]] = {sequence: [] for sequence in call.sequences}
        self._echoes: dict[int, str] = {}  # prompts as they are shown
        self._last: Sequence | None = None  # that ended last

    def opening(self) -> bytes:
        return b""

    def events(self, piece: Piece) -> bytes:
        index = self._index(piece.sequence)
        choice = self._choice(index, piece.sequence, piece.text, piece.entries, first=index not in self._begun)
        self._begun.add(index)
        self._last = piece.sequence
        return self._chunks.of(choice)

    def closing(self) -> bytes:
        return self._chunks.end(self._last)

    def failure(self, error: ApiError) -> bytes:
        return failure_event(error)

    def add(self, piece: Piece) -> None:
        self._texts[piece.sequence].append(piece.text)
        self._entries[piece.sequence] += piece.entries
        self._last = piece.sequence

    def body(self) -> bytes:
        choices = []
        for index, sequence in enumerate(self._chosen()):
            text = "".join(self._texts[sequence])
            choice = self._choice(index, sequence, text, self._entries[sequence], first=True)
            if self._body.prompt_logprobs is not None:
                booked = self._call.leader(sequence).work.prompt_logprobs or []
                choice["prompt_logprobs"] = prompt_words(booked, self._body.prompt_logprobs, self._tokenizer.vocabulary)
            choices.append(choice)
        whole = self._base | {"choices": choices, "usage": usage_of(self._call)}
        return to_json(whole | timings_of(self._call, self._last))

    def _index(self, sequence: Sequence) -> int:
        return sequence.prompt_index * self._body.n + sequence.choice

    def _chosen(self) -> list[Sequence]:
        """The n of each prompt that are shown: all, or of best_of those of highest mean log-probability."""
        n, drawn = self._body.n, self._body.choices
        if n == drawn:
            return self._call.sequences

        def mean_logprob(sequence: Sequence) -> float:
            values = [entry.logprobs.logprob for entry in self._entries[sequence]]
            return sum(values) / len(values) if values else 0.0

        chosen = []
        for begin in range(0, len(self._call.sequences), drawn):
            candidates = self._call.sequences[begin : begin + drawn]
            chosen += sorted(candidates, key=mean_logprob, reverse=True)[:n]
        return chosen

    def _choice(
        self, index: int, sequence: Sequence, text: str, entries: list[Entry], *, first: bool
    ) -> dict[str, Any]:
        body, logprobs = self._body, None
        echoed = self._echoed(sequence) if body.echo and (first or body.logprobs is not None) else ""
        if body.logprobs is not None:
            words = CompletionLogprobs(body.logprobs, self._tokenizer.vocabulary)
            if first and body.echo:
                booked = self._call.leader(sequence).work.prompt_logprobs or []
                stream = self._tokenizer.stream(skip_special_tokens=body.skip_special_tokens)
                words.add_prompt(sequence.prompt.token_ids, booked, stream)
            words.add_output(entries, len(echoed))
            logprobs = words.value
        choice = {
            "index": index,
            "text": echoed + text if first else text,
            "logprobs": logprobs,
            "finish_reason": sequence.finish_reason,
        }
        if first and body.return_token_ids:
            choice["prompt_token_ids"] = sequence.prompt.token_ids
        if entries or sequence.finish_reason is not None:
            choice |= extras(sequence, entries, body)
        return choice

    def _echoed(self, sequence: Sequence) -> str:
        index = sequence.prompt_index
        if index not in self._echoes:
            text, ids = sequence.prompt.text, sequence.prompt.token_ids
            if text is None:
                text = self._tokenizer.decode(ids, skip_special_tokens=self._body.skip_special_tokens)
            self._echoes[index] = text
        return self._echoes[index]
