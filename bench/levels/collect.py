"""Collects the evidence of each case from a vLLM that serves: log, pages, the client's run, the probe's records."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from zlib import crc32

import psutil
import yaml

from bench.engines.servers import HOST, Server
from bench.json_process import ROOT
from bench.levels.cases import SLO, Case
from bench.levels.plants import Proxy, planted, through
from bench.probe.cases import THREADS
from bench.probe.vllm_with_probe import vllm_with_probe
from bench.watch.pages import page_log
from sojourn.live.watch.fetch import fetch
from sojourn.loadgen.faults.surroundings import PlantedSurroundings
from sojourn.loadgen.target.endpoint import parse_base_url

BEFORE_S, AFTER_S, PAGE_S = 4.0, 3.0, 1.0  # pages of the idle server, and how often one is read
LOAD_SECONDS = 300
PROMPT_TOKENS = b"vllm:prompt_tokens_total"
MAX_MODEL_LEN = 2048
CASE, LOG, PAGES, CLIENT, UNREAD, SUMMARY = (
    "case.json", "server.log", "pages.gz", "client", "unread.json", "vllm_result.json",
)  # fmt: skip


def collect(python: str, model: Path, into: Path, cases: Sequence[Case], seed: int) -> None:
    """Cases with the same flags have one server, one after the other. A case that is there is not measured again."""
    missing = [case for case in cases if not (into / case.name / CASE).exists()]
    for flags, group in groupby(sorted(missing, key=lambda case: case.flags), key=lambda case: case.flags):
        _serve(python, model, into, flags, list(group), seed)


def _serve(
    python: str, model: Path, into: Path, flags: tuple[str, ...], cases: Sequence[Case], seed: int
) -> None:  # fmt: skip
    probe = into / "probes" / f"{cases[0].name}-{int(time.time())}"
    server = vllm_with_probe(python, probe, *flags, max_model_len=MAX_MODEL_LEN, threads=THREADS, model=model)
    start_bytes = 0  # of its log, until it was ready: the flags stand there
    for case in sorted(cases, key=lambda case: case.name == "killed"):
        try:
            if server.group is None:
                server.start()
                start_bytes = server.log.stat().st_size
            _measure(case, into / case.name, server, start_bytes, model, probe, seed)
        except Exception as error:  # the other cases are measured all the same
            print(f"{case.name}: {error!r}", flush=True)
        if not server.is_ready:
            server.stop()
    server.stop()


def _measure(
    case: Case, folder: Path, server: Server, start_bytes: int, model: Path, probe: Path, seed: int
) -> None:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    log = server.log
    started, begin = log.read_bytes()[:start_bytes], log.stat().st_size
    loading, over = threading.Event(), threading.Event()
    moments = {"unix_less_monotonic_ns": time.time_ns() - time.monotonic_ns()}
    proxy = next((plant for plant in case.plants if isinstance(plant, Proxy)), None)
    with (_pages(folder, server.port, loading), planted(case.plants, server.group, server.port, loading, over),
          through(proxy, server.port) as port):  # fmt: skip
        time.sleep(BEFORE_S)
        moments["load_ns"] = time.monotonic_ns()
        if not case.rate_rps:
            time.sleep(case.load_s)
        if case.before:
            _load(case, list(case.before), folder, "before", port, model, probe, loading, seed)
            moments["change_ns"] = time.monotonic_ns()
        if case.rate_rps:
            _load(case, list(case.classes), folder, CLIENT, port, model, probe, loading, seed)
        moments["load_over_ns"] = time.monotonic_ns()
        over.set()
        time.sleep(AFTER_S)
    (folder / LOG).write_bytes(started + log.read_bytes()[begin:])
    content = {"name": case.name, "what": case.what, "keys": case.keys, "flags": case.flags,
               "report": case.report, "slo": SLO, "seed": seed, "plants": [asdict(plant) for plant in case.plants],
               "date": time.strftime("%Y-%m-%d %H:%M"), **moments}  # fmt: skip
    (folder / CASE).write_text(json.dumps(content, indent=1), encoding="utf-8")


@contextlib.contextmanager
def _pages(folder: Path, port: int, loading: threading.Event) -> Iterator[None]:
    """A page each second, and the moments at which none could be read. `loading` is set as soon as one shows tokens of
    a prompt that none had before."""
    ended, unread, prompts = threading.Event(), [], set()

    def read() -> None:
        with page_log(folder / PAGES) as add:
            while not ended.is_set():
                begin_ns = time.monotonic_ns()
                try:
                    _, body = fetch(f"http://{HOST}:{port}/metrics", timeout_s=5.0)
                except Exception as error:
                    unread.append({"ns": time.monotonic_ns(), "error": str(error)})
                else:
                    now_ns = time.monotonic_ns()
                    add(now_ns, (now_ns - begin_ns) / 1e9, body)
                    prompts.add(tuple(line for line in body.split(b"\n") if line.startswith(PROMPT_TOKENS)))
                    if len(prompts) > 1:
                        loading.set()
                ended.wait(max(0.0, PAGE_S - (time.monotonic_ns() - begin_ns) / 1e9))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        (folder / UNREAD).write_text(json.dumps(unread), encoding="utf-8")


def _load(
    case: Case, classes: list, folder: Path, output: str, port: int, model: Path, probe: Path, loading: threading.Event,
    seed: int,
) -> None:  # fmt: skip
    """Runs the load with its surroundings, on the second core; the engine computes on the first."""
    scenario = {
        "description": case.what,
        "target": {"api": "completions", "usage": "continuous", "tokenizer": str(model), "timeout_s": case.timeout_s},
        "arrivals": {"process": "poisson", "rate_rps": case.rate_rps, "duration_s": case.load_s},
        "workload": {"classes": classes},
        "objectives": [{"klass": "all", "source": "our own choice", **SLO}],
        "measure": {
            "seed": crc32(
                f"{case.name} {output}{seed or ''}".encode()
            ),  # no prompt that a case before left in the cache
            "warmup_requests": 2,
        },
    }
    file = folder / f"{output}.yaml"
    file.write_text(yaml.safe_dump(scenario), encoding="utf-8")
    surroundings = PlantedSurroundings(case.around)
    url = surroundings.begin(parse_base_url(f"http://{HOST}:{port}"), folder).url
    words = ["load", str(file), "--base-url", url, "--output", str(folder / output), "--server-run", str(probe),
             "--save-result"]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "sojourn", *words], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)  # fmt: skip
    try:
        psutil.Process(process.pid).cpu_affinity([max(psutil.Process().cpu_affinity())])
        while not loading.wait(0.05) and process.poll() is None:
            pass
        surroundings.loading(_sender(process.pid))
        surroundings.sending()
        said, _ = process.communicate(timeout=LOAD_SECONDS)
    finally:
        surroundings.end()
        if process.poll() is None:
            process.kill()
    (folder / f"{output}.txt").write_text(said, encoding="utf-8")
    print(f"{case.name}: {output}: exit code {process.returncode}", *said.splitlines()[:4], sep="\n  ", flush=True)


def _sender(pid: int) -> int:
    """The process of the load generator that sends: the youngest child, or the command itself."""
    children = psutil.Process(pid).children(recursive=True)
    return children[-1].pid if children else pid
