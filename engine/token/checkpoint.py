"""Reads the JSON files of a Hugging Face checkpoint folder, or what a GGUF file says in their place.

Knows no torch, so that the front can use it.
"""

import json
from pathlib import Path
from typing import Any

from sojourn.engine.token.gguf.file import gguf_path, opened
from sojourn.engine.token.gguf.tokenizer import document, tokenizer_json
from sojourn.metrics.errors import ModelError


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint; {} where it has none. A GGUF file stands for those that are not beside it."""
    path = _file(folder, name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        gguf = gguf_path(folder)
        return {} if gguf is None else document(opened(gguf), name)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8, and numbers of thousands of digits
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def tokenizer_source(folder: Path) -> str | None:
    """The text of the checkpoint's tokenizer.json; None where it has none. Raises ModelError."""
    path = _file(folder, "tokenizer.json")
    if not path.is_file():
        gguf = gguf_path(folder)
        return None if gguf is None else tokenizer_json(opened(gguf))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


def said_by(folder: Path, name: str) -> Path:
    """The file that a JSON file of the checkpoint is read from: itself, or the GGUF file that stands for it."""
    path = _file(folder, name)
    return path if path.is_file() else gguf_path(folder) or path


def has_tokenizer(folder: Path) -> bool:
    """Whether there is one, or may be: a GGUF file is not read for the answer."""
    return _file(folder, "tokenizer.json").is_file() or gguf_path(folder) is not None


def _file(folder: Path, name: str) -> Path:
    """A file of the checkpoint. A GGUF file that is named itself has only its tokenizer's files beside it: a
    config.json there may be of another model."""
    return folder.parent / name if name != "config.json" and gguf_path(folder) == folder else folder / name


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder, which must be there and name its architecture.

    A model that also reads images has the settings of its language part in `text_config`: they are given as if they
    stood beside it. What stands there already is kept.
    """
    if not folder.is_dir() and gguf_path(folder) is None:
        raise ModelError(
            f"model folder {folder} does not exist; give the path of a Hugging Face checkpoint or GGUF file"
        )
    config = read_json(folder, "config.json")
    if not config.get("architectures"):
        raise ModelError(f"{folder} has no config.json with `architectures`, so it is not a Hugging Face checkpoint")
    names = config["architectures"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json has architectures={names!r}; it must be a list of names")
    text = config.get("text_config")
    return text | config if isinstance(text, dict) else config
