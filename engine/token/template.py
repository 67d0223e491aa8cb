"""Chat messages → prompt, by the checkpoint's own template, in a sandbox with a bound on its work."""

from pathlib import Path
from typing import Any

import minijinja

from engine.token.checkpoint import read_json

FUEL = 1_000_000  # instructions that one rendering may take: a chat of 1,000 messages takes some 20,000


class TemplateError(Exception):
    """Messages that the model's template refuses, or a model without one."""


class ChatTemplate:
    """Renders messages. Templates come from the checkpoint only, never from a request."""

    def __init__(self, folder: Path):
        config = read_json(folder, "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several named ones
            source = {item["name"]: item["template"] for item in source}.get("default")
        self._special = {key: _content(config.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._environment: minijinja.Environment | None = None
        if source:
            self._environment = minijinja.Environment(
                fuel=FUEL, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True, pycompat=True
            )
            self._environment.add_function("raise_exception", _raise)
            self._environment.add_template("chat", source)

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt for the assistant's next turn. Raises TemplateError with a sentence."""
        if self._environment is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        try:
            return self._environment.render_template(
                "chat", messages=messages, add_generation_prompt=True, tools=None, **self._special
            )
        except minijinja.TemplateError as error:
            raise TemplateError(
                f"the model's chat template refuses these messages: {str(error).splitlines()[0]}"
            ) from None


def _content(token: Any) -> str:
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _raise(message: str) -> None:
    raise TemplateError(message)
