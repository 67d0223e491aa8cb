"""Offline use: the same core in this process, without a server.

from engine import LLM, SamplingParams
with LLM("tiny-model") as llm:
    for completion in llm.generate(["The queue", "A cache"], SamplingParams(max_tokens=32)):
        print(completion.text)
"""

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
from pydantic import ValidationError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine import messages
from engine.config import EngineConfig, model_folder
from engine.core import build
from engine.sampling import SamplingParams, TokenLogprobs, choice_seed
from engine.token.template import ChatTemplate
from engine.token.tokenizer import StopStrings, Tokenizer
from metrics.ledger import ACCOUNTS


class LLMError(Exception):
    """A prompt or a setting that cannot be honoured, or an engine that failed, with a sentence."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str  # without the stop string that ended it
    finish_reason: str  # stop, length, or error
    error: str | None  # a sentence, where finish_reason is error
    cached_tokens: int
    logprobs: list[TokenLogprobs]  # as long as token_ids where they were asked for
    prompt_logprobs: list[TokenLogprobs]  # of each prompt token but the first, likewise
    ledger_ms: dict[str, float]  # account → milliseconds in the core


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added to a streamed output. `finish_reason` stands on the last piece."""

    text: str
    token_id: int
    finish_reason: str | None


# Settings that only mean something to the front process of a server.
_SERVER_SETTINGS = {
    "host", "port", "served_model_name", "max_waiting", "drain_seconds", "max_body_bytes", "run_dir",
    "objective_ttft_ms", "objective_tpot_ms", "objective_e2e_ms",
}  # fmt: skip


class LLM:
    """A model in this process: one thread runs the engine's loop, any number of callers share its batches.

    `settings` are those of EngineConfig (see `sojourn serve --help`), but for what concerns a server. Raises LLMError
    for a setting, ModelError for a checkpoint. Close it, or use it in a `with` block, to give its memory back.
    """

    def __init__(self, model: str | Path, **settings: Any):
        unfit = sorted(_SERVER_SETTINGS & settings.keys())
        if unfit:
            raise LLMError(f"setting {unfit[0]} is of a server, and there is none here; leave it out")
        try:
            config = EngineConfig(model=str(model), **settings)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise LLMError(f"setting {'.'.join(map(str, first['loc']))}={first['input']!r}: {first['msg']}") from None
        folder = model_folder(config.model)
        self._tokenizer = Tokenizer(folder)
        self._template = ChatTemplate(folder)
        self._inbox: queue.SimpleQueue[messages.Submit | messages.Abort | None] = queue.SimpleQueue()
        self._sequences: dict[str, _Sequence] = {}
        self._ids = itertools.count()
        self._failure: BaseException | None = None
        self._engine, self.ready = build(config, 0, self._publish)
        self._thread = threading.Thread(target=self._run, name="sojourn engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the loop. What is under way is given up with an LLMError to whoever waits for it."""
        self._inbox.put(None)
        self._thread.join()

    def generate(
        self,
        prompts: str | Sequence[str | list[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        progress: bool = False,
    ) -> list[Completion]:
        """Completes every prompt (a text, or token ids) `n` times; the outputs stand in the order of the prompts.

        One `sampling` for all, or one for each. The n outputs of a prompt share its blocks and draw with seeds of their
        own. Raises LLMError before anything is computed if a prompt or a control does not fit.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        controls = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(controls) != len(prompts):
            raise LLMError(
                f"{len(prompts)} prompts need as many sampling parameters, or one; there are {len(controls)}"
            )
        if n < 1:
            raise LLMError(f"n={n} outputs of a prompt cannot be made; ask for at least 1")
        submits = []
        for index, (prompt, control) in enumerate(zip(prompts, controls, strict=True)):
            first = self._submit(self._encode(prompt), control, f"prompt {index}")
            submits.append(first)
            for choice in range(1, n):
                seed = choice_seed(control.seed, choice)
                again = msgspec.structs.replace(
                    first,
                    request_id=self._next_id(),
                    sampling=msgspec.structs.replace(first.sampling, seed=seed),
                    fork_of=first.request_id,
                )
                submits.append(again)
        finished: queue.SimpleQueue[_Sequence] = queue.SimpleQueue()
        sequences = [_Sequence(submit, self._tokenizer, stop, whole=finished.put) for submit in submits]
        self._begin(sequences)
        try:
            with _Bar(progress, len(sequences)) as bar:
                for _ in sequences:
                    done = finished.get()
                    self._raise_if_failed()
                    bar.advance(done.num_tokens)
        except BaseException:
            self._give_up(sequences)
            raise
        return [sequence.completion() for sequence in sequences]

    def chat(
        self, conversation: list[dict[str, Any]], sampling: SamplingParams, *, stop: Sequence[str] = ()
    ) -> Completion:
        """The assistant's next turn, by the checkpoint's chat template. Raises TemplateError, and as `generate`."""
        text = self._template.render(conversation)
        prompt = self._tokenizer.encode(text, add_special_tokens=False)
        return self.generate([prompt], sampling, stop=stop)[0]

    async def stream(
        self, prompt: str | list[int], sampling: SamplingParams, *, stop: Sequence[str] = ()
    ) -> AsyncIterator[Piece]:
        """The output token by token. Streams of one event loop, and of several, share the engine's batches.

        Leaving the iteration aborts the request within a step. Raises as `generate`.
        """
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()
        submit = self._submit(self._encode(prompt), sampling, "the prompt")

        def hand_over(piece: Piece | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        sequence = _Sequence(submit, self._tokenizer, stop, piece=hand_over)
        self._begin([sequence])
        try:
            while True:
                piece = await pieces.get()
                self._raise_if_failed()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._give_up([sequence])

    def _encode(self, prompt: str | list[int]) -> list[int]:
        return self._tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _submit(self, ids: list[int], sampling: SamplingParams, what: str) -> messages.Submit:
        """A checked request. Raises LLMError with a sentence."""
        capacity = min(self.ready.max_model_len, self.ready.num_kv_blocks * self.ready.block_size)
        vocab_size = self._tokenizer.vocab_size
        if not ids:
            raise LLMError(f"{what} is empty; give at least one token")
        bad = next((token for token in ids if type(token) is not int or not 0 <= token < vocab_size), None)
        if bad is not None:
            raise LLMError(f"{what} holds token id {bad!r}; ids of this model are 0 to {vocab_size - 1}")
        if len(ids) + sampling.max_tokens > capacity:
            raise LLMError(
                f"{what} has {len(ids)} tokens and max_tokens is {sampling.max_tokens}, but both together may be "
                f"at most {capacity}; shorten it, or raise max_model_len or num_kv_blocks"
            )
        try:
            sampling = msgspec.convert(msgspec.to_builtins(sampling), SamplingParams)
        except msgspec.ValidationError as error:
            raise LLMError(f"sampling of {what}: {error}") from None
        stops = sorted({*sampling.stop_token_ids, *self._tokenizer.stop_token_ids})
        sampling = msgspec.structs.replace(sampling, stop_token_ids=stops)
        return messages.Submit(self._next_id(), ids, sampling, encoded_ns=time.monotonic_ns())

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _begin(self, sequences: list["_Sequence"]) -> None:
        self._raise_if_failed()
        for sequence in sequences:
            self._sequences[sequence.request.request_id] = sequence
            self._inbox.put(sequence.request)

    def _give_up(self, sequences: list["_Sequence"]) -> None:
        for sequence in sequences:
            if self._sequences.pop(sequence.request.request_id, None) is not None:
                self._inbox.put(messages.Abort(sequence.request.request_id))

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise LLMError(f"the engine has ended: {self._failure}") from self._failure

    def _run(self) -> None:
        """The thread: steps while there is work, sleeps while there is none."""
        try:
            self._loop()
            self._failure = LLMError("it was closed")
        except BaseException as error:
            self._failure = error
        for sequence in list(self._sequences.values()):
            sequence.wake()

    def _loop(self) -> None:
        engine, begin_ns = self._engine, time.monotonic_ns()
        while True:
            arrived = []
            if not engine.has_work:
                engine.idle()
                # A grammar that is being compiled calls nobody when it is done.
                with contextlib.suppress(queue.Empty):
                    arrived.append(self._inbox.get(timeout=0.001 if engine.is_preparing else None))
                begin_ns = time.monotonic_ns()
            while not self._inbox.empty():
                arrived.append(self._inbox.get())
            if None in arrived:
                return
            engine.receive(arrived, begin_ns)
            if engine.has_work:
                begin_ns = engine.step()

    def _publish(self, outputs: messages.Outputs) -> None:
        ended = {item.request_id: item for item in outputs.ended}
        for output in outputs.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is not None and sequence.finish_reason is None:
                sequence.take(output, ended.get(output.request_id))
                if sequence.finish_reason is not None and output.request_id not in ended:  # by a stop string
                    self._inbox.put(messages.Abort(output.request_id))
        for item in outputs.ended:
            if (sequence := self._sequences.pop(item.request_id, None)) is not None:
                sequence.end(item)


class _Sequence:
    """One output as its tokens come: their text, and where a stop string ends it. Lives in the loop's thread.

    `piece` is told each token, `whole` the end; both with None or without more where the engine has ended.
    """

    def __init__(
        self,
        request: messages.Submit,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        *,
        piece: Callable[[Piece | None], None] | None = None,
        whole: Callable[["_Sequence"], None] | None = None,
    ):
        self.request = request
        self.finish_reason: str | None = None
        self._piece, self._whole = piece, whole
        self._text = tokenizer.stream()
        self._stops = StopStrings(list(stop))
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._ended: messages.Ended | None = None

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    def take(self, output: messages.Output, ended: messages.Ended | None) -> None:
        self._token_ids.append(output.token_id)
        if output.logprobs is not None:
            self._logprobs.append(output.logprobs)
        self._prompt_logprobs += output.prompt_logprobs or ()
        text = self._stops.push(self._text.push(output.token_id))
        if self._stops.found:
            self.finish_reason = "stop"
        elif ended is not None:
            self.finish_reason = ended.reason
            text += self._stops.rest()
        self._texts.append(text)
        if self._piece is not None:
            self._piece(Piece(text, output.token_id, self.finish_reason))

    def end(self, ended: messages.Ended) -> None:
        self._ended = ended
        self.finish_reason = self.finish_reason or ended.reason
        if self._whole is not None:
            self._whole(self)

    def wake(self) -> None:
        """The engine is gone: whoever waits finds out why."""
        if self._piece is not None:
            self._piece(None)
        if self._whole is not None:
            self._whole(self)

    def completion(self) -> Completion:
        ledger = zip(ACCOUNTS, self._ended.ledger, strict=True)
        return Completion(
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=self._token_ids,
            text="".join(self._texts),
            finish_reason=self.finish_reason,
            error=self._ended.error,
            cached_tokens=self._ended.cached_tokens,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            ledger_ms={info.name: booked_ns / 1e6 for info, booked_ns in ledger if booked_ns},
        )


class _Bar:
    """How many outputs are done, and how many tokens a second they take; shows nothing where it is off."""

    def __init__(self, shown: bool, total: int):
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        rate = TextColumn("{task.fields[tokens_per_second]:,.0f} tokens/s")
        self._progress = Progress(*columns, rate, disable=not shown)
        self._task = self._progress.add_task("", total=total, tokens_per_second=0)
        self._tokens, self._begin = 0, time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def advance(self, num_tokens: int) -> None:
        self._tokens += num_tokens
        seconds = max(1e-9, time.monotonic() - self._begin)
        self._progress.update(self._task, advance=1, tokens_per_second=self._tokens / seconds)
