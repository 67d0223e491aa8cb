"""Prompts of a body → ids, within the limits of the model. Long prompts are encoded off the event loop."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from sojourn.engine.server.errors import ApiError, Rejection, invalid
from sojourn.engine.server.openai.messages import Message, TemplateFields
from sojourn.engine.server.openai.protocol import MAX_PROMPTS
from sojourn.engine.token.text.template import ChatTemplate, OutputTooLong, TemplateError, TemplatesBusy
from sojourn.engine.token.text.tokenizer import Tokenizer

RENDERING_THREADS = 8
OFF_LOOP_CHARACTERS = 10_000  # longer prompts are tokenised in a thread, so that no other stream waits for them


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None  # None: the client sent token ids
    encoding_ns: int = 0  # template and tokenizer worked for it; of waits, only that for a process that renders


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """How many tokens one sequence of the loaded model may have."""

    capacity: int  # prompt and output together
    reason: str  # why not more, as errors say it
    usual_output: int | None = None  # of a request that names no limit; None is what fits

    def output_tokens(self, prompt: Prompt, max_tokens: int | None, param: str) -> int:
        """`max_tokens`; where it is None the usual output as far as it fits. Raises ApiError 400 for a sequence that
        never fits."""
        size = len(prompt.token_ids)
        if size >= self.capacity and (max_tokens != 0 or size > self.capacity):
            raise self.too_long(str(size), param)
        if max_tokens is None:
            return min(self.capacity - size, self.usual_output or self.capacity)
        if size + max_tokens > self.capacity:
            message = (
                f"the prompt has {size} tokens and max_tokens is {max_tokens}, together {size + max_tokens}, "
                f"but {self.reason}; shorten the prompt or ask for at most {self.capacity - size} tokens"
            )
            raise Rejection(400, message, param="max_tokens", code="context_length_exceeded")
        return max_tokens

    def too_long(self, tokens: str, param: str) -> ApiError:
        message = f"the prompt has {tokens} tokens, but {self.reason}, output included; shorten the prompt"
        return Rejection(400, message, param=param, code="context_length_exceeded")


def list_prompts(prompt: Any, limits: ModelLimits) -> list[str | list[int]]:
    """The prompts of a completion: one text, one list of ids, or a list of either. Raises ApiError 400."""
    if isinstance(prompt, str):
        return [prompt]
    items = prompt if isinstance(prompt, list) else []
    for ids in (items, *items[:MAX_PROMPTS]):  # before any code looks at each of the ids
        if isinstance(ids, list) and len(ids) > max(limits.capacity, MAX_PROMPTS) and type(ids[0]) is int:
            raise limits.too_long(f"{len(ids):,}", "prompt")
    if items:
        if _is_ids(items):
            return [items]
        if len(items) > MAX_PROMPTS and isinstance(items[0], str | list):
            message = f"`prompt` lists {len(items)} prompts, but a call may have {MAX_PROMPTS}; send several calls"
            raise invalid("prompt", message)
        if all(isinstance(item, str) for item in items) or all(map(_is_ids, items)):
            return items
    if prompt == []:
        raise _empty("prompt")
    shown = f"a list of {len(items)} other things" if items else type(prompt).__name__
    message = f"`prompt` must be a text, a list of token ids, or a list of texts or of lists of token ids, not {shown}"
    raise invalid("prompt", message)


def check_ids(ids: list[int], vocab_size: int, param: str) -> list[int]:
    """Raises ApiError 400 unless the model has all these ids."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        bad = next(token for token in ids if not 0 <= token < vocab_size)
        message = f"`{param}` holds token id {bad}, but ids of this model are 0 to {vocab_size - 1}"
        raise invalid(param, message)
    return ids


class PromptEncoder:
    """Owns the tokenizer and the template of a served model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        self.tokenizer = tokenizer
        self.template = template
        # Of their own, since they wait for the processes that render: slow templates hold up no tokenising.
        self._rendering = ThreadPoolExecutor(RENDERING_THREADS, "template")

    async def encode(
        self,
        prompts: list[str | list[int]],
        limits: ModelLimits,
        *,
        add_special_tokens: bool,
        param: str,
        allow_empty: bool = False,
    ) -> list[Prompt]:
        """Texts and lists of ids → prompts. A text that is too long in any case is refused before it is encoded."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            least = len(text.encode()) // self.tokenizer.longest_token_bytes
            if least > limits.capacity:
                raise limits.too_long(f"at least {least:,}", param)
        if sum(map(len, texts)) < OFF_LOOP_CHARACTERS:
            encoded = [self._encode(prompt, add_special_tokens) for prompt in prompts]
        else:
            encoded = await asyncio.to_thread(lambda: [self._encode(prompt, add_special_tokens) for prompt in prompts])
        if not allow_empty and not all(prompt.token_ids for prompt in encoded):
            raise _empty(param)
        return encoded

    async def encode_chat(
        self,
        messages: list[Message],
        fields: TemplateFields,
        limits: ModelLimits,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_special_tokens: bool = False,
    ) -> Prompt:
        """Messages → the prompt for the assistant's turn, with `tools` as templates read them.

        Raises ApiError 400 where the template refuses them.
        """
        self._check_variables(fields.chat_template_kwargs)

        def render() -> tuple[str, int]:
            begin_ns = time.monotonic_ns()
            text = self.template.render(
                [self.template.adapted(message.template_value()) for message in messages],
                tools=tools,
                add_generation_prompt=fields.add_generation_prompt,
                continue_final_message=fields.continue_final_message,
                variables=fields.chat_template_kwargs,
                max_characters=limits.capacity * self.tokenizer.longest_token_bytes,
            )
            return text, time.monotonic_ns() - begin_ns

        try:
            text, rendering_ns = await asyncio.get_running_loop().run_in_executor(self._rendering, render)
        except OutputTooLong:
            raise limits.too_long(f"at least {limits.capacity:,}", "messages") from None
        except TemplatesBusy as error:
            raise ApiError(503, str(error), code="templates_busy", retry_after_seconds=1) from None
        except TemplateError as error:
            raise ApiError(400, str(error), param="messages") from None
        (prompt,) = await self.encode([text], limits, add_special_tokens=add_special_tokens, param="messages")
        return replace(prompt, encoding_ns=prompt.encoding_ns + rendering_ns)

    def _check_variables(self, variables: dict[str, Any]) -> None:
        known = self.template.variables
        unknown = next((name for name in variables if name not in known), None)
        if unknown is not None:
            reads = f"it reads {', '.join(sorted(known)[:20])}" if known else "it reads none"
            message = (
                f"`chat_template_kwargs` sets {unknown[:80]!r}, which this model's template does not read; {reads}"
            )
            raise invalid("chat_template_kwargs", message)

    def _encode(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        if isinstance(prompt, str):
            begin_ns = time.monotonic_ns()
            ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            return Prompt(ids, prompt, time.monotonic_ns() - begin_ns)
        return Prompt(check_ids(prompt, self.tokenizer.vocab_size, "prompt"))


def _is_ids(item: Any) -> bool:
    return isinstance(item, list) and set(map(type, item)) <= {int}


def _empty(param: str) -> ApiError:
    return invalid(param, f"`{param}` is empty; send at least one token")
