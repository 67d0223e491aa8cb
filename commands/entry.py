"""The way into a verb and out of it: signals, errors and exit codes around `commands.program`.

Little is imported before Ctrl-C is safe: loading the verbs takes a good part of a second, in which nothing has begun.
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from sojourn.commands.stopped import NOTHING_KEPT, SENDING, kept
from sojourn.metrics.exit_codes import Ended

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RETRY_S = 0.05


def main() -> None:
    """Runs the command line. An expected failure is a sentence on stderr and an exit code, see `metrics.errors`."""
    _on_stop(_leave_early)
    if sys.argv[1:] == ["--version"]:  # scripts ask for it, and need no verb loaded
        from sojourn.metrics.version import own_version

        print(f"sojourn {own_version()}")
        return
    from sojourn.commands.program import app

    stop = _Stop()
    _on_stop(stop)
    sys.unraisablehook = stop.not_raised
    try:
        code = _code_of(app)
    except BaseException:
        if not stop.came:
            raise
        code = Ended.STOPPED  # an import or a library made another error of the interruption
    finally:
        if stop.came and not kept and is_sending():
            with suppress(OSError):  # a terminal that was closed
                print(NOTHING_KEPT)
        _on_stop(_leave)  # what remains is the end of the process
        _flush()
    sys.exit(Ended.STOPPED if stop.came else code)


class _Stop:
    """Ctrl-C, SIGTERM or a closed terminal: ends an experiment so that its processes stop and its records stay."""

    came = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt

    def not_raised(self, lost: Any) -> None:
        """For `sys.unraisablehook`: an interruption that met a destructor or a callback comes once more."""
        if lost.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(lost)
            return
        import threading

        threading.Timer(RETRY_S, os.kill, (os.getpid(), signal.SIGINT)).start()


def _code_of(app: Any) -> int | str | None:
    """Of the verb that the command line names."""
    from sojourn.commands.cli import program_name
    from sojourn.metrics.errors import SojournError
    from sojourn.metrics.installed import say_missing

    try:
        app(prog_name=program_name())
    except SystemExit as ended:
        return ended.code
    except KeyboardInterrupt:
        return Ended.STOPPED
    except SojournError as error:
        print(f"sojourn: {error}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        module = (error.name or "sojourn").partition(".")[0]
        if module == "sojourn" or module in sys.stdlib_module_names:
            raise
        print(f"sojourn: {say_missing([module])}", file=sys.stderr)
        return Ended.FAILED
    return Ended.DONE


def _on_stop(action: Any) -> None:
    """What was ignored from the start stays so: a shell starts a job in the background without Ctrl-C."""
    for number in STOPS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, action)


def is_sending() -> bool:
    return sys.argv[1:2] != [] and sys.argv[1] in SENDING and not {"-h", "--help"} & {*sys.argv}


def _leave_early(number: int, frame: FrameType | None) -> None:
    if is_sending():
        with suppress(OSError):
            os.write(1, f"{NOTHING_KEPT}\n".encode())
    os._exit(Ended.STOPPED)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(Ended.STOPPED)


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `--json | head`
        from sojourn.commands.cli import discard_output

        discard_output(sys.stdout)
