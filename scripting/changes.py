"""KEY=VALUE words of a command line, or named values, as changes of a replay. Several values make a grid."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from sojourn.metrics.errors import InputError
from sojourn.metrics.prediction import FACTORS, REMOVED, ROUTINGS, Change, change_words

WORDS = {"arrivals": ("recorded", "even"), "routing": ROUTINGS, "servers": ("recorded", "equal")}
WHOLE = ("replicas", "sessions")
MOST_CHANGES = 500


def grid(words: Sequence[str], option: str = "--set") -> list[Change]:
    """One change for each combination of the values. Raises InputError with a sentence."""
    axes: list[list[tuple[str, Any]]] = []
    for word in words:
        key, equals, values = word.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key or not values.strip(" ,"):
            raise InputError(f"{option} {word!r} is not KEY=VALUE, such as max_num_seqs=32,64")
        if any(axis[0][0] == key for axis in axes):
            raise InputError(f"{option} names {key} twice; give its values together: {key}=A,B")
        axes.append([(key, _value(key, value.strip(), option)) for value in values.split(",") if value.strip()])
    return _combined(axes, option)


def changes_of(values: Mapping[str, Any], option: str = "replay:") -> list[Change]:
    """The same of values by name: `{"max_num_seqs": [32, 64], "removed": {"client.network": 1}}`. Raises InputError."""
    axes: list[list[tuple[str, Any]]] = []
    for key, given in values.items():
        if key == "removed":
            if not isinstance(given, Mapping):
                raise InputError(f"{option} removed is {given!r}; give shares by account, such as client.network: 1")
            axes += [[(f"{REMOVED}{name}", _value(f"{REMOVED}{name}", share, option))] for name, share in given.items()]
            continue
        several = given if isinstance(given, list | tuple) else [given]
        if not several:
            raise InputError(f"{option} {key} has no value; give one or several")
        axes.append([(key, _value(key, value, option)) for value in several])
    return _combined(axes, option)


def _combined(axes: list[list[tuple[str, Any]]], option: str) -> list[Change]:
    combinations = list(product(*axes)) if axes else []
    if len(combinations) > MOST_CHANGES:
        raise InputError(f"{option} makes {len(combinations):,} combinations; at most {MOST_CHANGES} are replayed")
    return [_change(combination) for combination in combinations]


def label(change: Change) -> str:
    """What a change changes, as its words: `max_num_seqs=32 device_speed=2`."""
    return " ".join(change_words(change)) or "unchanged"


def _value(key: str, given: Any, option: str) -> Any:
    """Of text, what it reads as; any other value as it is."""
    if not isinstance(given, str | int | float | None):
        raise InputError(f"{option} {key} is {given!r}; give a number, a word, true, false or null")
    text = str(given)
    if key in WORDS:
        if text not in WORDS[key]:
            raise InputError(f"{option} {key}={text}: give one of {', '.join(WORDS[key])}")
        return text
    from sojourn.engine.options import setting_value

    value = setting_value(given, f"{option} {key}") if isinstance(given, str) else given
    if key in FACTORS or key.startswith(REMOVED):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{option} {key}={text}: give a number, such as {key}={1 if '.' in key else 2}")
        return float(value)
    if key in WHOLE and (isinstance(value, bool) or not isinstance(value, int)):
        raise InputError(f"{option} {key}={text}: give a whole number, such as {key}=2")
    return value


def _change(pairs: Sequence[tuple[str, Any]]) -> Change:
    fields: dict[str, Any] = {"settings": {}, "removed": {}}
    for key, value in pairs:
        if key in (*FACTORS, *WORDS, *WHOLE):
            fields[key] = value
        elif key.startswith(REMOVED):
            fields["removed"][key.removeprefix(REMOVED)] = value
        else:
            fields["settings"][key] = value
    return Change(**fields)
