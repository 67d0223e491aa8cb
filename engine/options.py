"""The engine's settings as options of a command line, so that every setting is declared once, in engine/config.py."""

import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Literal

import typer
from pydantic.fields import FieldInfo

from engine.config import EngineConfig


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command one option for each field of EngineConfig, so that every setting is declared once."""
    parameters = []
    for name, field in EngineConfig.model_fields.items():
        if field.is_required():
            declared = Annotated[field.annotation, typer.Argument(help=field.description)]
        else:
            declared = Annotated[field.annotation, typer.Option(help=_described(field), metavar=" ")]
        default = inspect.Parameter.empty if field.is_required() else field.default
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=declared)
        )
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _described(field: FieldInfo) -> str:
    """A setting's description, and what it may be where that is a choice."""
    members = [field.annotation, *typing.get_args(field.annotation)]
    choices = [typing.get_args(member) for member in members if typing.get_origin(member) is Literal]
    return f"{field.description}; one of {', '.join(choices[0])}" if choices else field.description
