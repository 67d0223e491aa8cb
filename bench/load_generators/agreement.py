"""Two clients, one server: do `sojourn bench-serve` and `vllm bench serve` report the same?

    python -m bench.load_generators.agreement --vllm .../vllm/bin/python --server sojourn --server vllm

Both get the same flags of vLLM's and send in turns (ours, theirs, theirs, ours), each with the repeat's seed, after a
run of each that is thrown away. TTFT runs from the actual send and ITL has a sample a chunk, as vLLM's client counts. A
figure is the median over the runs of a client, with a 95% interval of the bootstrap over runs; the difference is ours
less theirs, by pairs. Our own server also says what it saw of the very requests of each: TTFT from when the request had
been read until its first text was handed to the socket, ITL from token to token as they left the loop.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.engines.servers import Server, our_server, vllm_server
from bench.json_process import ROOT, environment
from bench.load_generators.accuracy import VLLM_BENCH
from bench.report.estimate import median_of
from sojourn.engine.config import model_folder
from sojourn.metrics.exit_codes import Ended
from sojourn.metrics.machine.host import company
from sojourn.metrics.run.directory import RunDirectory

QUANTILES = (50, 90, 99)
FIGURES = [f"{what} p{quantile}" for what in ("TTFT", "ITL") for quantile in QUANTILES]
CLIENT_TIMEOUT_S = 600
FLUSHED_S = 2.0  # after it our server's records of a finished run are on the disk
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


def servers_own(run_dir: Path, count: int) -> dict[str, float]:
    """The same of our server's records of its last `count` requests."""
    time.sleep(FLUSHED_S)
    requests = RunDirectory.open(run_dir).table("requests").sort_values("arrived_ns").tail(count)
    ttfts = (requests.first_written_ns - requests.arrived_ns) / 1e9
    return percentiles(
        {"ttfts": ttfts, "errors": [""] * count, "itls": [np.diff(ns) / 1e9 for ns in requests.token_ns]}
    )


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
        if done.returncode == Ended.NOT_VALID:  # by our stricter rule; here both count from the actual send
            print("ours was not valid: the machine was too busy to send in time", file=sys.stderr)
        elif done.returncode:
            raise RuntimeError(f"a client ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")
        result = json.loads((folder / "result.json").read_text())
    if result["completed"] != options.requests:
        raise RuntimeError(f"only {result['completed']} of {options.requests} requests completed")
    return percentiles(result)


def measure(server: Server, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Client → figure → one value a run."""
    clients = {"ours": our_client, "vLLM's": vllms_client(options.vllm)}
    found = {name: {} for name in clients}
    for repeat in range(-1, options.repeats):
        for name in list(clients)[:: 1 if repeat % 2 == 0 else -1]:
            figures = run(clients[name], server, options, 1 + repeat)
            if repeat >= 0:
                if server.run_dir is not None:
                    figures |= {f"{figure}, server": value for figure, value in
                                servers_own(server.run_dir, options.requests).items()}  # fmt: skip
                for figure, value in figures.items():
                    found[name].setdefault(figure, []).append(value)
                print(f"{server.name}, run {repeat + 1}, {name}: " + json.dumps(figures), file=sys.stderr)
    return found


def table(server: str, found: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> Table:
    title = (
        f"{server}: {options.requests} requests of {options.prompt_tokens} in, {options.output_tokens} out at "
        f"{options.rate:g} rps, {options.repeats} runs a client, ms (95%)"
    )
    shown = Table(title=title)
    columns = ["", "ours", "vLLM's", "ours − vLLM's, by pairs", "overlap"]
    beyond = {name: {f: np.subtract(found[name][f], found[name][f"{f}, server"]) for f in FIGURES}
              for name in found if f"{FIGURES[0]}, server" in found[name]}  # fmt: skip
    columns += [f"{name} − the server's own" for name in beyond]
    for column in columns:
        shown.add_column(column, justify="left" if not column else "right")
    for figure in FIGURES:
        ours, theirs = found["ours"][figure], found["vLLM's"][figure]
        mine, vllms, apart = median_of(ours), median_of(theirs), median_of(list(np.subtract(ours, theirs)))
        overlap = mine.low <= vllms.high and vllms.low <= mine.high
        added = [f"{median_of(list(beyond[name][figure])):+.2f}" for name in beyond]
        shown.add_row(figure, f"{mine:.2f}", f"{vllms:.2f}", f"{apart:+.2f}", "yes" if overlap else "NO", *added)
    return shown


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
    results, console = {}, Console(width=180)
    records = tempfile.TemporaryDirectory()
    for name in options.server:
        if name == "sojourn":
            server = our_server(name, options.model, {}, Path(records.name))
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
