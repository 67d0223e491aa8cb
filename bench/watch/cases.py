"""Planted faults as a watch sees them: how soon each is named, by /metrics alone and with the server's records.

    python -m bench.watch.cases --into FOLDER [--case batch-cap] [--python .../vllm/bin/python]

Each case has a server that idles, sends it a load for a minute and judges it once a second as `sojourn watch` does.
Cases with the same settings have one server. With `--python` the server is vLLM of that environment, with the probe.
Judged live is the watch with records. The views by /metrics alone follow from the pages, which are kept: they are
judged when the table is printed, second by second, by the code as it is then. A case that is in FOLDER is not measured
again.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil
import yaml

from bench.engines.servers import HOST, Server, our_server
from bench.json_process import ROOT
from bench.probe.cases import THREADS
from bench.probe.vllm_with_probe import TINY_MODEL, vllm_with_probe
from bench.watch.pages import page_log, read_pages
from sojourn.interop.sources.page import rows_of
from sojourn.live.watch.fetch import fetch
from sojourn.live.watch.observer import Observer
from sojourn.live.watch.watcher import Watched
from sojourn.loadgen.faults.planted import Network
from sojourn.loadgen.faults.surroundings import PlantedSurroundings
from sojourn.loadgen.target.endpoint import parse_base_url

BEFORE_S, LOAD_S = 5.0, 62.0  # an idle server first, as one that is attached to
OURS = {"threads": 1, "max_num_seqs": 32, "max_num_batched_tokens": 512}
VLLM_FLAGS = ("--max-num-seqs", "32", "--max-num-batched-tokens", "512", "--block-size", "32")
CHAT = {"klass": "chat", "prompt_tokens": 160, "output_tokens": 96, "ignore_eos": True}
SHARED = {"klass": "assistant", "prompt_tokens": 1000, "output_tokens": 24, "ignore_eos": True,
          "shared_prefix_tokens": 960, "num_shared_prefixes": 2}  # fmt: skip
DOCUMENT = {"klass": "document", "prompt_tokens": 1900, "output_tokens": 8, "ignore_eos": True, "weight": 3}
SLO = {"ttft_ms": 500.0, "tpot_ms": 30.0}
RECORDS = "records, SLO"  # the view that is judged live
VIEWS = ("metrics", "metrics, SLO", RECORDS)


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    classes: list[dict[str, Any]]
    rate_rps: float
    keys: tuple[str, ...] = ()  # of causes that are right; none for a control, which must stay silent
    settings: Mapping[str, Any] = field(default_factory=dict)  # of ours
    flags: tuple[str, ...] = VLLM_FLAGS
    vllm_rate_rps: float = 3.0
    vllm_slo: Mapping[str, float] | None = None  # where it is another: at a bound of vLLM's histograms
    network: Network | None = None
    slo: Mapping[str, float] = field(default_factory=lambda: SLO)
    max_model_len: int = 2048

    @property
    def on_vllm(self) -> "Case":
        return replace(self, rate_rps=self.vllm_rate_rps, slo=self.vllm_slo or self.slo)


def _with(*flags: str) -> tuple[str, ...]:
    chosen = dict(zip(VLLM_FLAGS[::2], VLLM_FLAGS[1::2], strict=True)) | dict(zip(flags[::2], flags[1::2], strict=True))
    return tuple(word for pair in chosen.items() for word in pair)


CASES = (
    Case("control-chat", [CHAT], 4),
    Case("control-prefixes", [SHARED], 4),
    Case("batch-cap", [CHAT], 24, ("batch_cap",), {"max_num_seqs": 1}, _with("--max-num-seqs", "1")),
    Case("tiny-kv-space", [CHAT | {"output_tokens": 200}], 14, ("kv_pool",), {"num_kv_blocks": 64},
         (*VLLM_FLAGS, "--num-gpu-blocks-override", "26"), 4.0, max_model_len=512),
    Case("prefix-cache-off", [SHARED], 16, ("prefix_cache_off",), {"prefix_caching": False},
         (*VLLM_FLAGS, "--no-enable-prefix-caching"), 16.0),
    Case("long-prompts-beside-chat", [CHAT | {"weight": 7, "output_tokens": 24}, DOCUMENT], 5,
         ("token_budget_large", "head_of_line", "prefill_chunk"), {"max_num_batched_tokens": 4096},
         _with("--max-num-batched-tokens", "2048"), 7.0, {"ttft_ms": 1000.0, "tpot_ms": 10.0},
         slo={"ttft_ms": 1000.0, "tpot_ms": 15.0}),
    Case("slow-reader", [CHAT | {"output_tokens": 200}], 6, ("slow_reader", "slow_writer", "slow_network"),
         network=Network(fault="network", kib_per_s=8, share=0.34), slo={"ttft_ms": 500.0, "e2e_ms": 3000.0},
         vllm_rate_rps=1.5),
    Case("overload", [CHAT], 60, ("overload",), vllm_rate_rps=25.0),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", required=True, type=Path)
    parser.add_argument("--case", action="append", help="only these; repeatable")
    parser.add_argument("--python", help="the interpreter of vLLM's environment; without it the server is ours")
    chosen = parser.parse_args()
    wanted = [case.on_vllm if chosen.python else case for case in CASES if not chosen.case or case.name in chosen.case]
    missing = [case for case in wanted if not (chosen.into / f"{case.name}.json").exists()]
    for cases in _by_server(missing):
        measure(cases, chosen.into.resolve(), chosen.python)
    print(table(chosen.into, wanted))


def _by_server(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases that one server can have one after the other, in their order."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(f"{case.flags} {case.settings} {case.max_model_len}", []).append(case)
    return list(found.values())


def measure(cases: Sequence[Case], folder: Path, python: str | None) -> None:
    """Writes the pages of each case, and what the watch with records said, and when: seconds after the load began."""
    folder.mkdir(parents=True, exist_ok=True)
    records = folder / f"records-{cases[0].name}"
    server = _server(cases[0], records, python)
    server.start()
    try:
        for case in cases:
            said, last = _watch(case, folder, server, records if python else server.run_dir)
            content = {"case": case.name, "keys": case.keys, "said": said, "last": last}
            (folder / f"{case.name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    finally:
        server.stop()


def _server(case: Case, records: Path, python: str | None) -> Server:
    if python is not None:
        return vllm_with_probe(python, records, *case.flags, max_model_len=case.max_model_len, threads=THREADS)
    return our_server("watched", "tiny-model", OURS | dict(case.settings), records)


def _watch(case: Case, folder: Path, server: Server, records: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    url = f"http://{HOST}:{server.port}"
    watched = Watched(Observer(url, url, case.slo), records)
    said: list[dict[str, Any]] = []
    attached = time.monotonic()
    with page_log(_pages(folder, case)) as add_page, _reached(case, url, folder) as reached:
        _scrape(url, watched, said, add_page, lambda: time.monotonic() > attached + BEFORE_S)
        load = start_load(case, folder, reached, 2 * LOAD_S)
        _scrape(url, watched, said, add_page, lambda: time.monotonic() > (_came_s(watched) or math.inf) + LOAD_S)
        end_load(load)
    return _since_the_load(said, watched), msgspec.to_builtins(watched.shown)


def _pages(folder: Path, case: Case) -> Path:
    return folder / f"{case.name}.pages.gz"


def _came_s(watched: Watched) -> float | None:
    """When the first requests were seen in the server, by this host's clock."""
    moments = watched.observer.history
    return next((moment.ns / 1e9 for moment in moments if moment.running or moment.requests_per_s), None)


def _since_the_load(said: list[dict[str, Any]], watched: Watched) -> list[dict[str, Any]]:
    came = _came_s(watched) or 0.0
    return [each | {"s": round(each["s"] - came, 1)} for each in said]


def _scrape(
    url: str, watched: Watched, said: list[dict[str, Any]], add_page: Callable[[int, float, bytes], None],
    over: Callable[[], bool],
) -> None:  # fmt: skip
    while not over():
        now = time.monotonic()
        began_ns = time.monotonic_ns()
        _, body = fetch(f"{url}/metrics", timeout_s=5.0)
        read_ns = time.monotonic_ns()
        add_page(read_ns, (read_ns - began_ns) / 1e9, body)
        for entry in judged(watched, read_ns, (read_ns - began_ns) / 1e9, body):
            said.append(entry)
            print(f"{time.strftime('%H:%M:%S')} {entry['state']}: {entry['sentence']}", flush=True)
        time.sleep(max(0.0, now + 1.0 - time.monotonic()))


def judged(watched: Watched, ns: int, took_s: float, body: bytes) -> list[dict[str, Any]]:
    """What the watch says after this page that it had not said before."""
    watched.observer.add(ns, rows_of(body, ns, took_s))
    found = []
    for change in watched.judge(ns):
        keys = [each.key for each in watched.shown.findings]
        found.append({"s": ns / 1e9, "state": change.state, "key": keys[0] if keys else "", "all": keys,
                      "reads": watched.shown.reads, "sentence": change.sentence})  # fmt: skip
    return found


def said_in(folder: Path, case: Case, view: str) -> list[dict[str, Any]]:
    """What a view said of a case in FOLDER."""
    if view == RECORDS:
        return json.loads((folder / f"{case.name}.json").read_text(encoding="utf-8"))["said"]
    watched = Watched(Observer("", case.name, case.slo if view == "metrics, SLO" else {}))
    said = [entry for page in read_pages(_pages(folder, case)) for entry in judged(watched, *page)]
    return _since_the_load(said, watched)


@contextmanager
def _reached(case: Case, url: str, folder: Path) -> Iterator[str]:
    if case.network is None:
        yield url
        return
    surroundings = PlantedSurroundings([case.network])
    try:
        yield surroundings.begin(parse_base_url(url), folder).url
    finally:
        surroundings.end()


def start_load(case: Case, folder: Path, url: str, seconds: float) -> subprocess.Popen:
    scenario = {
        "description": case.name,
        "target": {"api": "completions", "usage": "continuous", "tokenizer": str(TINY_MODEL), "timeout_s": 120},
        "arrivals": {"process": "poisson", "rate_rps": case.rate_rps, "duration_s": seconds},
        "workload": {"classes": case.classes},
        "objectives": [{"klass": "all", "source": "our own choice", **case.slo}],
        "measure": {"seed": 1, "warmup_requests": 2},
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{case.name}.yaml"
    file.write_text(yaml.safe_dump(scenario), encoding="utf-8")
    words = ["load", str(file), "--base-url", url, "--output", str(folder / f"load-{case.name}")]
    return subprocess.Popen([sys.executable, "-m", "sojourn", *words], cwd=ROOT, stdout=subprocess.DEVNULL,
                            stderr=subprocess.DEVNULL)  # fmt: skip


def end_load(load: subprocess.Popen) -> None:
    """Ends the load and its processes at once: nobody reads its run."""
    for process in (*psutil.Process(load.pid).children(recursive=True), load):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    load.wait()


def table(folder: Path, cases: tuple[Case, ...] | list[Case]) -> str:
    """Markdown: what each view named, and after how many seconds of load."""
    lines = ["| case | `/metrics` | `/metrics` and `--slo` | with records and `--slo` |", "|---" * 4 + "|"]
    for case in cases:
        if (folder / f"{case.name}.json").exists():
            cells = [cell(case, said_in(folder, case, view)) for view in VIEWS]
            lines.append(f"| {case.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(case: Case, said: list[dict[str, Any]]) -> str:
    during = [each for each in said if each["s"] > 0]
    alarms = [each for each in during if each["state"] in ("degraded", "overloaded", "cannot tell")]
    if not case.keys:
        return "silent" if not alarms else f"**false**: `{alarms[0]['key'] or alarms[0]['state']}`"
    right = next((each for each in alarms if each["key"] in case.keys), None)
    if right is not None:
        return f"`{right['key']}` in {right['s']:.0f} s"
    among = next((each for each in alarms if set(each["all"]) & set(case.keys)), None)
    if among is not None:
        return f"`{among['key']}` in {among['s']:.0f} s, right one beside it"
    wrong = next((each for each in alarms if each["key"]), None)
    if wrong is not None:
        return f"**wrong**: `{wrong['key']}` in {wrong['s']:.0f} s"
    return f"abstains in {alarms[0]['s']:.0f} s" if alarms else "silent"


if __name__ == "__main__":
    main()
