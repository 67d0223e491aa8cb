"""The chat templates of a checkpoint, and the tokens that they may name, as transformers' tokenizers find them."""

from pathlib import Path
from typing import Any

from sojourn.engine.token.checkpoint import read_json
from sojourn.metrics.errors import ModelError

TEMPLATE_FOLDER = "additional_chat_templates"  # beside the tokenizer, one file for each name
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def template_sources(folder: Path) -> dict[str, str]:
    """The templates by name. Those for chats are `default`, and `tool_use` where chats with tools have their own.

    Files beside the tokenizer replace what its configuration says. Raises ModelError.
    """
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if named := {name: _text(file) for name, file in files.items() if file.is_file()}:
        return named
    for name in ("tokenizer_config.json", "chat_template.json"):  # the second is a processor's
        if found := read_json(folder, name).get("chat_template"):
            return _by_name(found, folder / name)
    return {}


def special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that the checkpoint names; those that it does not name are undefined in its templates."""
    config = read_json(folder, "special_tokens_map.json")
    config |= {name: value for name, value in read_json(folder, "tokenizer_config.json").items() if value is not None}
    extra = config.get("extra_special_tokens")
    config |= extra if isinstance(extra, dict) else {}
    tokens = {name: _content(config.get(name)) for name in (*SPECIAL, *(extra if isinstance(extra, dict) else ()))}
    return {name: token for name, token in tokens.items() if isinstance(token, str)}


def _by_name(found: Any, path: Path) -> dict[str, str]:
    """Of one text, of an object of them, or of a list of objects with `name` and `template`."""
    named = {"default": found} if isinstance(found, str) else found
    if isinstance(found, list) and all(isinstance(item, dict) for item in found):
        named = {item.get("name"): item.get("template") for item in found}
    if not isinstance(named, dict) or not all(isinstance(text, str) for pair in named.items() for text in pair):
        message = "must be a text, or a list of objects with `name` and `template`, which are texts"
        raise ModelError(f"`chat_template` of {path} {message}; correct it")
    return named


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"the chat template {file} cannot be read: {error}; correct it") from None


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
