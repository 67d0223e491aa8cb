"""Which other processes have the CPUs: the busiest of the machine that are none of the server's.

Only where others take a good part of a core are the processes of the machine read: it takes some 20 µs for each. Names
are those of the kernel (15 characters). Of an interpreter the program that it runs is named, too, and nothing else of a
command line, which may hold secrets.
"""

import os
from collections.abc import Collection
from pathlib import Path

from sojourn.metrics.machine.process_use import PROC

WORTH_READING_CORES = 0.25  # that others take
WORTH_NAMING_CORES = 0.05
MOST_NAMED = 3
INTERPRETERS = ("python", "node", "java", "bash", "sh", "perl", "ruby")  # a name that begins so says little
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class Neighbours:
    """Owns what each process of the machine had of the CPUs when it was last asked."""

    def __init__(self, proc: Path = PROC):
        self._proc = proc
        self._last: tuple[int, dict[int, float]] | None = None  # when, and pid → seconds of CPU

    def busiest(self, now_ns: int, others_cores: float | None, ours: Collection[int]) -> list[tuple[str, float]]:
        """`name (pid)` and cores since the call before, most first; [] where others take little, and at the first call
        of those in which they take more. `ours`: processes that are no neighbours."""
        if others_cores is None or others_cores < WORTH_READING_CORES:
            self._last = None
            return []
        now = {pid: use for pid, use in _read(self._proc).items() if pid not in ours}
        last, self._last = self._last, (now_ns, {pid: seconds for pid, (_, seconds) in now.items()})
        if last is None or now_ns <= last[0]:
            return []
        span_s = (now_ns - last[0]) / 1e9
        # A process that was not there the call before has all its time from since then
        cores = {pid: (seconds - last[1].get(pid, 0.0)) / span_s for pid, (_, seconds) in now.items()}
        busy = sorted((pid for pid, each in cores.items() if each >= WORTH_NAMING_CORES), key=lambda pid: -cores[pid])
        return [(f"{_named(self._proc, pid, now[pid][0])} ({pid})", cores[pid]) for pid in busy[:MOST_NAMED]]


def _named(proc: Path, pid: int, name: str) -> str:
    """`python -m pytest`, `python train.py`: the program of an interpreter; else the kernel's name."""
    if not name.startswith(INTERPRETERS):
        return name
    try:
        words = (proc / str(pid) / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")[1:]
    except OSError:
        return name
    if "-m" in words[:4] and (module := words[words.index("-m") + 1 :][:1]):
        return f"{name} -m {module[0]}"
    script = next((word for word in words if word and not word.startswith("-")), "")
    is_program = Path(script).suffix in (".py", ".js", ".jar", ".sh", ".pl", ".rb") or "/bin/" in script
    return f"{name} {Path(script).name}" if is_program else name


def _read(proc: Path) -> dict[int, tuple[str, float]]:
    """pid → name, and seconds of CPU since it began (proc(5): /proc/PID/stat)."""
    found = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:  # it ended meanwhile
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        fields = rest.split()
        found[int(folder.name)] = (name, (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND)
    return found
