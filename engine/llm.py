"""Offline use: the same core in this process, without a server.

from sojourn.engine import LLM, SamplingParams
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
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import msgspec
from pydantic import ValidationError

from sojourn.engine import messages
from sojourn.engine.config import EngineConfig, complaint, model_folder
from sojourn.engine.core import build
from sojourn.engine.llm_input import SERVER_SETTINGS, LLMError, progress_bar, prompt_ids, stop_strings
from sojourn.engine.llm_output import Completion, OutputSequence, Piece
from sojourn.engine.loop.engine import Engine
from sojourn.engine.sampling import LEAST_TOP_P, SamplingParams, choice_seed, contradiction, ended_by, unfit
from sojourn.engine.techniques import load
from sojourn.engine.token.checkpoint import has_tokenizer
from sojourn.engine.token.generation_config import sampling_defaults
from sojourn.engine.token.text.template import ChatTemplate
from sojourn.engine.token.text.tokenizer import NoTokenizer, Tokenizer
from sojourn.metrics.compute.step_costs import StepCosts
from sojourn.metrics.records import StepRecord
from sojourn.metrics.steps import Steps

STEPS_AT_ONCE = 256  # records of steps, at most, between two calls of `on_steps`


class LLM:
    """A model in this process: one thread runs the engine's loop, any number of callers share its batches.

    `settings` are those of EngineConfig (see `sojourn serve --help`) without those of a server. Raises LLMError
    for a setting, ModelError for a checkpoint. With `load_format="dummy"` a folder with config.json is enough;
    without a tokenizer.json prompts are token ids and outputs have no text. `on_steps` gets the records of finished
    steps, some at once, in the engine's thread. Make the first LLM before you import torch, or set GOMP_SPINCOUNT=300
    in the environment: otherwise threads that wait for each other spin, and steps take ten times as long beside a busy
    process. Close it, or use it in a `with` block, to give its memory back.
    """

    def __init__(
        self, model: str | Path, *, on_steps: Callable[[list[StepRecord]], None] | None = None, **settings: Any
    ):
        of_servers = sorted(SERVER_SETTINGS & settings.keys())
        if of_servers:
            raise LLMError(f"setting {of_servers[0]} is of a server, and there is none here; leave it out")
        try:
            config = EngineConfig(model=str(model), **settings)
        except ValidationError as error:
            raise LLMError(complaint(error)) from None
        if on_steps is not None and config.telemetry == "off":
            raise LLMError("telemetry=off leaves no records for on_steps; leave one of the two out")
        folder = model_folder(config.model)
        spelt = config.load_format != "dummy" or has_tokenizer(folder)
        self._tokenizer = Tokenizer(folder) if spelt else NoTokenizer(folder)
        self._template = ChatTemplate(folder)
        self._defaults = sampling_defaults(folder, config.generation_config)
        self._adapters = {
            name: load("lora", "checkpoint.checkpoint").describe(path).named(name)
            for name, path in config.lora_adapters.items()
        }
        self._inbox: queue.SimpleQueue[messages.Submit | messages.Abort | None] = queue.SimpleQueue()
        self._sequences: dict[str, OutputSequence] = {}
        self._ids = map(str, itertools.count())
        self._failure: BaseException | None = None
        self._on_steps = on_steps
        self._steps: list[StepRecord] = []  # not handed to `on_steps` yet
        self._engine, self.ready = self._start(config)
        self._costs = StepCosts(self.ready.shape)
        self._is_ready.set()
        # A daemon that computes while the interpreter goes away brings the process down with an abort.
        weakref.finalize(self, _end, self._inbox, self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def default_sampling(self, **wanted: Any) -> SamplingParams:
        """The checkpoint's own sampling, as a server gives it to requests that do not say otherwise, but for what is
        `wanted`. Without a limit of the checkpoint, `max_tokens` is 16."""
        values = {"max_tokens": 16} | self._defaults.shown | wanted
        return SamplingParams(**values | {"top_p": values.get("top_p", 1.0) or LEAST_TOP_P})

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._sequences)

    def close(self) -> None:
        """Ends the loop. Open requests are aborted, and their callers get an LLMError."""
        _end(self._inbox, self._thread)
        self._engine = None

    def generate(
        self,
        prompts: str | Sequence[str | list[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        stop: str | Sequence[str] = (),
        lora: str | Sequence[str | None] | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Completes every prompt (a text, or token ids) `n` times; the outputs stand in the order of the prompts.

        One `sampling` for all, or one for each; None is the checkpoint's own, as far as it fits. SamplingParams are
        taken as they are, and `default_sampling` makes them of the checkpoint's. Likewise `lora`, a name of the setting
        lora_adapters. The n outputs of a prompt share its blocks and have seeds of their own. Raises LLMError before
        anything is computed if a prompt or a parameter does not fit.
        """
        prompts, stops = [prompts] if isinstance(prompts, str) else list(prompts), stop_strings(stop)
        controls = list(sampling) if isinstance(sampling, list | tuple) else [sampling] * len(prompts)
        if len(controls) != len(prompts):
            raise LLMError(
                f"{len(prompts)} prompts need as many sampling parameters, or one; there are {len(controls)}"
            )
        if type(n) is not int or n < 1:
            raise LLMError(f"n={n} outputs of a prompt cannot be made; ask for at least 1")
        named = list(lora) if isinstance(lora, list | tuple) else [lora] * len(prompts)
        if len(named) != len(prompts):
            raise LLMError(f"{len(prompts)} prompts need as many adapters, or one; there are {len(named)}")
        submits = []
        for index, (prompt, control, adapter) in enumerate(zip(prompts, controls, named, strict=True)):
            first = self._submit(prompt, control, f"prompt {index}", adapter)
            submits.append(first)
            for choice in range(1, n):
                seed = choice_seed(first.sampling.seed, choice)
                again = msgspec.structs.replace(
                    first,
                    request_id=next(self._ids),
                    sampling=msgspec.structs.replace(first.sampling, seed=seed),
                    fork_of=first.request_id,
                )
                submits.append(again)
        finished: queue.SimpleQueue[OutputSequence] = queue.SimpleQueue()
        sequences = [OutputSequence(submit, self._tokenizer, stops, on_end=finished.put) for submit in submits]
        try:
            self._begin(sequences)
            num_tokens, begin = 0, time.monotonic()
            with progress_bar(progress) as bar:
                task = bar.add_task("generating", total=len(sequences), tokens_per_second=0)
                for _ in sequences:
                    num_tokens += finished.get().num_tokens
                    self._raise_if_failed()
                    bar.update(task, advance=1, tokens_per_second=num_tokens / max(1e-9, time.monotonic() - begin))
        except BaseException:
            self._give_up(sequences)
            raise
        return [sequence.completion() for sequence in sequences]

    def chat(
        self,
        conversation: list[dict[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        lora: str | None = None,
    ) -> Completion:
        """The assistant's next turn, by the checkpoint's chat template. Raises TemplateError, and as `generate`."""
        if not isinstance(conversation, list) or not conversation or not all(isinstance(m, dict) for m in conversation):
            raise LLMError("a conversation is a list of messages, each with `role` and `content`; give one at a time")
        text = self._template.render([self._template.adapted(message) for message in conversation])
        prompt = self._tokenizer.encode(text, add_special_tokens=False)
        return self.generate([prompt], sampling, stop=stop, lora=lora)[0]

    async def stream(
        self,
        prompt: str | list[int],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        lora: str | None = None,
    ) -> AsyncIterator[Piece]:
        """The output token by token. Streams of one event loop, and of several, share the engine's batches.

        Leaving the iteration aborts the request within a step. Raises as `generate`, and where that gives an error.
        """
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()
        submit = self._submit(prompt, sampling, "the prompt", lora)

        def hand_over(piece: Piece | None) -> None:
            try:
                loop.call_soon_threadsafe(pieces.put_nowait, piece)
            except RuntimeError:  # the event loop was closed
                self._give_up([sequence])

        sequence = OutputSequence(submit, self._tokenizer, stop_strings(stop), on_piece=hand_over)
        try:
            self._begin([sequence])
            while True:
                piece = await pieces.get()
                if piece is None:
                    self._raise_if_failed()
                    raise LLMError(sequence.error)
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self._give_up([sequence])

    def _submit(
        self, prompt: str | list[int], sampling: SamplingParams | None, what: str, lora: str | None
    ) -> messages.Submit:
        """A checked request. Raises LLMError."""
        ids = prompt_ids(prompt, what, self._tokenizer)
        capacity = min(self.ready.max_model_len, self.ready.pool_tokens)
        if sampling is None:
            sampling = self.default_sampling()
            fitting = max(1, min(sampling.max_tokens, capacity - len(ids)))
            sampling = msgspec.structs.replace(sampling, max_tokens=fitting)
        sampling = self._checked(sampling, ids, what)
        if len(ids) + sampling.max_tokens > capacity:
            raise LLMError(
                f"{what} has {len(ids)} tokens and max_tokens is {sampling.max_tokens}, but both together may be "
                f"at most {capacity}; shorten it, or raise max_model_len or num_kv_blocks"
            )
        sampling = ended_by(sampling, self._tokenizer.stop_token_ids)
        if lora is not None and lora not in self._adapters:
            raise LLMError(f"{what} names the adapter {lora!r}; there are {', '.join(self._adapters) or 'none'}")
        adapter = None if lora is None else self._adapters[lora]
        return messages.Submit(next(self._ids), ids, sampling, encoded_ns=time.monotonic_ns(), adapter=adapter)

    def _checked(self, sampling: SamplingParams, prompt: list[int], what: str) -> SamplingParams:
        """Controls that can be honoured for this prompt. Raises LLMError."""
        if not isinstance(sampling, SamplingParams):
            raise LLMError(f"sampling of {what} is {sampling!r}; it must be SamplingParams")
        try:
            sampling = msgspec.convert(msgspec.to_builtins(sampling), SamplingParams)
        except (msgspec.ValidationError, TypeError) as error:
            raise LLMError(f"sampling of {what}: {error}") from None
        sentence = contradiction(sampling) or unfit(sampling, prompt, self._tokenizer.vocab_size)
        if sentence is None and sampling.min_tokens > sampling.max_tokens:
            sentence = f"`min_tokens`={sampling.min_tokens} is more than `max_tokens`={sampling.max_tokens}"
        if sentence is not None:
            raise LLMError(f"sampling of {what}: {sentence}")
        return sampling

    def _begin(self, sequences: list[OutputSequence]) -> None:
        self._raise_if_failed()
        for sequence in sequences:
            self._sequences[sequence.request.request_id] = sequence
            self._inbox.put(sequence.request)
        self._raise_if_failed()  # it may have failed meanwhile, and then wakes no one

    def _give_up(self, sequences: list[OutputSequence]) -> None:
        for sequence in sequences:
            known = self._sequences.pop(sequence.request.request_id, None)
            if known is not None and sequence.finish_reason is None:  # else the loop ends it, or aborts it already
                self._inbox.put(messages.Abort(sequence.request.request_id))

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise LLMError(f"the engine has ended: {self._failure}") from self._failure

    def _start(self, config: EngineConfig) -> tuple[Engine, messages.Ready]:
        """Builds the engine in the thread that will run it: a GPU's libraries have a handle and memory for each thread.
        Raises what `build` raises."""
        built: Future[tuple[Engine, messages.Ready]] = Future()
        self._is_ready = threading.Event()  # the loop has all that it reads
        self._thread = threading.Thread(target=self._run, args=(config, built), name="sojourn engine", daemon=True)
        self._thread.start()
        try:
            return built.result()
        except BaseException:  # an interrupt, too: the thread ends when it has built
            self._is_ready.set()
            raise

    def _run(self, config: EngineConfig, built: Future) -> None:
        """The thread: builds the engine, steps while there is work, sleeps while there is none."""
        try:
            built.set_result(build(config, 0, self._publish))
        except BaseException as error:
            built.set_exception(error)
            return
        self._is_ready.wait()
        try:
            try:
                self._loop()
            finally:
                self._report_steps()
                self._engine.flush()
                self._engine.close()
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
                engine.flush()
                self._report_steps()
                # A compiled grammar does not wake this loop: it has to look.
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

    def _publish(self, message: messages.Tokens | messages.Observed) -> None:
        if isinstance(message, messages.Observed):
            for item in message.ended:
                if (sequence := self._sequences.pop(item.request_id, None)) is not None:
                    sequence.end(item)
            if self._on_steps is not None and message.step is not None:
                self._steps.append(message.step)
                if len(self._steps) >= STEPS_AT_ONCE:
                    self._report_steps()
            return
        for output in message.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is not None and sequence.finish_reason is None:
                sequence.take(output)
                if sequence.finish_reason is not None and output.finish_reason is None:  # by a stop string
                    self._inbox.put(messages.Abort(output.request_id))

    def _report_steps(self) -> None:
        if self._steps:
            steps, self._steps = self._steps, []
            self._costs.complete(Steps(steps))
            self._on_steps(steps)


def _end(inbox: queue.SimpleQueue, thread: threading.Thread) -> None:
    inbox.put(None)
    thread.join()
