"""Engines that a benchmark compares: ours with different settings, and peers. Each lives in a process of its own."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.json_process import JsonProcess
from bench.results import BenchError
from bench.workloads import Workload


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
    facts: dict[str, Any] = field(default_factory=dict)  # of the model, from the engine when it is ready
    _process: JsonProcess | None = None

    def start(self) -> None:
        """Loads the model. Raises BenchError with what the process said last."""
        if self._process is not None:
            return
        self._process = JsonProcess(self.name, self.command)
        self.facts = self._process.request({"model": self.model, "settings": self.settings})

    def run(self, workload: Workload) -> Run:
        """Raises BenchError if the engine fails, or gives another number of tokens than the workload has."""
        order = {"prompts": workload.prompts, "output_lens": workload.output_lens, "temperature": workload.temperature}
        answer = self._process.request(order)
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
            self._process.stop()
            self._process = None


def ours(name: str, model: str, settings: dict[str, Any]) -> Contender:
    return Contender(name, [sys.executable, "-m", "bench.engines.worker"], model, settings)


def transformers(python: str, model: str, settings: dict[str, Any]) -> Contender:
    """Continuous batching of whatever transformers that interpreter has."""
    worker = str(Path(__file__).parent / "transformers_worker.py")
    command = [python, "-P", worker]  # else this folder's names would hide packages
    return Contender("transformers continuous batching", command, model, settings)
