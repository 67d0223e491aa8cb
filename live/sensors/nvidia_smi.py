"""nvidia-smi as a source: its query for states and limits, and `dmon` for what works within a device."""

import shutil
import subprocess
import threading
from collections.abc import Sequence

from sojourn.interop.sources.sensors import SensorLines, Sensors, read_sensors
from sojourn.metrics.errors import InputError, ServerError

PROGRAM = "nvidia-smi"
STATES = (
    "index,utilization.gpu,power.draw,enforced.power.limit,power.default_limit,temperature.gpu,clocks.sm,"
    "clocks.max.sm,memory.used,memory.total,pcie.link.gen.current,pcie.link.width.current,"
    "ecc.errors.uncorrected.volatile.total,{}"
)
# Names of the same by driver, the newest first; the numbers of GPM metrics are those of nvml.h.
QUERIES = tuple(
    (f"--query-gpu={STATES.format(reasons)}", "--format=csv")
    for reasons in ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
)
COUNTED = (
    ("dmon", "-s", "vt", "--gpm-metrics", "1,2,3,5,10,20,21,60,61"), ("dmon", "-s", "vt"),
)  # fmt: skip
ANSWER_S = 20.0  # of the first answer: the driver may have to wake
MISSING = "--sensors nvidia-smi: there is no such program here; give the URL of the server's DCGM exporter"


class NvidiaSmi:
    """Owns two processes that print a row a device each second. Rows are of the moment in which they come."""

    def __init__(self) -> None:
        """Raises InputError where it is missing, or no device answers."""
        if shutil.which(PROGRAM) is None:
            raise InputError(MISSING)
        states = _first_that_works(QUERIES, ())
        if states is None:
            raise InputError(f"--sensors nvidia-smi: {_complaint(QUERIES[0])}")
        counted = _first_that_works(COUNTED, ("-c", "1"))
        self._printed = [Printed((*states, "-l", "1"))]
        if counted is not None:
            self._printed.append(Printed((*counted, "-d", "1")))

    def read(self) -> Sensors:
        """Raises ServerError once a process has ended."""
        found = Sensors(PROGRAM)
        for each in self._printed:
            readings = each.take()
            found.readings += readings.readings
            found.unread += readings.unread
        if not found.readings and any(each.has_ended for each in self._printed):
            raise ServerError("nvidia-smi has ended")
        return found

    def close(self) -> None:
        for each in self._printed:
            each.close()


class Printed:
    """One process, and the lines of it that nobody has taken yet."""

    def __init__(self, words: Sequence[str]):
        self._process = subprocess.Popen(
            [PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
        )
        self._columns = SensorLines()
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="nvidia-smi", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def take(self) -> Sensors:
        with self._lock:
            lines, self._lines = self._lines, []
        return self._columns.read(lines)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join()
        self._process.stdout.close()  # type: ignore[union-attr]

    def _follow(self) -> None:
        for line in self._process.stdout:  # type: ignore[union-attr]
            with self._lock:
                self._lines.append(line.rstrip())


def _first_that_works(ways: Sequence[Sequence[str]], once: Sequence[str]) -> Sequence[str] | None:
    return next((words for words in ways if not _complaint((*words, *once))), None)


def _complaint(words: Sequence[str]) -> str:
    """What it says where it does not answer; "" where it does."""
    try:
        answer = subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=ANSWER_S, errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        return f"it does not answer ({type(error).__name__})"
    if answer.returncode == 0 and read_sensors(answer.stdout) is not None:
        return ""
    said = (answer.stdout + answer.stderr).strip().splitlines()
    return said[0] if said else f"it ended with {answer.returncode}"
