"""The program in this process: a start of Python and its imports take a second each time."""

import io
import os
import shlex
import signal
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import typer

from sojourn.commands import entry, program


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_program(*arguments: str, cwd: Path = Path(".")) -> Done:
    """What `sojourn ARGUMENTS` prints, and its exit code. For what ends before it starts a process or a thread."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in entry.STOPS}
    environment = dict(os.environ)
    with chdir(cwd), patch.object(sys, "argv", ["sojourn", *arguments]), redirect_stdout(out), redirect_stderr(err), \
            patch.object(sys, "unraisablehook", sys.unraisablehook):  # fmt: skip
        try:
            entry.main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.environ.clear()
            os.environ.update(environment)
    return Done(code, out.getvalue(), err.getvalue())


def parsed(command: str) -> tuple[str, dict[str, Any]]:
    """The verb of a printed command and its parameters, as the program itself reads them; nothing is carried out."""
    program_word, *words = shlex.split(command)
    assert program_word == "sojourn", command
    group = typer.main.get_command(program.app)
    context = group.make_context("sojourn", words, ignore_unknown_options=True, allow_interspersed_args=False)
    names = []
    while hasattr(group, "resolve_command"):
        name, group, words = group.resolve_command(context, words)
        names.append(name)
        if hasattr(group, "resolve_command"):
            continue
        context = group.make_context(name, words, parent=context)
    return " ".join(names), dict(context.params)
