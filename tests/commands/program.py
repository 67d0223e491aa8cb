"""The program in this process: a start of Python and its imports take a second each time."""

import io
import os
import signal
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from sojourn.commands import entry


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
