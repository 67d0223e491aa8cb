"""Latencies of one server, of two replicas, and of a prefill and a decode server, with the same cores.

python -m bench.disaggregation [--model small] [--requests 30] [--rate 1] [--tokens 768] [--output 64] [--repeats 2]

Every way gets the same prompts at the same times, in turns. One server has two threads, the others have one each. The
client sends to the replicas in turns, and to the pair as a proxy does.
"""

import asyncio
import contextlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.table import Table

from bench.shapes import add_tokenizer, model_to_bench, vocab_size

REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
WAYS = {  # threads and role of each server
    "one server": [(2, None)],
    "two replicas": [(1, None), (1, None)],
    "prefill + decode": [(1, "prefill"), (1, "decode")],
    "prefill + decode, nixl": [(1, "prefill"), (1, "decode")],
}


class Latencies(NamedTuple):
    """Of one request, in seconds."""

    ttft: float
    itl: list[float]


@contextlib.contextmanager
def servers(way: str, model: str, load_format: str) -> Iterator[list[str]]:
    """The addresses of the servers of a way, once they are ready."""
    processes, urls = [], []
    try:
        for threads, role in WAYS[way]:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            options = [] if role is None else ["--kv-role", role, "--kv-transport", "nixl" if "nixl" in way else "shm"]
            options += ["--port", str(port), "--threads", str(threads), "--load-format", load_format]
            options += ["--no-spare-core", "--served-model-name", "bench"]
            command = [sys.executable, "-m", "sojourn", "serve", model, *options]
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            urls.append(f"http://127.0.0.1:{port}")
        for url in urls:
            _wait_ready(url)
        yield urls
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait(30)


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready").status_code == 200:
                return
        time.sleep(0.2)
    raise TimeoutError(f"{url} was not ready in time")


async def _ask(client: httpx.AsyncClient, urls: list[str], number: int, body: dict[str, Any], split: bool) -> Latencies:
    began = time.monotonic()
    if split:
        answer = await client.post(
            f"{urls[0]}/v1/completions",
            json=body | {"max_tokens": 1, "stream": False, "kv_transfer_params": REMOTE_DECODE},
        )
        body = body | {"kv_transfer_params": answer.raise_for_status().json()["kv_transfer_params"]}
    url, times = urls[-1] if split else urls[number % len(urls)], []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    return Latencies(times[0] - began, [after - before for before, after in pairwise(times)])


async def _measure(urls: list[str], split: bool, prompts: list[list[int]], due: list[float], output: int) -> list:
    async with httpx.AsyncClient(timeout=120) as client:
        for url in urls:  # warm
            await client.post(f"{url}/v1/completions", json={"model": "bench", "prompt": [1, 2, 3], "max_tokens": 2})
        began = time.monotonic()

        async def one(number: int) -> Latencies:
            await asyncio.sleep(max(0.0, began + due[number] - time.monotonic()))
            body = {"model": "bench", "prompt": prompts[number], "max_tokens": output, "ignore_eos": True,
                    "temperature": 0, "stream": True}  # fmt: skip
            return await _ask(client, urls, number, body, split)

        return list(await asyncio.gather(*map(one, range(len(prompts)))))


def main(
    model: Annotated[str, typer.Option(help="a checkpoint folder, or a shape of bench/shapes.py")] = "small",
    requests: Annotated[int, typer.Option(help="of each way and repeat")] = 30,
    rate: Annotated[float, typer.Option(help="requests a second")] = 1.0,
    tokens: Annotated[int, typer.Option(help="of each prompt")] = 768,
    output: Annotated[int, typer.Option(help="tokens")] = 64,
    repeats: Annotated[int, typer.Option(help="of each way")] = 2,
    nixl: Annotated[bool, typer.Option(help="also over NIXL, which has to be installed")] = False,
) -> None:
    ways = [way for way in WAYS if nixl or "nixl" not in way]
    found: dict[str, list[Latencies]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as scratch:
        path, load_format = model_to_bench(model, Path(scratch))
        if load_format == "dummy":
            add_tokenizer(Path(path))
        for repeat in range(repeats):
            dice = random.Random(repeat)
            prompts = [[dice.randrange(vocab_size(path)) for _ in range(tokens)] for _ in range(requests)]
            due = [0.0]
            for _ in range(requests - 1):
                due.append(due[-1] + dice.expovariate(rate))
            for way in ways:
                with servers(way, path, load_format) as urls:
                    found[way] += asyncio.run(_measure(urls, "decode" in way, prompts, due, output))
    table = Table("way", "TTFT p50, p90 (ms)", "ITL p50, p99 (ms)", "longest ITL (ms)")
    for way, latencies in found.items():
        ttft, itl = sorted(each.ttft for each in latencies), sorted(gap for each in latencies for gap in each.itl)
        table.add_row(
            way, f"{1e3 * statistics.median(ttft):.0f}, {1e3 * ttft[int(0.9 * len(ttft))]:.0f}",
            f"{1e3 * statistics.median(itl):.1f}, {1e3 * itl[int(0.99 * len(itl))]:.0f}", f"{1e3 * itl[-1]:.0f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
