"""What callers of offline use hand over, checked, and the bar that shows how far their batch is."""

from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sojourn.engine.config import EngineConfig
from sojourn.engine.token.text.tokenizer import NoTokenizer, Tokenizer
from sojourn.metrics.errors import SojournError

# Settings of the front process of a server.
SERVER_SETTINGS = {
    "served_model_name",
    "lora_runtime_loading",
    "lora_folder",
    "max_waiting",
    "seed",
    "tool_format",
    "reasoning_format",
} | {
    name
    for name, field in EngineConfig.model_fields.items()
    if (field.json_schema_extra or {}).get("panel") in ("Server", "Telemetry", "Experiments") and name != "telemetry"
}


class LLMError(SojournError):
    """A prompt or a setting that cannot be honoured, or an engine that failed, with a sentence."""


def prompt_ids(prompt: str | list[int], what: str, tokenizer: Tokenizer | NoTokenizer) -> list[int]:
    """Ids that the model has. Raises LLMError."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise LLMError(f"{what} is no text that UTF-8 can spell: {error}") from None
        prompt = tokenizer.encode(prompt)
    if not isinstance(prompt, list | tuple):
        raise LLMError(f"{what} is {prompt!r}; a prompt is a text or a list of token ids")
    if not prompt:
        raise LLMError(f"{what} is empty; give at least one token")
    vocab_size = tokenizer.vocab_size
    bad = next((token for token in prompt if type(token) is not int or not 0 <= token < vocab_size), None)
    if bad is not None:
        raise LLMError(f"{what} holds token id {bad!r}; ids of this model are 0 to {vocab_size - 1}")
    return list(prompt)


def stop_strings(stop: str | Sequence[str]) -> list[str]:
    """Raises LLMError for a value that can end no text."""
    stops = [stop] if isinstance(stop, str) else list(stop)
    bad = next((text for text in stops if not isinstance(text, str) or not text), None)
    if bad is not None:
        raise LLMError(f"stop string {bad!r} must be a text of at least one character")
    return stops


def progress_bar(shown: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, TextColumn("{task.fields[tokens_per_second]:,.0f} tokens/s"), disable=not shown)
