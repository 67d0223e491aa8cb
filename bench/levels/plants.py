"""What a case plants beside its load. Each plant is a thread of the collector, or a process that ends with the case."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from bench.engines.servers import HOST

REQUEST_S = 60.0  # that a beside request may take


@dataclass(frozen=True, slots=True)
class Signals:
    """Signals to a process of the server. `stop` stands still from `at_s` for `for_s`, each `every_s` if there is one;
    without `for_s` until the load has ended."""

    what: Literal["stop", "kill"]
    at_s: float
    for_s: float | None = None
    every_s: float | None = None
    process: Literal["EngineCore", "APIServer"] = "EngineCore"


@dataclass(frozen=True, slots=True)
class Beside:
    """Requests of somebody else, one each `every_s` from `at_s` on, by no load generator. `kind` chooses the body."""

    kind: Literal["n-logprobs", "grammar"]
    at_s: float
    every_s: float


@dataclass(frozen=True, slots=True)
class Proxy:
    """Between client and server: `buffer` gives an answer at its end, `cut` ends each connection at an age."""

    kind: Literal["buffer", "cut"]
    cut_s: float = 0.0


Plant = Signals | Beside | Proxy


@contextlib.contextmanager
def planted(plants: tuple[Plant, ...], pid: int, port: int, load: threading.Event, over: threading.Event) -> Iterator:
    """`load`: set when the load's first request is seen. `over`: set when the load has ended."""
    threads = [
        threading.Thread(target=_signal if isinstance(plant, Signals) else _send, args=(plant, pid, port, load, over))
        for plant in plants if not isinstance(plant, Proxy)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def process_of(pid: int, name: str) -> psutil.Process:
    """The API server is the process that was started; the others are named by their title."""
    parent = psutil.Process(pid)
    if name == "APIServer":
        return parent
    return next(each for each in parent.children(recursive=True) if name in " ".join([each.name(), *each.cmdline()]))


def _signal(plant: Signals, pid: int, port: int, load: threading.Event, over: threading.Event) -> None:
    process = process_of(pid, plant.process)
    load.wait()
    if over.wait(plant.at_s):
        return
    if plant.what == "kill":
        process.kill()
        return
    while not over.is_set():
        process.suspend()
        over.wait(plant.for_s)
        process.resume()
        if plant.every_s is None or plant.for_s is None:
            return
        over.wait(plant.every_s - plant.for_s)


def _send(plant: Beside, pid: int, port: int, load: threading.Event, over: threading.Event) -> None:
    load.wait()
    over.wait(plant.at_s)
    number, under_way = 0, []
    while not over.wait(plant.every_s):
        number += 1
        under_way.append(thread := threading.Thread(target=_post, args=(port, BODIES[plant.kind](number))))
        thread.start()
    for thread in under_way:
        thread.join()


def _post(port: int, body: dict) -> None:
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(request, timeout=REQUEST_S) as got:
        got.read()


def _n_logprobs(number: int) -> dict:
    prompt = f"{number} Which of these words is the most likely one? " * 8
    return {"model": "m", "prompt": prompt, "n": 48, "logprobs": 20, "max_tokens": 250, "ignore_eos": True,
            "temperature": 1.0}  # fmt: skip


PATTERN = "^[a-z{}]{{1,40}}(-[0-9]{{1,30}}){{0,30}}$"


def _grammar(number: int) -> dict:
    """A schema that no request had before, so that it is compiled anew."""
    fields = {f"field_{number}_{place}": {"type": "string", "pattern": PATTERN.format(place)}
              for place in range(60)}  # fmt: skip
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    return {"model": "m", "prompt": f"{number} Write one object.", "max_tokens": 40, "temperature": 1.0,
            "structured_outputs": {"json": schema}}  # fmt: skip


BODIES = {"n-logprobs": _n_logprobs, "grammar": _grammar}


@contextlib.contextmanager
def through(proxy: Proxy | None, port: int) -> Iterator[int]:
    """The port at which clients reach the server."""
    if proxy is None:
        yield port
        return
    words = [sys.executable, "-m", "bench.levels.plants", proxy.kind, str(port), str(proxy.cut_s)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline())
    finally:
        os.kill(process.pid, signal.SIGTERM)
        process.wait()


async def _join(kind: str, port: int, cut_s: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    back, upstream = await asyncio.open_connection(HOST, port)
    held: list[bytes] = []

    async def forth() -> None:
        while piece := await reader.read(65_536):
            upstream.write(piece)
            await upstream.drain()

    async def answer() -> None:
        while piece := await back.read(65_536):
            if kind == "buffer" and not b"".join((*held[-1:], piece)).endswith(b"0\r\n\r\n"):
                held.append(piece)  # until the last chunk of the answer
                continue
            writer.write(b"".join((*held, piece)))
            held.clear()
            await writer.drain()
        writer.write(b"".join(held))

    ways = [asyncio.create_task(forth()), asyncio.create_task(answer())]
    await asyncio.wait(ways, timeout=cut_s or None, return_when=asyncio.FIRST_COMPLETED)
    for way in ways:
        way.cancel()
    await asyncio.gather(*ways, return_exceptions=True)
    for end in (writer, upstream):
        end.close()


async def _serve(kind: str, port: int, cut_s: float) -> None:
    server = await asyncio.start_server(lambda *ends: _join(kind, port, cut_s, *ends), HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
