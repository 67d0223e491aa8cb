"""Jinja as transformers sets it up for chat templates: the same sandbox, filters, globals and tags."""

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


def environment(clock: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    """`clock` tells the time to templates that write it."""
    jinja = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], cache_size=0
    )
    jinja.filters["tojson"] = _to_json
    jinja.globals |= {
        "raise_exception": _raise, "strftime_now": lambda format: clock().strftime(format),
        "dict": _Dict(), "namespace": _Namespace,
    }  # fmt: skip
    return jinja


class _Generation(Extension):
    """{% generation %} marks what a model is trained on. It changes no text, and what is set in it stays in it."""

    tags = {"generation"}  # noqa: RUF012 jinja2 reads it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_as_it_is"), [], [], body).set_lineno(line)

    def _as_it_is(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` to a template: not the class, whose attributes would lead on."""

    def __call__(self, *pairs: Any, **entries: Any) -> dict:
        return dict(*pairs, **entries)

    def fromkeys(self, *arguments: Any) -> dict:
        return dict.fromkeys(*arguments)


class _Namespace(Namespace):
    """Refuses names that begin with an underscore, under which Python keeps what no template may change."""

    def __init__(*arguments: Any, **entries: Any) -> None:  # `self` may be the name of an entry
        self, *rest = arguments
        content = dict(*rest, **entries)
        for name in content:
            _check_name(name)
        Namespace.__init__(self, content)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, and this is {name!r}")


def _to_json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own, it escapes nothing for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> NoReturn:
    raise TemplateError(message)
