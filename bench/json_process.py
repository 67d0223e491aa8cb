"""A process that a benchmark asks: it takes one JSON object a line, and answers each with one."""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.results import BenchError

ROOT = Path(__file__).parent.parent
STOP_SECONDS = 5
# Nothing about threads: each engine runs with its own choice. llama.cpp, for one, loses by what makes ours win.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class JsonProcess:
    """Starts at once; what it says on stderr is its last word if it ends early."""

    def __init__(self, name: str, command: Sequence[str], seconds: float = threading.TIMEOUT_MAX):
        """`seconds`: an answer takes no longer, or the process is killed."""
        self.name = name
        self._seconds = seconds
        descriptor, log = tempfile.mkstemp(prefix="sojourn-bench-", suffix=".log")
        self._log = Path(log)
        with os.fdopen(descriptor, "wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
                env=environment(),
            )  # fmt: skip

    def request(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Raises BenchError with what the process said last, if it ended."""
        limit = threading.Timer(self._seconds, self._process.kill)
        limit.daemon = True
        limit.start()
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            limit.cancel()
        if not answer:
            log_lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise BenchError(f"{self.name} ended: {log_lines[-1] if log_lines else 'it said nothing'}")
        return json.loads(answer)

    def stop(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # what a dead process did not read
            self._process.stdin.close()
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.unlink(missing_ok=True)


def environment(**more: str) -> dict[str, str]:
    return ENVIRONMENT | dict(os.environ) | more
