"""Which config.json a name means: a bundled shape, a folder of a checkpoint, or a file."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from sojourn.metrics.compute.model_sizes import ModelSizes, model_sizes
from sojourn.metrics.errors import InputError, ModelError

PUBLISHED = Path(__file__).parent / "published_models.json"  # name → the sizes in its config.json
SCENARIOS = Path(__file__).parents[2] / "scenarios"
CHECKPOINTS = ("tiny-model", "tiny-mixture", "tiny-draft")  # bundled, with weights
SUFFIXES = ("-instruct", "-it", "-hf", "-chat", "-base")
LARGEST = 8 << 20  # bytes of a config.json


@cache
def published_models() -> dict[str, Mapping[str, Any]]:
    """Name → config.json, of the bundled shapes."""
    found: dict[str, Mapping[str, Any]] = json.loads(PUBLISHED.read_text())
    return found


def bundled_models() -> list[str]:
    """Names of shapes and of checkpoints that are bundled."""
    return [*published_models(), *CHECKPOINTS]


def find_model(name: str) -> ModelSizes:
    """The sizes of a bundled shape, of a folder with a config.json, or of such a file. Raises InputError with the names
    that are near, and ModelError where its weights cannot be counted."""
    return model_sizes(config_of(name), title_of(name))


def title_of(name: str) -> str:
    """What a model is called: a bundled shape by its name, a folder by its own, and its config.json as the folder."""
    path = Path(name)
    if path.is_dir():
        return path.absolute().name
    if path.is_file():
        return path.absolute().parent.name if path.stem == "config" else path.stem
    return known_name(name) or name


def config_path(name: str) -> Path | None:
    """The file that a folder with a config.json, or the path of such a file, means. None where no such file is."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    return path if path.is_file() else None


def config_of(name: str) -> Mapping[str, Any]:
    """The config.json itself. Raises as `find_model`."""
    if Path(name).is_dir() or Path(name).is_file():
        return _read(config_path(name) or Path(name) / "config.json")
    if name in CHECKPOINTS:
        return _read(SCENARIOS / name / "config.json")
    if (known := known_name(name)) is not None:
        return published_models()[known]
    close = get_close_matches(_plain(name), [_plain(each) for each in bundled_models()], n=3, cutoff=0.5)
    near = [each for each in bundled_models() if _plain(each) in close]
    raise InputError(
        f"{name!r} is no folder with a config.json and no bundled shape; "
        + (f"did you mean {' or '.join(near)}?" if near else f"bundled are {', '.join(bundled_models())}")
    )


def known_name(name: str) -> str | None:
    """The bundled shape that a name of a checkpoint means: without its owner, upper case, and endings that change no
    size. None where none is meant."""
    plain = _plain(name)
    return next((each for each in published_models() if _plain(each) == plain), None)


def _plain(name: str) -> str:
    text = name.lower().rstrip("/").rpartition("/")[2].removeprefix("meta-")
    while (ending := next((each for each in SUFFIXES if text.endswith(each)), None)) is not None:
        text = text.removesuffix(ending)
    return text


def _read(path: Path) -> Mapping[str, Any]:
    """With what `hf_quant_config.json` beside it says of quantisation."""
    whole = _json_of(path)
    beside = path.parent / "hf_quant_config.json"
    if whole.get("quantization_config") is None and path.name == "config.json" and beside.is_file():
        said = _json_of(beside).get("quantization")
        if isinstance(said, dict):
            return {**whole, "quantization_config": {"quant_method": "modelopt", **said}}
    return whole


def _json_of(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST:
            raise InputError(f"{path} is larger than {LARGEST >> 20} MiB, so it is no config.json")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is no JSON, so it is no config.json of a model") from None
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds no JSON object, so it is no config.json of a model")
    return found
