"""What a request asked for, in the words of OpenTelemetry's GenAI conventions: attributes of its trace."""

from typing import Any

from engine.server.openai.protocol import CompletionRequest, GenerationRequest


def asked(body: GenerationRequest, max_tokens: int | None) -> dict[str, Any]:
    """Attributes of a checked body, without those that it left open. No text of the prompt is among them."""
    wanted = {
        "gen_ai.operation.name": "text_completion" if isinstance(body, CompletionRequest) else "chat",
        "gen_ai.request.max_tokens": max_tokens,
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.top_k": body.top_k,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.stop_sequences": body.stops or None,
        "gen_ai.request.stream": body.stream,
        "gen_ai.request.choice.count": body.choices,
    }
    return {name: value for name, value in wanted.items() if value is not None}
