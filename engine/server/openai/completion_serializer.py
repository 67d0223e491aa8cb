"""A call in the format of POST /v1/completions."""

from typing import Any

from sojourn.engine.server.core.call import Call
from sojourn.engine.server.core.sequence import SequenceStream, TextPiece
from sojourn.engine.server.openai.kv_transfer import handoff_of
from sojourn.engine.server.openai.logprobs import CompletionLogprobs, prompt_logprobs
from sojourn.engine.server.openai.protocol import CompletionRequest
from sojourn.engine.server.openai.serializer import (
    NULL_FIELDS,
    Chunks,
    Serializer,
    timings_of,
    to_json,
    usage_of,
    vllm_fields,
    whole_outputs,
)
from sojourn.engine.token.text.tokenizer import Tokenizer


class CompletionSerializer(Serializer):
    """Text completions: choice c of prompt p has the index p × n + c."""

    def __init__(self, call: Call, body: CompletionRequest, base: dict[str, Any], tokenizer: Tokenizer):
        self._call = call
        self._body = body
        self._base = base | {"object": "text_completion"}
        self._tokenizer = tokenizer
        self._chunks = Chunks(call, self._base, body)
        self._started: set[int] = set()  # indexes that had their first chunk
        self._echoes: dict[int, str] = {}  # prompts as they are shown

    def events(self, piece: TextPiece) -> bytes:
        index = piece.sequence.prompt_index * self._body.n + piece.sequence.choice
        choice = self._choice(index, piece, first=index not in self._started)
        self._started.add(index)
        return self._chunks.of(choice)

    def closing(self, last: SequenceStream) -> bytes:
        return self._chunks.end(last)

    def body(self, pieces: list[TextPiece]) -> bytes:
        choices = []
        for index, output in enumerate(self._chosen(whole_outputs(self._call, pieces))):
            choice = {"prompt_logprobs": None, "prompt_token_ids": None} | self._choice(index, output, first=True)
            if self._body.prompt_logprobs is not None:
                positions = self._call.leader(output.sequence).prompt_logprobs
                num_top = self._body.prompt_logprobs
                choice["prompt_logprobs"] = prompt_logprobs(positions, num_top, self._tokenizer.vocabulary)
            choices.append(choice)
        whole = self._base | NULL_FIELDS | {"choices": choices, "usage": usage_of(self._call)}
        whole |= handoff_of(self._call.handed_over)
        return to_json(whole | timings_of(self._call, pieces[-1].sequence))

    def _chosen(self, outputs: list[TextPiece]) -> list[TextPiece]:
        """The n outputs of each prompt with the highest mean log-probability, of `best_of`; failed ones come last."""
        n, sampled = self._body.n, self._body.choices
        if n == sampled:
            return outputs

        def mean_logprob(output: TextPiece) -> tuple[bool, float]:
            values = [entry.logprobs.logprob for entry in output.entries]
            return output.sequence.failure is None, sum(values) / len(values) if values else 0.0

        chosen = []
        for begin in range(0, len(outputs), sampled):
            chosen += sorted(outputs[begin : begin + sampled], key=mean_logprob, reverse=True)[:n]
        return chosen

    def _choice(self, index: int, piece: TextPiece, *, first: bool) -> dict[str, Any]:
        body, sequence, logprobs = self._body, piece.sequence, None
        echoed = self._echo(sequence) if body.echo and (first or body.logprobs is not None) else ""
        if body.logprobs is not None:
            lists = CompletionLogprobs(body.logprobs, self._tokenizer.vocabulary)
            if first and body.echo:
                positions = self._call.leader(sequence).prompt_logprobs
                stream = self._tokenizer.stream(skip_special_tokens=body.skip_special_tokens)
                lists.add_prompt(sequence.request.prompt_token_ids, positions, stream)
            lists.add_output(piece.entries, len(echoed))
            logprobs = lists.value
        choice = {
            "index": index,
            "text": echoed + piece.text if first else piece.text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
        if first and body.return_token_ids:
            choice["prompt_token_ids"] = sequence.request.prompt_token_ids
        if piece.entries or piece.finish_reason is not None:
            choice |= vllm_fields(piece, body)
        return choice

    def _echo(self, sequence: SequenceStream) -> str:
        index = sequence.prompt_index
        if index not in self._echoes:
            text, ids = sequence.prompt_text, sequence.request.prompt_token_ids
            if text is None:
                text = self._tokenizer.decode(ids, skip_special_tokens=self._body.skip_special_tokens)
            self._echoes[index] = text
        return self._echoes[index]
