"""Compiles grammars of clients, each in a fork of this process that may die of it. `GrammarChecks` starts it.

python -m sojourn.engine.techniques.grammar.worker FOLDER: Grammar on stdin, an error or null on stdout, in msgpack.
"""

import os
import resource
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
import psutil

from sojourn.engine.sampling import Grammar
from sojourn.engine.techniques.grammar.grammar import GrammarCompiler, GrammarError

CPU_SECONDS = 0.1  # of one grammar: more kill the fork. A common schema takes 1 to 10 ms
MEMORY_BYTES = 1 << 30  # beyond the memory of an idle worker: more kill the fork
LENGTH_BYTES = 4
TOO_MUCH = f"it takes more than {CPU_SECONDS:g} s or too much memory to compile; make it simpler"


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches us too; the end of stdin is our end
    compiler = GrammarCompiler(Path(sys.argv[1]))
    _write(None)  # ready
    while header := sys.stdin.buffer.read(LENGTH_BYTES):
        grammar = msgspec.msgpack.decode(sys.stdin.buffer.read(int.from_bytes(header)), type=Grammar)
        _write(complaint_of_fork(compiler, grammar))


def complaint_of_fork(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
    """`complaint`, or TOO_MUCH if the fork died. A fork takes milliseconds, a new process half a second."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            bound = psutil.Process().memory_info().vms + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
            # CPU time, not wall time: a busy machine must not refuse a grammar. The signal's default ends the process.
            signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
            os.write(writer, msgspec.msgpack.encode(complaint(compiler, grammar)))
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return msgspec.msgpack.decode(answer, type=str | None) if answer else TOO_MUCH


def complaint(compiler: GrammarCompiler, grammar: Grammar) -> str | None:
    """Why a grammar cannot be followed; None where its first step can be taken."""
    try:
        guide = compiler.compile(grammar)
    except GrammarError as error:
        return str(error)
    guide.fill(np.zeros(guide.words, dtype=np.int32), [])
    return guide.error


def frame(content: Grammar | str | None) -> bytes:
    encoded = msgspec.msgpack.encode(content)
    return len(encoded).to_bytes(LENGTH_BYTES) + encoded


def _write(error: str | None) -> None:
    sys.stdout.buffer.write(frame(error))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
