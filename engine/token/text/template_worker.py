"""Renders chat templates in a process of its own, which a template may end: its work and its memory are bounded.

python -m sojourn.engine.token.text.template_worker, its stdin a socket: `TemplateProcesses` starts it. Knows no torch.
"""

import json
import os
import resource
import signal
import socket
import struct
import warnings
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template
from jinja2.exceptions import TemplateRuntimeError, TemplateSyntaxError

from sojourn.engine.token.text.jinja import environment
from sojourn.engine.token.text.template_variables import template_variables

MEMORY_BYTES = 1 << 30  # of the whole process: an idle one has some 50 MiB
TOO_MUCH_MEMORY = 3  # the exit status
LENGTH = struct.Struct("<Q")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the end of the socket is our end
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # no file is written here
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    bound = MEMORY_BYTES if most == resource.RLIM_INFINITY else min(most, MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (bound, most))
    warnings.simplefilter("ignore")  # of Python's compiler, which knows no templates
    renderer = Renderer()
    with socket.socket(fileno=0) as connection:
        while (frame := received(connection)) is not None:
            try:
                request = json.loads(frame)
                # CPU time, not wall time: a busy machine must not refuse a chat. The signal's default ends the process.
                signal.setitimer(signal.ITIMER_PROF, request.pop("cpu_seconds"))
                answer = json.dumps(renderer.answer(**request)).encode()
                signal.setitimer(signal.ITIMER_PROF, 0)
            except MemoryError:
                os._exit(TOO_MUCH_MEMORY)
            connection.sendall(LENGTH.pack(len(answer)) + answer)


class Renderer:
    """Answers requests. The templates that it had last are compiled."""

    def __init__(self) -> None:
        self._now = datetime.min
        self._environment = environment(lambda: self._now)
        self._compiled = lru_cache(8)(self._environment.from_string)

    def answer(self, source: str, **rendering: Any) -> dict[str, Any]:
        """{"text"}, or without values {"reads"}: the variables that the template does not set. Else {"error", "kind"}.

        Kinds: `syntax` of the template; `refused`, with these values; `broken`, likewise, but other values would not
        help; `long`, where the text passes its bound.
        """
        try:
            template = self._compiled(source)
            if not rendering:
                return {"reads": sorted(template_variables(self._environment.parse(source)))}
        except MemoryError:
            raise
        except TemplateSyntaxError as error:
            return {"kind": "syntax", "error": f"{error.message} (line {error.lineno})"}
        except Exception as error:  # of any kind: constants are computed when a template is compiled
            return _error("syntax", error)
        try:
            return self._render(template, **rendering)
        except MemoryError:
            raise
        except Exception as error:  # of any kind: a template calls Python's own objects, as it likes
            return _error("broken" if _is_broken(error) else "refused", error)

    def _render(self, template: Template, values: dict[str, Any], now: str, max_characters: int) -> dict[str, Any]:
        self._now = datetime.fromisoformat(now)
        pieces, left = [], max_characters
        for piece in template.generate(values):
            left -= len(piece)
            if left < 0:
                return {"kind": "long", "error": f"over {max_characters:,} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}


def received(connection: socket.socket) -> bytes | None:
    """The next frame; None at the end of the connection, also within a frame."""
    header = _exactly(connection, LENGTH.size)
    return None if header is None else _exactly(connection, *LENGTH.unpack(header))


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), 1 << 20))
        if not part:
            return None
        content += part
    return bytes(content)


def _is_broken(error: Exception) -> bool:
    """An unknown filter or test in a branch; another template, of which there are none; a macro without end."""
    named = type(error) is TemplateRuntimeError and str(error).startswith("No ")
    return named or isinstance(error, RecursionError) or "no loader for this environment" in str(error)


def _error(kind: str, error: Exception) -> dict[str, Any]:
    lines = str(error).splitlines()
    return {"kind": kind, "error": (lines[0] if lines else type(error).__name__)[:1000]}


if __name__ == "__main__":
    main()
