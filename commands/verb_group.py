"""The verbs of the table as click sees them: a verb's module is imported once somebody calls it, an old name leads to
the new one."""

import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from sojourn.commands.help_page import HelpGroup, HelpPage, Rows
from sojourn.commands.verbs import GROUPS, HOLDERS, OLD_NAMES, VERBS, Renamed, Verb
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import epilog

PROGRAM = "sojourn"
HELP = ("-h", "--help")
# for a verb that parses its own arguments, --help among them
OWN_PARSER = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}


class _Verbs(Mapping[str, Any]):
    """The commands below a holder, or of the program (""), by their next word. A look at one imports its module."""

    def __init__(self, holder: str) -> None:
        start = f"{holder} " if holder else ""
        below = [(verb.name.removeprefix(start), verb) for verb in VERBS if verb.name.startswith(start)]
        self.rows = {word: (verb, has_more) for name, verb in below for word, has_more, _ in [name.partition(" ")]}

    def __getitem__(self, word: str) -> Any:
        verb, has_more = self.rows[word]
        command = _holder(word) if has_more else _loaded(verb)
        command.name = word
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def stub(self, word: str) -> TyperCommand:
        """A command that only has a name and a line of help."""
        verb, has_more = self.rows[word]
        return TyperCommand(word, help=HOLDERS[word] if has_more else verb.summary)


def _holder(word: str) -> Any:
    page = HelpPage(name=word, help=HOLDERS[word], cls=VerbGroup, no_args_is_help=True)
    return typer.main.get_group(page)


def _loaded(verb: Verb) -> Any:
    function = getattr(import_module(f"sojourn.commands.{verb.function}"), verb.function)
    if isinstance(function, typer.Typer):
        return typer.main.get_group(function)
    page = HelpPage(add_completion=False)
    page.command(epilog=epilog(verb.name), **OWN_PARSER if verb.has_own_parser else {})(function)
    return typer.main.get_command(page)


class VerbGroup(HelpGroup):
    """The program, and each holder of further verbs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Verbs("" if self.name == PROGRAM else str(self.name))
        self.shows_all = False
        self.only_names = False

    def rows(self, ctx: typer.Context) -> Rows:
        if self.name != PROGRAM:
            return {"Commands": [(word, self.commands.stub(word).help) for word in self.commands]}
        shown = GROUPS if self.shows_all else {"Commands": [verb for verb in VERBS if verb.is_main]}
        return {title: [(verb.name, verb.summary) for verb in verbs] for title, verbs in shown.items()}

    def list_commands(self, ctx: typer.Context) -> list[str]:
        return [*self.commands]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        known = cmd_name in self.commands.rows
        return self.commands.stub(cmd_name) if known and self.only_names else self.commands.get(cmd_name)

    def shell_complete(self, ctx: typer.Context, incomplete: str) -> list[Any]:
        self.only_names = True  # no verb is imported to complete its name
        return super().shell_complete(ctx, incomplete)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        if self.name == PROGRAM and "--all" in args and {*args} <= {"help", "--all", *HELP}:
            self.shows_all = True
            args = ["--help"]
        elif self.name == PROGRAM and args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:
        if self.name == PROGRAM and not ctx.resilient_parsing:
            args = _renamed(args)
        return super().resolve_command(ctx, args)


def _renamed(args: list[str]) -> list[str]:
    """The words that say today what `args` said, and a hint on stderr where that differs. Raises InputError."""
    old = next((name for name in (" ".join(args[:2]), args[0]) if name in OLD_NAMES), None)
    if old is None and args[0] not in _Verbs("").rows:
        raise InputError(_unknown(args[0]))
    if old is None or (args[0] in HOLDERS and args[1:2] and args[1] in (*_Verbs(args[0]), *HELP)):
        return args
    change, rest = OLD_NAMES[old], args[len(old.split()) :]
    if change.one_of and not {word.partition("=")[0] for word in rest} & {*change.one_of, *HELP}:
        raise InputError(f"{old} needs {' or '.join(change.one_of)}: sojourn {change.to} {change.one_of[0]} …")
    changed = [name for name in change.options if name in {word.partition("=")[0] for word in rest}]
    names = [(old, change.to)] * (change.to != old) + [(name, change.options[name]) for name in changed]
    if names:
        print("sojourn:", ", ".join(f"`{was}` is now `{now}`" for was, now in names), file=sys.stderr)
    return [*change.to.split(), *(_renamed_option(word, change) for word in rest)]


def _unknown(word: str) -> str:
    """A sentence with what may be meant: by each word of a verb's name of today, or by its old name."""
    meant = {each: verb.name for verb in VERBS for each in (verb.name, verb.name.split()[-1])}
    meant |= {old: change.to for old, change in OLD_NAMES.items() if old not in HOLDERS}
    close = [name for name in meant if name.startswith(f"{word} ")] or get_close_matches(word, meant, n=2)
    found = dict.fromkeys(f"`sojourn {meant[name]}`" for name in close)
    return f"there is no verb {word!r}; " + (
        f"did you mean {' or '.join(found)}?" if found else "`sojourn help --all` lists all"
    )


def _renamed_option(word: str, change: Renamed) -> str:
    name, equals, value = word.partition("=")
    return change.options.get(name, name) + equals + value
