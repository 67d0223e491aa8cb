"""Reads the JSON files of a Hugging Face checkpoint folder. Knows no torch, so that the front can use it."""

import json
from pathlib import Path
from typing import Any

from metrics.errors import ModelError


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint; {} where it has none."""
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{folder / name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also bytes that are no UTF-8, and numbers of thousands of digits
        raise ModelError(f"{folder / name} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{folder / name} is not a JSON object")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder, which must be there and name its architecture.

    A model that also reads images has the settings of its language part in `text_config`: they are given as if they
    stood beside it. What stands there already is kept.
    """
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; give the path of a Hugging Face checkpoint")
    config = read_json(folder, "config.json")
    if not config.get("architectures"):
        raise ModelError(f"{folder} has no config.json with `architectures`, so it is not a Hugging Face checkpoint")
    names = config["architectures"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"config.json has architectures={names!r}; it must be a list of names")
    text = config.get("text_config")
    return text | config if isinstance(text, dict) else config
