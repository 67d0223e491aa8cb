"""Prompts of a body → ids, within the model's bounds; long ones off the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any

from engine.server.core.sequence import Prompt
from engine.server.errors import ApiError
from engine.server.openai.messages import Message, TemplateFields
from engine.server.openai.protocol import MAX_PROMPTS
from engine.token.text.template import ChatTemplate, OutputTooLong, TemplateError
from engine.token.text.tokenizer import Tokenizer

OFF_LOOP_CHARACTERS = 10_000  # longer prompts are tokenised in a thread, so that no other stream waits for them


def listed(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion: one text, one list of ids, or a list of either. Raises ApiError 400."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            return [prompt]
        if len(prompt) > MAX_PROMPTS and isinstance(prompt[0], str | list):
            message = f"`prompt` lists {len(prompt)} prompts, but a call may have {MAX_PROMPTS}; send several calls"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        if all(isinstance(item, str) for item in prompt) or all(_is_ids(item) for item in prompt):
            return prompt
    if prompt == []:
        raise empty("prompt")
    shown = f"a list of {len(prompt)} other things" if isinstance(prompt, list) else type(prompt).__name__
    message = f"`prompt` must be a text, a list of token ids, or a list of texts or of lists of token ids, not {shown}"
    raise ApiError(400, message, param="prompt", code="invalid_value")


def empty(param: str) -> ApiError:
    return ApiError(400, f"`{param}` is empty; send at least one token", param=param, code="invalid_value")


def _is_ids(item: Any) -> bool:
    return isinstance(item, list) and all(type(token) is int for token in item)


class PromptEncoder:
    """Owns the tokenizer and the template of a served model. `capacity` tells (tokens, why no more) of one sequence."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        capacity: Callable[[], tuple[int, str]],
        on_rejection: Callable[[str], None],
    ):
        self.tokenizer = tokenizer
        self.template = template
        self._capacity = capacity
        self._on_rejection = on_rejection

    async def encode(
        self, prompts: list[str | list[int]], *, add_special_tokens: bool, param: str, allow_empty: bool = False
    ) -> list[Prompt]:
        """Texts and lists of ids → prompts. Refuses, before it does the work, a text that is too long in any case."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            least = len(text.encode()) // self.tokenizer.longest_token_bytes
            if least > self._capacity()[0]:
                raise self.too_long(f"at least {least:,}", param)
        if sum(map(len, texts)) < OFF_LOOP_CHARACTERS:
            encoded = [self._encode(prompt, add_special_tokens) for prompt in prompts]
        else:
            encoded = await asyncio.to_thread(lambda: [self._encode(prompt, add_special_tokens) for prompt in prompts])
        if not allow_empty and not all(prompt.token_ids for prompt in encoded):
            raise empty(param)
        return encoded

    def refuse_long_lists(self, prompt: Any) -> None:
        """Refuses ids that are too many in any case, before anything looks at each of them. Raises ApiError 400."""
        capacity = self._capacity()[0]
        given = prompt if isinstance(prompt, list) else []
        for ids in (given, *given[:MAX_PROMPTS]):
            if isinstance(ids, list) and len(ids) > max(capacity, MAX_PROMPTS) and type(ids[0]) is int:
                raise self.too_long(f"{len(ids):,}", "prompt")

    async def encode_chat(
        self,
        messages: list[Message],
        fields: TemplateFields,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_special_tokens: bool = False,
        param: str = "messages",
    ) -> Prompt:
        """Messages → the prompt for the assistant's turn, with `tools` as templates read them.

        Raises ApiError 400 where the template refuses them.
        """
        self._check_variables(fields.chat_template_kwargs)
        longest = self._capacity()[0] * self.tokenizer.longest_token_bytes
        values = [message.template_value() for message in messages]
        try:
            text = await asyncio.to_thread(
                self.template.render,
                values,
                tools=tools,
                add_generation_prompt=fields.add_generation_prompt,
                continue_final_message=fields.continue_final_message,
                variables=fields.chat_template_kwargs,
                max_characters=longest,
            )
        except OutputTooLong:
            raise self.too_long(f"at least {self._capacity()[0]:,}", param) from None
        except TemplateError as error:
            raise ApiError(400, str(error), param=param) from None
        return (await self.encode([text], add_special_tokens=add_special_tokens, param=param))[0]

    def _check_variables(self, variables: dict[str, Any]) -> None:
        known = self.template.variables
        unknown = next((name for name in variables if name not in known), None)
        if unknown is not None:
            reads = f"it reads {', '.join(sorted(known)[:20])}" if known else "it reads none"
            message = (
                f"`chat_template_kwargs` sets {unknown[:80]!r}, which this model's template does not read; {reads}"
            )
            raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value")

    def too_long(self, tokens: str, param: str) -> ApiError:
        self._on_rejection("context_length_exceeded")
        message = f"the prompt has {tokens} tokens, but {self._capacity()[1]}, output included; shorten the prompt"
        return ApiError(400, message, param=param, code="context_length_exceeded")

    def checked_ids(self, ids: list[int], param: str) -> list[int]:
        """Raises ApiError 400 unless the model has all these ids."""
        size = self.tokenizer.vocab_size
        bad = next((token for token in ids if not 0 <= token < size), None)
        if bad is not None:
            message = f"`{param}` holds token id {bad}, but ids of this model are 0 to {size - 1}"
            raise ApiError(400, message, param=param, code="invalid_value")
        return ids

    def room(self, prompt: Prompt, asked: int | None, param: str) -> int:
        """Output tokens that a sequence may have: as asked, or what fits. Raises ApiError 400 for what never fits."""
        capacity, limit = self._capacity()
        size = len(prompt.token_ids)
        if size >= capacity and (asked != 0 or size > capacity):
            raise self.too_long(str(size), param)
        if asked is None:
            return capacity - size
        if size + asked > capacity:
            self._on_rejection("context_length_exceeded")
            message = (
                f"the prompt has {size} tokens and max_tokens is {asked}, together {size + asked}, "
                f"but {limit}; shorten the prompt or ask for at most {capacity - size} tokens"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        return asked

    def _encode(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens), prompt)
        return Prompt(self.checked_ids(prompt, "prompt"))
