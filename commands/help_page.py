"""The page of --help, of the program and of each verb: names, and beside them what they mean.

A name is never cut. One that is longer than its column takes a line of its own, with its meaning below.
"""

import inspect
import re
import shutil
import textwrap
from collections.abc import Callable
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

WIDEST = 110  # columns: longer lines are hard to read
NAME_COLUMN = 30  # names up to here have their meaning beside them
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
TYPE = re.compile(r"<(?:list\[)?(\w+)(?: range)?\]?>|([A-Z]+)(?: RANGE)?")
VALUES = {"str": "TEXT", "string": "TEXT", "int": "N", "integer": "N", "float": "X", "list": "TEXT"}
BOUNDS = (
    (r"(\S+)<=x<=(\S+?)(?=[;\]])", r"\1 to \2"),
    (r"x>=([^;\]]+)", r"at least \1"),
    (r"x<=([^;\]]+)", r"at most \1"),
)

Rows = dict[str, list[tuple[str, str]]]


class HelpPage(typer.Typer):
    """A group of verbs whose --help is printed here."""

    def __init__(self, **settings: Any) -> None:
        names = {"help_option_names": ["-h", "--help"]}
        settings = {"cls": HelpGroup, "context_settings": names, "pretty_exceptions_enable": False} | settings
        super().__init__(**settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[..., Any]:
        return super().command(name, cls=_Verb, **settings)


class _Verb(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.ignore_unknown_options:  # else the verb has a parser of its own
            from sojourn.commands.spellings import respelled

            known = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
            args = respelled(args, known)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_page(self, ctx)


class HelpGroup(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_page(self, ctx)

    def rows(self, ctx: Any) -> Rows:
        """Its verbs: title, then names and meanings."""
        found: Rows = {}
        for name in self.list_commands(ctx):
            each = self.get_command(ctx, name)
            if not each.hidden:
                first = inspect.cleandoc(each.short_help or each.help or "").split("\n\n")[0]
                found.setdefault("Commands", []).append((name, first))
        return found


def print_page(verb: Any, ctx: Any) -> None:
    from sojourn.commands.cli import out

    width = min(shutil.get_terminal_size().columns, WIDEST)
    lines = [*_paragraph(f"Usage: {_usage(verb, ctx)}", width, hanging=7), Text()]
    for paragraph in inspect.cleandoc(verb.help or "").split("\n\n"):
        lines += [*_paragraph(paragraph, width), Text()]
    sections = _sections(verb, ctx)
    names = [len(name) for _, rows in sections for name, _ in rows]
    column = max([length for length in names if length <= NAME_COLUMN], default=NAME_COLUMN) + 4
    for title, rows in sections:
        lines += [Text(title, style="bold"), *_rows(rows, column, width), Text()]
    for paragraph in inspect.cleandoc(verb.epilog or "").split("\n\n"):
        lines += _paragraph(paragraph, width)
    for line in lines:
        out.print(line, soft_wrap=True)


def _usage(verb: Any, ctx: Any) -> str:
    pieces = [ctx.command_path, verb.options_metavar or ""]
    pieces += [_argument_name(param) for param in verb.get_params(ctx) if param.param_type_name == "argument"]
    return " ".join([*pieces, *(["COMMAND ..."] if isinstance(verb, TyperGroup) else [])])


def _sections(verb: Any, ctx: Any) -> list[tuple[str, list[tuple[str, str]]]]:
    """Titles, and what stands below each: name, meaning. Arguments come first, verbs of a group before its options."""
    arguments: Rows = {}
    options: Rows = {}
    for param in verb.get_params(ctx):
        if (record := param.get_help_record(ctx)) is None:  # hidden
            continue
        meaning = _plain_bounds(record[1])
        panel = getattr(param, "rich_help_panel", None)
        if param.param_type_name == "argument":
            arguments.setdefault(panel or "Arguments", []).append(
                (_argument_name(param), meaning.removesuffix("[required]").rstrip())
            )
        else:
            options.setdefault(panel or "Options", []).append((_option_name(param, ctx), meaning))
    verbs = verb.rows(ctx) if isinstance(verb, HelpGroup) else {}
    own = {"Options": options.pop("Options", [])}  # --help is among them: they stand last
    return [item for part in (arguments, verbs, options, own) for item in part.items() if item[1]]


def _argument_name(param: Any) -> str:
    name = (param.metavar or param.name.upper()).removesuffix("…")
    if param.nargs != 1 and not name.endswith("..."):
        name += "..."
    return name if param.required or name.startswith("[") else f"[{name}]"


def _option_name(param: Any, ctx: Any) -> str:
    """--name VALUE; both names of a pair, so that a search finds them; short names first."""
    long = [name for name in param.opts if name.startswith("--")]
    short = [name for name in param.opts if not name.startswith("--")]
    names = ", ".join([*short, *long, *param.secondary_opts])
    return names if param.is_flag or param.count else f"{names} {_value_name(param, ctx)}"


def _value_name(param: Any, ctx: Any) -> str:
    """What stands for the value: the metavar, the choices, or what kind of value it is."""
    if param.metavar:
        return str(param.metavar)
    kind = str(param.get_help_record(ctx)[0]).split(" / ")[0].split("--")[-1].partition(" ")[2].strip()
    if found := TYPE.fullmatch(kind):
        name = (found[1] or found[2]).lower()
        return VALUES.get(name, name.upper())
    return kind.strip("<>[]")


def _plain_bounds(meaning: str) -> str:
    """The bounds that typer writes at the end, in words."""
    head, bracket, facts = meaning.rpartition("  [")
    for pattern, words in BOUNDS:
        facts = re.sub(pattern, words, facts)
    return head + bracket + facts


def _rows(rows: list[tuple[str, str]], column: int, width: int) -> list[Text]:
    lines = []
    for name, meaning in rows:
        wrapped = _wrapped(meaning, width - column) or [""]
        head = Text("  ") + Text(name, style="cyan")
        if len(name) + 4 <= column:
            lines.append(head + " " * (column - 2 - len(name)) + _highlighted(wrapped.pop(0)))
        else:
            lines.append(head)
        lines += [Text(" " * column) + _highlighted(line) for line in wrapped]
    return lines


def _paragraph(text: str, width: int, hanging: int = 0) -> list[Text]:
    wrapped = _wrapped(text, width - hanging)
    return [_highlighted(" " * (hanging if place else 0) + line) for place, line in enumerate(wrapped)]


def _wrapped(text: str, width: int) -> list[str]:
    plain = " ".join(text.replace("`", "").split())
    return textwrap.wrap(plain, max(width, 20), break_long_words=False, break_on_hyphens=False)


def _highlighted(line: str) -> Text:
    shown = Text(line)
    shown.highlight_regex(OPTION, "cyan")
    return shown
