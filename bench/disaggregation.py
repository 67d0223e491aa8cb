"""Latencies of one server, of two replicas, and of a prefill and a decode server, with the same cores.

python -m bench.disaggregation [--model small] [--requests 30] [--rate 1] [--tokens 768] [--output 64] [--repeats 2]

Every way gets the same prompts at the same times, in turns. One server has two threads, the others have one each. The
client sends to the replicas in turns, and to the pair as a proxy does: the decode call behind the prefill server's
answer, or both calls at once. The last column is of the decode server's records: how long it read the KV of a prompt,
and how long it waited for that.
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
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
import typer
from rich.console import Console
from rich.table import Table

from bench.shapes import add_tokenizer, model_to_bench, vocab_size
from sojourn.metrics.run.directory import RunDirectory

_ENGINE_IDS: dict[str, str] = {}  # by address of a prefill server
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


class Way(NamedTuple):
    """Servers, by their threads and roles."""

    servers: tuple[tuple[int, str | None], ...]
    options: tuple[str, ...] = ()  # of a prefill and a decode server
    at_once: bool = False  # both calls

    @property
    def is_split(self) -> bool:
        return any(role is not None for _, role in self.servers)


PAIR = ((1, "prefill"), (1, "decode"))
WAYS = {
    "one server": Way(((2, None),)),
    "two replicas": Way(((1, None), (1, None))),
    "prefill + decode": Way(PAIR),
    "prefill + decode, at once, whole": Way(PAIR, ("--kv-transfer-granularity", "whole"), at_once=True),
    "prefill + decode, at once, chunk": Way(PAIR, ("--kv-transfer-granularity", "chunk"), at_once=True),
    "prefill + decode, nixl": Way(PAIR, ("--kv-transport", "nixl")),
    "prefill + decode, nixl, at once, chunk": Way(PAIR, ("--kv-transport", "nixl"), at_once=True),
}


class Latencies(NamedTuple):
    """Of one request, in seconds."""

    ttft: float
    itl: list[float]


class Found(NamedTuple):
    """Of one way."""

    latencies: list[Latencies]
    read_ms: list[float]  # of KV from a prefill server, by request
    exposed_ms: list[float]  # ... and the wait for it


@contextlib.contextmanager
def servers(way: Way, model: str, load_format: str, chunk: int, folder: Path) -> Iterator[list[str]]:
    """The addresses of the servers of a way, once they are ready. A prefill server computes `chunk` tokens a step; the
    last server records into `folder`."""
    processes, urls = [], []
    try:
        for number, (threads, role) in enumerate(way.servers, 1):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            options = [] if role is None else ["--kv-role", role, *way.options]
            options += ["--max-num-batched-tokens", str(chunk)] if role == "prefill" else []
            options += ["--port", str(port), "--threads", str(threads), "--load-format", load_format]
            options += ["--run-dir", str(folder)] if number == len(way.servers) else []
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


async def _ask(client: httpx.AsyncClient, urls: list[str], number: int, body: dict[str, Any], way: Way) -> Latencies:
    began, prefilling = time.monotonic(), None
    if way.is_split:
        params, source = REMOTE_DECODE, None
        if way.at_once:
            name, engine_id = f"transfer-{uuid.uuid4()}", await _engine_id(client, urls[0])
            params = REMOTE_DECODE | {"transfer_id": name}
            source = {"do_remote_prefill": True, "transfer_id": name, "remote_bootstrap_addr": urls[0],
                      "remote_engine_id": engine_id}  # fmt: skip
        one = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
        prefilling = asyncio.ensure_future(client.post(f"{urls[0]}/v1/completions", json=one))
        if source is None:
            source = (await prefilling).raise_for_status().json()["kv_transfer_params"]
        body = body | {"kv_transfer_params": source}
    url, times = urls[-1] if way.is_split else urls[number % len(urls)], []
    async with client.stream("POST", f"{url}/v1/completions", json=body) as stream:
        stream.raise_for_status()
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
    if prefilling is not None:
        (await prefilling).raise_for_status()
    return Latencies(times[0] - began, [after - before for before, after in pairwise(times)])


async def _engine_id(client: httpx.AsyncClient, url: str) -> str:
    """A proxy asks once."""
    if url not in _ENGINE_IDS:
        _ENGINE_IDS[url] = (await client.get(f"{url}/query")).raise_for_status().json()["0"]["engine_id"]
    return _ENGINE_IDS[url]


async def _measure(urls: list[str], way: Way, prompts: list[list[int]], due: list[float], output: int) -> list:
    async with httpx.AsyncClient(timeout=120) as client:
        for number, url in enumerate(urls):  # warm, and each decode server has its connection
            warm = {"model": "bench", "prompt": [*range(1, 40), number], "max_tokens": 2, "stream": True}
            await _ask(client, [url] if not way.is_split else urls, number, warm, way)
        began = time.monotonic()

        async def one(number: int) -> Latencies:
            await asyncio.sleep(max(0.0, began + due[number] - time.monotonic()))
            body = {"model": "bench", "prompt": prompts[number], "max_tokens": output, "ignore_eos": True,
                    "temperature": 0, "stream": True}  # fmt: skip
            return await _ask(client, urls, number, body, way)

        return list(await asyncio.gather(*map(one, range(len(prompts)))))


def main(
    model: Annotated[str, typer.Option(help="a checkpoint folder, or a shape of bench/shapes.py")] = "small",
    requests: Annotated[int, typer.Option(help="of each way and repeat")] = 30,
    rate: Annotated[float, typer.Option(help="requests a second")] = 1.0,
    tokens: Annotated[int, typer.Option(help="of each prompt")] = 768,
    output: Annotated[int, typer.Option(help="tokens")] = 64,
    repeats: Annotated[int, typer.Option(help="of each way")] = 2,
    chunk: Annotated[int, typer.Option(help="tokens of a step of a prefill server")] = 256,
    only: Annotated[str, typer.Option(help="ways whose name has this text")] = "",
    nixl: Annotated[bool, typer.Option(help="also over NIXL, which has to be installed")] = False,
) -> None:
    ways = {name: way for name, way in WAYS.items() if (nixl or "nixl" not in name) and only in name}
    found = {name: Found([], [], []) for name in ways}
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
            for name, way in ways.items():
                folder = Path(scratch) / f"{name}-{repeat}"
                with servers(way, path, load_format, chunk, folder) as urls:
                    found[name].latencies.extend(asyncio.run(_measure(urls, way, prompts, due, output)))
                rows = RunDirectory(folder).table("requests").query(f"prompt_tokens == {tokens}")
                found[name].read_ms.extend(rows.transfer_ns / 1e6)
                found[name].exposed_ms.extend(rows.ledger_memory_transfer_ns / 1e6)
    table = Table("way", "TTFT p50, p90 (ms)", "ITL p50, p99 (ms)", "longest ITL (ms)", "KV read, waited p50 (ms)")
    for name, (latencies, read_ms, exposed_ms) in found.items():
        ttft, itl = sorted(each.ttft for each in latencies), sorted(gap for each in latencies for gap in each.itl)
        table.add_row(
            name, f"{1e3 * statistics.median(ttft):.0f}, {1e3 * ttft[int(0.9 * len(ttft))]:.0f}",
            f"{1e3 * statistics.median(itl):.1f}, {1e3 * itl[int(0.99 * len(itl))]:.0f}", f"{1e3 * itl[-1]:.0f}",
            f"{statistics.median(read_ms):.1f}, {statistics.median(exposed_ms):.1f}" if any(read_ms) else "–",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
