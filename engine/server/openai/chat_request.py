"""The bodies of /v1/chat/completions, /tokenize and /detokenize."""

from typing import Annotated, ClassVar

from pydantic import Field

from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.errors import ApiError, invalid
from sojourn.engine.server.openai.messages import MAX_MESSAGES, Message, TemplateFields
from sojourn.engine.server.openai.protocol import MAX_LOGPROBS, GenerationRequest, TokenId
from sojourn.engine.server.openai.reasoning import Effort
from sojourn.engine.server.openai.tools import ToolChoice


class ChatRequest(TemplateFields, GenerationRequest):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        description="rendered by the model's own chat template"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="output tokens at most; else what fits")
    max_tokens: int | None = Field(None, ge=1, description="the older name; both may be sent if they are equal")
    logprobs: bool = Field(False, description="log-probabilities of the output tokens")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="alternatives to each; needs logprobs")
    add_special_tokens: bool = Field(False, description="... beside those that the template writes")
    tool_choice: ToolChoice | None = Field(
        None,
        description="none, auto (the default), required, one function or allowed_tools; a call that must come is valid",
    )
    parallel_tool_calls: bool = Field(True, description="false: at most one call")
    reasoning_effort: Effort | None = Field(
        None, description="none turns reasoning off, where the chat template can; others need a template that reads it"
    )
    include_reasoning: bool = Field(True, description="false: the reasoning is not in the answer; usage counts it")
    thinking_token_budget: int | None = Field(
        None, ge=0, lt=2**31, description="tokens of reasoning at most: then the model must answer"
    )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def reasoning_budget(self) -> int | None:
        return self.thinking_token_budget

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "send `max_completion_tokens` or `max_tokens`, not both with different values"
            raise invalid("max_tokens", message)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "`top_logprobs` needs `logprobs`: true")


class TokenizeRequest(TemplateFields):
    """POST /tokenize: a text, or messages to be rendered by the chat template."""

    model: str | None = Field(None, description="name of the served model")
    prompt: str | None = Field(None, description="a text; or send messages")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = Field(
        None, description="rendered by the chat template; or send prompt"
    )
    add_special_tokens: bool | None = Field(
        None, description="the tokenizer adds its own; by default to a prompt, and not to messages"
    )
    return_token_strs: bool = Field(False, description="the tokens as the vocabulary spells them, too")

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "send either `prompt` or `messages`", param="prompt")


class DetokenizeRequest(Strict):
    """POST /detokenize."""

    model: str | None = Field(None, description="name of the served model")
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000, fail_fast=True)] = Field(
        description="ids, special ones included"
    )
