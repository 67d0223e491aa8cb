"""Two clients, one server: do `sojourn bench-serve` and `vllm bench serve` tell the same of it?

    python -m tests.bench.agreement --vllm .../vllm/bin/python --server sojourn --server vllm --json agreement.json

Both get the same flags of vLLM's and send in turns (ours, theirs, theirs, ours), each with the repeat's seed, after a
run of each that is thrown away. TTFT runs from the actual send and ITL has a sample a chunk, as vLLM's client counts. A
figure is the median over the runs of a client, with a 95 % interval of the bootstrap over runs; the difference is ours
less theirs, by pairs.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.config import model_folder
from metrics.machine import company
from tests.bench.clients import VLLM_BENCH
from tests.bench.contenders import ROOT, environment
from tests.bench.overhead import Cost, cost
from tests.bench.servers import Server, our_server, vllm_server

QUANTILES = (50, 90, 99)
FIGURES = [f"{what} p{quantile}" for what in ("TTFT", "ITL") for quantile in QUANTILES]
CLIENT_TIMEOUT_S = 600
Client = Callable[[list[str], Path], list[str]]  # flags, working folder → command


def our_client(flags: list[str], folder: Path) -> list[str]:
    return [sys.executable, "-m", "sojourn", "bench-serve", *flags, "--run-dir", str(folder / "run")]


def vllms_client(python: str) -> Client:
    return lambda flags, folder: [python, "-c", VLLM_BENCH, *flags]


def percentiles(result: dict[str, Any]) -> dict[str, float]:
    """Of a result file, in ms. Both clients write the same keys."""
    ttfts = np.array([ttft for ttft, error in zip(result["ttfts"], result["errors"], strict=True) if not error])
    gaps = np.concatenate([np.array(each, float) for each in result["itls"]])
    found = {"TTFT": np.percentile(ttfts, QUANTILES), "ITL": np.percentile(gaps, QUANTILES)}
    return {
        f"{what} p{quantile}": 1e3 * float(value)
        for what, values in found.items()
        for quantile, value in zip(QUANTILES, values, strict=True)
    }


def run(client: Client, server: Server, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """One run of one client. Raises RuntimeError with the end of what it said."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = [
            "--backend", "openai", "--base-url", f"http://127.0.0.1:{server.port}", "--model", server.model,
            "--tokenizer", str(model_folder(options.model)), "--dataset-name", "random",
            "--random-input-len", str(options.prompt_tokens), "--random-output-len", str(options.output_tokens),
            "--num-prompts", str(options.requests), "--request-rate", str(options.rate), "--seed", str(seed),
            "--ignore-eos", "--save-result", "--save-detailed", "--disable-tqdm",
            "--result-dir", name, "--result-filename", "result.json",
        ]  # fmt: skip
        offline = environment(HF_HUB_OFFLINE="1")
        done = subprocess.run(
            client(flags, folder), cwd=ROOT if client is our_client else folder, env=offline, capture_output=True,
            text=True, timeout=CLIENT_TIMEOUT_S,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"a client ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        result = json.loads((folder / "result.json").read_text())
    if result["completed"] != options.requests:
        raise RuntimeError(f"only {result['completed']} of {options.requests} requests completed")
    return percentiles(result)


def measure(server: Server, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Client → figure → one value a run."""
    clients = {"ours": our_client, "vLLM's": vllms_client(options.vllm)}
    found = {name: {figure: [] for figure in FIGURES} for name in clients}
    for repeat in range(-1, options.repeats):
        for name in list(clients)[:: 1 if repeat % 2 == 0 else -1]:
            figures = run(clients[name], server, options, 1 + repeat)
            if repeat >= 0:
                for figure, value in figures.items():
                    found[name][figure].append(value)
                print(f"{server.name}, run {repeat + 1}, {name}: " + json.dumps(figures), file=sys.stderr)
    return found


def table(server: str, found: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> Table:
    title = (
        f"{server}: {options.requests} requests of {options.prompt_tokens} in, {options.output_tokens} out at "
        f"{options.rate:g} rps, {options.repeats} runs a client, ms (95 %)"
    )
    shown = Table(title=title)
    for column in ("", "ours", "vLLM's", "ours − vLLM's, by pairs", "overlap"):
        shown.add_column(column, justify="left" if not column else "right")
    for figure in FIGURES:
        ours, theirs = found["ours"][figure], found["vLLM's"][figure]
        mine, vllms, apart = cost(ours), cost(theirs), cost(list(np.subtract(ours, theirs)))
        overlap = mine.low <= vllms.high and vllms.low <= mine.high
        shown.add_row(figure, told(mine), told(vllms), told(apart, sign="+"), "yes" if overlap else "NO")
    return shown


def told(value: Cost, sign: str = "") -> str:
    return f"{value.median:{sign}.2f} ({value.low:{sign}.2f} to {value.high:{sign}.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-model")
    parser.add_argument("--vllm", required=True, help="the interpreter of an environment with vLLM")
    parser.add_argument("--server", choices=("sojourn", "vllm"), action="append", required=True)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which(options.vllm) is None:
        parser.error(f"--vllm {options.vllm} is no interpreter")
    if others := company():
        print(f"warning: {others}", file=sys.stderr)
    results, console = {}, Console(width=140)
    for name in options.server:
        if name == "sojourn":
            server = our_server(name, options.model, {}, None)
        else:
            server = vllm_server(name, options.vllm, str(model_folder(options.model)), max_model_len=1024)
        server.start()
        try:
            results[name] = measure(server, options)
        finally:
            server.stop()
        console.print(table(name, results[name], options))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
