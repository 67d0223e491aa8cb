"""YAML files of the operator: read with a sentence for every fault, and looked at for changes."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from sojourn.metrics.errors import InputError

Stamp = tuple[int, int, int] | None
# Beside YAMLError, PyYAML's constructors raise what Python does: for a day such as 2026-02-30, for `!!int x`, for
# `!!timestamp x`, and for lists a thousand deep.
_FAULTS = (yaml.YAMLError, ValueError, AttributeError, RecursionError)


def read_yaml(path: Path) -> Any:
    """The content of a file. Raises InputError for one that cannot be read, is no YAML, or has a name twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise InputError(f"{path} cannot be read: {reason}; correct the path or the file") from None
    try:
        return yaml.load(text, _UniqueLoader)
    except _FAULTS as error:
        raise InputError(f"{path} is no YAML: {_fault(error)}") from None


def _fault(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return " ".join(str(error).split())
    return f"{error.problem}, at line {mark.line + 1}, column {mark.column + 1}"


def first_fault(invalid: ValidationError, tagged: str | None = None) -> str:
    """The place of the first fault, what is wrong there, and the way out.

    `tagged`: the key whose entries are a tagged union. Pydantic puts the tag into the place; the file has none there.
    """
    first = invalid.errors(include_url=False, include_input=False)[0]
    place = first["loc"]
    if place[:1] == (tagged,):
        place = place[:2] + place[3:]
    where = ".".join(map(str, place)) or "the file"
    context = first.get("ctx", {})
    name = context.get("discriminator", "").strip("'")
    match first["type"]:
        case "extra_forbidden":
            return f"{where} is not a setting; remove it, or correct its name"
        case "missing":
            return f"{where} is missing; add it"
        case "union_tag_invalid":
            return f"{where}.{name} is {context['tag']!r}; it must be one of {context['expected_tags']}"
        case "union_tag_not_found":
            return f"{where}.{name} is missing; add it"
    reason = first["msg"].removeprefix("Value error, ")
    return f"{where} is not valid: {reason[0].lower()}{reason[1:]}"


def stamps_of(files: Iterable[Path]) -> list[Stamp]:
    """Changes with the files; None for one that is not there."""
    return [_stamp_of(file) for file in files]


def _stamp_of(file: Path) -> Stamp:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class _UniqueLoader(yaml.SafeLoader):
    """A name that stands twice is a mistake; YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = Counter(str(self.construct_object(name, deep=deep)) for name, _ in node.value)
        for name, times in names.most_common(1):
            if times > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)
