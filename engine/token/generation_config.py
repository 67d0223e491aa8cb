"""How a checkpoint wants to be sampled: generation_config.json, or the keys `general.sampling.*` of a GGUF file."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sojourn.engine.token.checkpoint import read_json, said_by
from sojourn.engine.token.gguf.config import SAMPLING
from sojourn.engine.token.models.settings import shown
from sojourn.metrics.errors import ModelError

# Key → type, least and most: what a request may say, too.
TAKEN: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, 2),
    "top_p": (float, 0, 1),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 0.01, 100),
    "max_new_tokens": (int, 1, 2**31 - 1),
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets for a field that it does not send: `values` by the names of fields of a request.

    `max_tokens` is the output of a request without a limit, as far as it fits; None is all that fits.
    """

    values: dict[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    source: str = ""  # name of the file

    @property
    def shown(self) -> dict[str, float]:
        return self.values | ({} if self.max_tokens is None else {"max_tokens": self.max_tokens})

    def sentence(self) -> str | None:
        """For the page of the start; None where the checkpoint asks for nothing."""
        if not self.shown:
            return None
        wanted = ", ".join(f"{name}={value:g}" for name, value in self.shown.items())
        return f"requests that do not say otherwise get {wanted} of {self.source}; generation_config=none ignores it"


def sampling_defaults(folder: Path, setting: str = "auto") -> SamplingDefaults:
    """Those of a checkpoint; none with the setting `none`. Raises ModelError for a value that no request may have.

    As in vLLM, `do_sample` counts for nothing: a checkpoint that says false is sampled as its other keys say.
    """
    if setting == "none":
        return SamplingDefaults()
    name = "generation_config.json"
    if not said_by(folder, name).is_file():  # older checkpoints have these keys in the other file
        name = "config.json"
    path, said = said_by(folder, name), read_json(folder, name)
    names = {ours: theirs for theirs, ours in SAMPLING.items()} if path.suffix == ".gguf" else {}
    values = {key: _checked(path, names.get(key, key), said[key], *TAKEN[key])
              for key in TAKEN if said.get(key) is not None}  # fmt: skip
    most = values.pop("max_new_tokens", None)
    if "top_k" in values:
        values["top_k"] = max(0, values["top_k"])
    return SamplingDefaults(values, None if most is None else int(most), path.name)


def _checked(path: Path, key: str, value: Any, kind: type, least: float, most: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or (kind is int and value != int(value)):
        number = "a whole number" if kind is int else "a number"
        raise ModelError(
            f"{path} has {key}={shown(value)}; it must be {number} from {least:g} to {most:g}: correct it, or set "
            "generation_config=none"
        )
    return kind(value)
