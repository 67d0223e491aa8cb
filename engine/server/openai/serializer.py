"""Calls as the bytes of an API, apart from HTTP: the part that all formats share."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from sojourn.engine.server.core.call import Call
from sojourn.engine.server.core.sequence import SequenceStream, TextPiece
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.openai.protocol import GenerationRequest, StreamOptions
from sojourn.metrics.ledger import SERVER_ACCOUNTS, Account

to_json = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


class Serializer(Protocol):
    """The format of one API for one call. A stream uses `opening`, `events` and `closing`, a whole answer `body`."""

    def opening(self) -> bytes:
        """Events before the first piece."""
        return b""

    def events(self, piece: TextPiece) -> bytes:
        """Events of a piece; may be none."""
        ...

    def closing(self, last: SequenceStream) -> bytes:
        """Events that sum up the call, whose sequence `last` ended last. No token waits for them."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails: it ends without [DONE]."""
        return event(error.body())

    def body(self, pieces: list[TextPiece]) -> bytes:
        """The whole answer."""
        ...


def whole_outputs(call: Call, pieces: list[TextPiece]) -> list[TextPiece]:
    """All pieces of each sequence as one piece, in the order of the sequences."""
    own: dict[SequenceStream, list[TextPiece]] = {sequence: [] for sequence in call.sequences}
    for piece in pieces:
        own[piece.sequence].append(piece)
    outputs = []
    for sequence, parts in own.items():
        entries = [entry for part in parts for entry in part.entries]
        outputs.append(TextPiece(sequence, "".join(part.text for part in parts), entries, parts[-1].finish_reason))
    return outputs


def event(value: Any) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + to_json(value) + b"\n\n"


class Chunks:
    """The chunks of one stream. Their common fields are encoded once, because each token has a chunk."""

    def __init__(
        self,
        call: Call,
        base: dict[str, Any],
        body: GenerationRequest,
        reasoning_tokens: Callable[[], int] | None = None,
    ):
        self._call = call
        self._reasoning_tokens = reasoning_tokens
        self._base = base
        self._options = options = (body.stream and body.stream_options) or StreamOptions()
        self._counts_always = options.include_usage and options.continuous_usage_stats
        self._head = b"data: " + to_json(base)[:-1] + b',"choices":['
        self._no_usage_yet = b',"usage":null' if options.include_usage else b""

    def of(self, choice: dict[str, Any]) -> bytes:
        usage = b',"usage":' + to_json(self._usage()) if self._counts_always else self._no_usage_yet
        return b"".join((self._head, to_json(choice), b"]", usage, b"}\n\n"))

    def first(self, choice: dict[str, Any], extra: dict[str, Any]) -> bytes:
        """A chunk that counts no token yet, with fields that other chunks lack."""
        chunk = self._base | {"choices": [choice]} | extra
        if self._counts_always:
            prompt_tokens = self._call.prompt_tokens
            chunk["usage"] = self._usage() | {"completion_tokens": 0, "total_tokens": prompt_tokens}
        elif self._options.include_usage:
            chunk["usage"] = None
        return event(chunk)

    def end(self, last: SequenceStream) -> bytes:
        """The usage and the timings of the call, if the client wants them, and the end of the stream."""
        if not self._options.include_usage:
            return DONE
        final = self._base | {"choices": [], "usage": self._usage()} | timings_of(self._call, last)
        return event(final) + DONE

    def _usage(self) -> dict[str, Any]:
        return usage_of(self._call, self._reasoning_tokens and self._reasoning_tokens())


# Fields of a whole answer that clients of vLLM read without asking whether they are there.
NULL_FIELDS: dict[str, Any] = {"service_tier": None, "kv_transfer_params": None}


def vllm_fields(piece: TextPiece, body: GenerationRequest) -> dict[str, Any]:
    """Fields of a choice that vLLM adds: which stop of the client ended it, and its ids, or null. A choice that failed
    beside others says why in `error`."""
    token_ids = [entry.token_id for entry in piece.entries] if body.return_token_ids else None
    stop_reason = None if piece.finish_reason is None else piece.sequence.stop_reason
    failure = piece.sequence.failure
    return {"stop_reason": stop_reason, "token_ids": token_ids} | ({} if failure is None else failure.body())


def usage_of(call: Call, reasoning_tokens: int | None = None) -> dict[str, Any]:
    """`reasoning_tokens` is None for text completions, which know no reasoning."""
    prompt_tokens, output_tokens = call.prompt_tokens, call.output_tokens
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": call.cached_tokens},
    }
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def timings_of(call: Call, last: SequenceStream) -> dict[str, Any]:
    """Our ledger and vLLM's per-request `metrics`, both in milliseconds, before the last write.

    The ledger is that of the sequence that ended last. It cannot contain the write of the bytes that carry it.
    `metrics` describes one sequence, so a call with several has none. Its names and meanings are vLLM's
    (docs/features/per_request_metrics.md): the time to the first token begins at the first step, not at the arrival.
    With telemetry=off there is neither.
    """
    if not call.has_ledgers:
        return {}
    ledger = last.write(time.monotonic_ns()).ledger()
    timings: dict[str, Any] = {"ledger": {info.name: _ms(ledger[info.account]) for info in SERVER_ACCOUNTS}}
    times = last.token_ns[: last.output_tokens]
    if len(call.sequences) == 1 and times:
        waited_ns = ledger[Account.REQUEST_QUEUE] + ledger[Account.MEMORY_BLOCKED]
        scheduled_ns = call.encoded_ns + ledger[Account.REQUEST_ADMISSION] + waited_ns
        gaps = len(times) - 1
        timings["metrics"] = {
            "time_to_first_token_ms": _ms(times[0] - scheduled_ns),
            "generation_time_ms": _ms(times[-1] - times[0]),
            "queue_time_ms": _ms(waited_ns),
            **({"mean_itl_ms": _ms((times[-1] - times[0]) / gaps)} if gaps else {}),
            "tokens_per_second": round(len(times) * 1e9 / (times[-1] - scheduled_ns), 3),
        }
    return timings


def _ms(nanoseconds: float) -> float:
    return round(nanoseconds / 1e6, 3)
