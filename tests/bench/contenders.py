"""Engines that a benchmark compares: ours with different settings, and peers. Each lives in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.results import BenchError
from tests.bench.workloads import Workload

ROOT = Path(__file__).parent.parent.parent
# Nothing about threads: each engine runs with its own choice. llama.cpp, for one, loses by what makes ours win.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True, slots=True)
class Run:
    """What one offline repeat gave."""

    begin_ns: int
    end_ns: int
    output_tokens: int
    steps: dict[str, list[float]] | None  # columns of breakdown.COLUMNS; None of a peer

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(slots=True)
class Contender:
    """An offline engine: `command` speaks worker.py's protocol. `start` before the first `run`."""

    name: str
    command: list[str]
    model: str
    settings: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)  # that it told when it was ready
    _process: subprocess.Popen | None = None
    _log: Path | None = None

    def start(self) -> None:
        """Loads the model. Raises BenchError with what the process said last."""
        if self._process is not None:
            return
        descriptor, name = tempfile.mkstemp(prefix="sojourn-bench-", suffix=".log")
        self._log = Path(name)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                env=environment(),
            )  # fmt: skip
        self.facts = self._ask({"model": self.model, "settings": self.settings})

    def run(self, workload: Workload) -> Run:
        """Raises BenchError where the engine fails, or gives another number of tokens than was asked for."""
        order = {"prompts": workload.prompts, "output_lens": workload.output_lens, "temperature": workload.temperature}
        answer = self._ask(order)
        if answer["errors"]:
            raise BenchError(f"{self.name}: {answer['errors'][0]}")
        if answer["output_tokens"] != workload.output_tokens:
            raise BenchError(
                f"{self.name} gave {answer['output_tokens']:,} tokens, but {workload.output_tokens:,} were asked for: "
                "the engines would not be compared on the same work"
            )
        return Run(answer["begin_ns"], answer["end_ns"], answer["output_tokens"], answer.get("steps"))

    def stop(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()
            self._log.unlink(missing_ok=True)
            self._process = None

    def _ask(self, order: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = said[-1:] or ["it said nothing"]
            raise BenchError(f"{self.name} ended: {last[0]}")
        return json.loads(answer)


def ours(name: str, model: str, settings: dict[str, Any]) -> Contender:
    return Contender(name, [sys.executable, "-m", "tests.bench.worker"], model, settings)


def transformers(python: str, model: str, settings: dict[str, Any]) -> Contender:
    """Continuous batching of whatever transformers that interpreter has."""
    worker = str(Path(__file__).parent / "transformers_worker.py")
    command = [python, "-P", worker]  # else this folder's names would hide packages
    return Contender("transformers continuous batching", command, model, settings)


def environment(**more: str) -> dict[str, str]:
    return ENVIRONMENT | dict(os.environ) | more
