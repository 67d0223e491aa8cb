"""What clients may send to /v1/chat/completions and /tokenize."""

from typing import Annotated, Literal

from pydantic import Field

from engine.server.errors import ApiError
from engine.server.protocol import MAX_LOGPROBS, GenerationRequest, Strict


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"] = Field(description="as the chat template knows it")
    content: str | Annotated[list[TextPart], Field(max_length=1000)] = Field(description="a text, or text parts")
    name: str | None = Field(None, description="of the speaker, where the template shows it")

    def template_value(self) -> dict[str, str]:
        """As chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text} | ({"name": self.name} if self.name else {})


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)] = Field(
        description="rendered by the model's own chat template"
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="output tokens at most; else what fits")
    max_tokens: int | None = Field(None, ge=1, description="the older name; both may be sent if they are equal")
    logprobs: bool = Field(False, description="log-probabilities of the output tokens")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS, description="alternatives to each; needs logprobs")
    add_special_tokens: bool = Field(False, description="... beside those that the template writes")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def refuse_contradictions(self) -> None:
        super().refuse_contradictions()
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "send `max_completion_tokens` or `max_tokens`, not both with different values"
            raise ApiError(400, message, param="max_tokens", code="invalid_value")
        if self.top_logprobs and not self.logprobs:
            message = "`top_logprobs` needs `logprobs`: true"
            raise ApiError(400, message, param="top_logprobs", code="invalid_value")


class TokenizeRequest(Strict):
    """POST /tokenize: a text, or messages to be rendered by the chat template."""

    model: str | None = Field(None, description="name of the served model")
    prompt: str | None = Field(None, description="a text; or send messages")
    messages: list[Message] | None = Field(None, description="rendered by the chat template; or send prompt")
    add_special_tokens: bool = Field(True, description="the tokenizer adds its own to a prompt")
