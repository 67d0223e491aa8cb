"""The engine's settings as options of a command line, so that every setting is declared once, in engine/config.py."""

import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer
import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from sojourn.engine.config import EngineConfig, complaint
from sojourn.metrics.errors import InputError

UNITS = ("seconds", "ms", "tokens", "bytes", "gib", "blocks", "path", "dir", "folder", "url", "host", "port")


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command one option for each field of EngineConfig, so that every setting is declared once.

    The command takes them as keyword arguments; the parameters that it names itself stay, behind them.
    """
    parameters = []
    own_first = sorted(EngineConfig.model_fields, key=lambda name: name not in EngineConfig.__annotations__)
    for name in own_first:
        field = EngineConfig.model_fields[name]
        if field.is_required():
            declared = Annotated[field.annotation, typer.Argument(help=field.description)]
        else:
            panel = field.json_schema_extra["panel"]
            names = ("--lora", "--lora-adapters") if name == "lora_adapters" else (_flag(name, field),)
            option = typer.Option(
                *names, help=_described(field), metavar=_value_name(name, field), rich_help_panel=panel
            )
            declared = Annotated[_parsed_type(field), option]
        default = inspect.Parameter.empty if field.is_required() else field.default
        if _is_map(field):
            default = None
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=declared)
        )
    own = inspect.signature(command).parameters.values()
    parameters += [parameter for parameter in own if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _flag(name: str, field: FieldInfo) -> str:
    """Named here: Typer 0.27 takes a metavar such as HOST for the name of `host`, and offers --HOST."""
    flag = name.replace("_", "-")
    return f"--{flag}/--no-{flag}" if is_switch(field) else f"--{flag}"


def is_switch(field: FieldInfo) -> bool:
    """Whether a setting is true or false, and perhaps null where nobody chose."""
    return bool in (field.annotation, *typing.get_args(field.annotation))


def _is_map(field: FieldInfo) -> bool:
    return typing.get_origin(field.annotation) is dict


def _parsed_type(field: FieldInfo) -> Any:
    """What the command line reads a value as. A number or a word is read as text, and EngineConfig tells which."""
    if _is_map(field):
        return list[str] | None  # NAME=VALUE each
    members = [member for member in typing.get_args(field.annotation) if member is not type(None)]
    is_choice = [typing.get_origin(member) is Literal for member in members]
    return str if any(is_choice) and not all(is_choice) else field.annotation


def _value_name(name: str, field: FieldInfo) -> str | None:
    """What stands for the value on the page of --help: its unit, or its kind."""
    if _is_map(field):
        return "NAME=FOLDER"
    members = [field.annotation, *typing.get_args(field.annotation)]
    if is_switch(field):
        return None
    unit = name.rsplit("_", 1)[-1]
    if unit in UNITS:
        return unit.upper() if unit != "gib" else "GiB"
    if any(typing.get_origin(member) is Literal for member in members):
        return "CHOICE"
    return "N" if int in members else "X" if float in members else "TEXT"


def _described(field: FieldInfo) -> str:
    """A setting's description, and what it may be where that is a choice."""
    members = [field.annotation, *typing.get_args(field.annotation)]
    choices = [typing.get_args(member) for member in members if typing.get_origin(member) is Literal]
    is_listed = choices and len(choices[0]) > 1  # a lone word beside numbers is in the description
    return f"{field.description}; one of {', '.join(choices[0])}" if is_listed else field.description


def assignments(pairs: list[str], option: str) -> dict[str, Any]:
    """KEY=VALUE pairs, with values read as YAML: 64 is a number, false a truth value. Raises InputError."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise InputError(f"{option} {pair!r} is not KEY=VALUE, such as num_kv_blocks=1024")
        found[key.strip().replace("-", "_")] = setting_value(value, f"{option} {key.strip()}")
    return found


def setting_value(text: str, named: str) -> Any:
    """A value as YAML has it, but for `on` and `off`: they are words, as settings have them, and no truth values.

    `named` says what the value is of, for the sentence of the InputError that it raises.
    """
    if text.strip() in ("on", "off"):
        return text.strip()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise InputError(f"{named}={text}: give a number, a word, true or false") from None


def engine_config(settings: dict[str, Any]) -> EngineConfig:
    """The checked settings. Raises InputError with the first fault."""
    try:
        return EngineConfig(**settings)
    except ValidationError as error:
        raise InputError(complaint(error)) from None


def check_settings(*layers: dict[str, Any]) -> None:
    """Raises InputError for a setting that the engine refuses; a later layer overrides. The model may be missing."""
    merged: dict[str, Any] = {"model": "tiny-model"}
    for layer in layers:
        merged |= layer
    engine_config(merged)
