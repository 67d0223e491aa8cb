"""Other tools' rules on the same planted faults: each reads the recorded /metrics of a case, served again as it came.

    python -m bench.watch.rivals FOLDER --rivals DIR

FOLDER is one that `bench.watch.cases --python` filled; DIR has an environment for each tool (`rivals-NAME/bin/NAME`).
Tools that want a Prometheus get one that scrapes the pages once a second (Debian's `prometheus`). Each tool is asked
once, 20 s after the load began. The tools run as published, with their own thresholds; those that take objectives get
those of the case. Nothing of them is in this file but the names of their findings.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.engines.servers import HOST
from bench.watch.cases import CASES, VIEWS, Case, cell, said_in
from bench.watch.pages import read_pages, served
from sojourn.interop.sources.page import rows_of
from sojourn.metrics.errors import SojournError

ASKED_S = 20.0  # after the load began
TOOL_SECONDS = 60
RUNNING = "vllm:num_requests_running"
CAP, POOL, CACHE, PROMPTS, OVERLOAD = (
    "batch-cap", "tiny-kv-space", "prefix-cache-off", "long-prompts-beside-chat", "overload",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tool finds a case."""

    url: str
    prometheus: str
    home: Path
    case: Case


@dataclass(frozen=True, slots=True)
class Rival:
    """A tool. `accepts`: its finding → the cases for which it counts as right, generously."""

    name: str
    words: Callable[[Place], list[str]]
    findings: Callable[[dict[str, Any]], list[str]]  # of its JSON, the most important first
    accepts: Mapping[str, tuple[str, ...]]


def _doctor_findings(said: dict[str, Any]) -> list[str]:
    return [check["id"] for check in said["checks"] if check["finding"] is not None]


def _pilot_findings(said: dict[str, Any]) -> list[str]:
    return [] if said["verdict"] == "healthy_or_underutilized" else [said["verdict"]]


def _aiops_findings(said: dict[str, Any]) -> list[str]:
    named = (cause["cause"].split(" — ")[0].split(" in the ")[0] for cause in said["probableCauses"])
    return [name for name in named if not name.startswith("No ")]


def _inference_doctor_findings(said: dict[str, Any]) -> list[str]:
    return [finding["id"] for finding in said["findings"]]


def _aiops_words(place: Place) -> list[str]:
    port = int(place.url.rsplit(":", 1)[1])
    folder = place.home / ".inference-aiops"
    folder.mkdir(exist_ok=True)
    target = {"name": "case", "host": HOST, "vllm_port": port, "engine": "vllm"}
    (folder / "config.yaml").write_text(json.dumps({"targets": [target]}), encoding="utf-8")  # JSON is YAML
    return ["metrics", "diagnose"]


def _inference_doctor_words(place: Place) -> list[str]:
    words = ["diagnose", "--prometheus", place.prometheus, "--window", "1m", "--fail-on", "never", "--json"]
    for name, option in (("ttft_ms", "--ttft-slo-ms"), ("tpot_ms", "--tpot-slo-ms")):
        if name in place.case.slo:
            words += [option, str(place.case.slo[name])]
    return words


RIVALS = (
    Rival("vllm-doctor", lambda place: ["diagnose", place.prometheus, "--since", "1m", "-o", "json"],
          _doctor_findings, {
        "kv_cache_pressure": (POOL,), "preemption_pressure": (POOL,), "prefix_cache_efficiency": (CACHE,),
        "queue_pressure": (OVERLOAD, CAP, PROMPTS), "queue_latency": (OVERLOAD, CAP, PROMPTS, POOL),
        "ttft_bottleneck": (PROMPTS, OVERLOAD), "tpot_bottleneck": (PROMPTS, OVERLOAD), "low_throughput": (CAP,),
    }),
    Rival("inferpilot", lambda place: ["inspect", "--url", place.url, "--interval", "10", "--json"], _pilot_findings, {
        "kv_capacity_bound_preempting": (POOL,), "near_capacity": (POOL,), "not_kv_bound": (OVERLOAD, CAP),
    }),
    Rival("inference-doctor", _inference_doctor_words, _inference_doctor_findings, {
        "QUEUE_PRESSURE": (OVERLOAD, CAP), "PREFILL_PRESSURE": (PROMPTS, CACHE), "DECODE_PRESSURE": (PROMPTS,),
        "KV_CACHE_PRESSURE": (POOL,),
    }),
    Rival("inference-aiops", _aiops_words, _aiops_findings, {
        "KV-cache pressure / preemption": (POOL,), "Queue backpressure": (OVERLOAD, CAP), "Cold prefix cache": (CACHE,),
    }),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rivals", required=True, type=Path, help="the folder with their environments")
    chosen = parser.parse_args()
    if shutil.which("prometheus") is None:
        raise SystemExit("prometheus is not installed (Debian: apt-get install prometheus)")
    present = [rival for rival in RIVALS if _binary(chosen.rivals, rival).exists()]
    cases = [case.on_vllm for case in CASES if (chosen.folder / f"{case.name}.pages.gz").exists()]
    todo = [case for case in cases if not _said_file(chosen.folder, case).exists()]
    with ThreadPoolExecutor(max(1, len(todo))) as pool:
        for done in [pool.submit(ask, case, chosen.folder, chosen.rivals, present) for case in todo]:
            done.result()
    print(table(chosen.folder, cases, present))


def _binary(rivals: Path, rival: Rival) -> Path:
    return rivals.resolve() / f"rivals-{rival.name}" / "bin" / rival.name


def _said_file(folder: Path, case: Case) -> Path:
    return folder / f"{case.name}.rivals.json"


def ask(case: Case, folder: Path, rivals: Path, present: list[Rival]) -> None:
    """Serves the case in real time, and writes what each tool found, the most important first."""
    pages = folder / f"{case.name}.pages.gz"
    came_s = _load_came_s(pages)
    with tempfile.TemporaryDirectory() as home, served(pages) as url, _prometheus(url, Path(home)) as prometheus:
        place = Place(url, prometheus, Path(home), case)
        time.sleep(came_s + ASKED_S)
        with ThreadPoolExecutor(len(present)) as pool:
            answers = pool.map(lambda rival: _answer(_binary(rivals, rival), rival.words(place), place), present)
            said = {rival.name: rival.findings(answer) for rival, answer in zip(present, answers, strict=True)}
    _said_file(folder, case).write_text(json.dumps(said, indent=1), encoding="utf-8")


def _load_came_s(pages: Path) -> float:
    """Seconds from the first page to the first that shows a running request."""
    first_ns = None
    for ns, took_s, body in read_pages(pages):
        first_ns = ns if first_ns is None else first_ns
        if any(row["value"] > 0 for row in rows_of(body, ns, took_s) if row["name"] == RUNNING):
            return (ns - first_ns) / 1e9
    raise SojournError(f"{pages} shows no running request")


def _answer(binary: Path, words: list[str], place: Place) -> dict[str, Any]:
    done = subprocess.run(
        [str(binary), *words], cwd=place.home, env=os.environ | {"HOME": str(place.home)}, capture_output=True,
        text=True, timeout=TOOL_SECONDS,
    )  # fmt: skip
    begin = done.stdout.find("{")
    if begin < 0:
        raise SojournError(f"{binary.name} said no JSON: {done.stdout[-300:]}{done.stderr[-300:]}")
    return json.loads(done.stdout[begin:])


@contextmanager
def _prometheus(url: str, folder: Path) -> Iterator[str]:
    """The address of a Prometheus that scrapes the case once a second."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    target = url.removeprefix("http://")
    job = {"job_name": "vllm", "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    words = ["--config.file=prometheus.yml", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen(
        ["prometheus", *words, f"--web.listen-address={HOST}:{port}"], cwd=folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait()


def table(folder: Path, cases: list[Case], present: list[Rival]) -> str:
    """Markdown: what ours and each tool named."""
    heads = ["`/metrics`", "`/metrics`, `--slo`", "probe", *(rival.name for rival in present)]
    lines, right = [f"| case | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"], [0] * len(heads)
    for case in cases:
        said = json.loads(_said_file(folder, case).read_text(encoding="utf-8"))
        cells = [cell(case, said_in(folder, case, view)) for view in VIEWS]
        cells += [_cell(case, rival, said[rival.name]) for rival in present]
        right = [count + (each == "silent" if not case.keys else each.startswith(("`", "right")))
                 for count, each in zip(right, cells, strict=True)]  # fmt: skip
        lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"| right | {' | '.join(f'{each} of {len(cases)}' for each in right)} |"])


def _cell(case: Case, rival: Rival, found: list[str]) -> str:
    if not case.keys:
        return f"**false**: `{found[0]}`" if found else "silent"
    accepted = [case.name in rival.accepts.get(name, ()) for name in found]
    if not any(accepted):
        return f"**wrong**: `{found[0]}`" if found else "silent"
    return f"right: `{found[0]}`" if accepted[0] else f"beside: `{found[accepted.index(True)]}`"


if __name__ == "__main__":
    main()
