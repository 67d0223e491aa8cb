"""Six planted faults and two controls on an unmodified vLLM: verdicts with the probe, from /metrics, by thresholds.

    python -m bench.probe.cases --python .../vllm/bin/python --into FOLDER

Each case is a server's flags, a load, and the causes that count as right. The runs stay in FOLDER; a case that is there
is not measured again. `sojourn dev faults score FOLDER` reads them, too.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import yaml

from bench.engines.servers import HOST, Server
from bench.json_process import ROOT
from bench.probe.vllm_with_probe import TINY_MODEL, vllm_with_probe
from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.score.judgement import judge
from sojourn.diagnosis.score.said import Said, said_of
from sojourn.diagnosis.score.scoring import attainment
from sojourn.diagnosis.score.threshold_rules import threshold_verdict
from sojourn.diagnosis.score.truth import FaultRecord, Truth, write_fault
from sojourn.diagnosis.shares import closure
from sojourn.loadgen.faults.planted import Network
from sojourn.loadgen.faults.surroundings import PlantedSurroundings
from sojourn.loadgen.target.endpoint import parse_base_url
from sojourn.metrics.run.directory import RunDirectory

LOAD_SECONDS = 240
THREADS = 1  # of the model: the HTTP server and the load generator take the other core
BASE_FLAGS = ("--max-num-seqs", "32", "--max-num-batched-tokens", "512", "--block-size", "32")
CHAT = {"klass": "chat", "prompt_tokens": 160, "output_tokens": 48, "ignore_eos": True}
SHARED = {"klass": "assistant", "prompt_tokens": 1000, "output_tokens": 24, "ignore_eos": True,
          "shared_prefix_tokens": 960, "num_shared_prefixes": 2}  # fmt: skip
DOCUMENT = {"klass": "document", "prompt_tokens": 1900, "output_tokens": 8, "ignore_eos": True, "weight": 1}
BOUNDS = {"ttft_ms": 500, "tpot_ms": 60}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    classes: list[dict[str, Any]]
    rate_rps: float
    seconds: float
    flags: tuple[str, ...] = BASE_FLAGS
    keys: tuple[str, ...] = ()  # of causes that are right, the best first; none for a control
    lifecycles: tuple[str, ...] = ()
    state: str | None = None  # of a control
    objectives: list[dict[str, Any]] = field(default_factory=lambda: [{"klass": "all", **BOUNDS}])
    max_model_len: int = 2048
    network: Network | None = None

    @property
    def record(self) -> FaultRecord:
        kinds = ["client"] if "client" in self.lifecycles else ["policy", "capacity", "workload"]
        truths = [Truth(keys=list(self.keys), lifecycles=list(self.lifecycles), kinds=kinds)] if self.keys else []
        return FaultRecord(case=self.name, workload=self.name, truths=truths, control=self.state, plant=str(self.flags))


def _with(*flags: str) -> tuple[str, ...]:
    """The flags of the base, with others in their place."""
    chosen = dict(zip(BASE_FLAGS[::2], BASE_FLAGS[1::2], strict=True)) | dict(zip(flags[::2], flags[1::2], strict=True))
    return tuple(word for pair in chosen.items() for word in pair)


CASES = (
    Case("control-chat", [CHAT], 4, 20, state="healthy"),
    Case("control-prefixes", [SHARED], 11, 20, state="healthy"),
    Case("slow-reader", [CHAT | {"output_tokens": 96}], 3, 20, keys=("slow_reader", "slow_network"),
         lifecycles=("client", "request"), objectives=[{"klass": "all", "ttft_ms": 500, "e2e_ms": 2500}],
         network=Network(fault="network", kib_per_s=6, share=0.34)),
    Case("overload", [CHAT | {"prompt_tokens": 1200, "output_tokens": 24}], 12, 12,
         _with("--max-num-seqs", "128", "--max-num-batched-tokens", "2048"), state="overloaded"),
    Case("batch-cap", [CHAT], 4, 20, _with("--max-num-seqs", "1"), ("batch_cap",), ("request",)),
    Case("tiny-kv-space", [CHAT | {"output_tokens": 200}], 4, 20,
         (*BASE_FLAGS, "--num-gpu-blocks-override", "26"), ("kv_pool",), ("memory",), max_model_len=512),
    Case("prefix-cache-off", [SHARED], 11, 20, (*BASE_FLAGS, "--no-enable-prefix-caching"), ("prefix_cache_off",),
         ("memory",)),
    Case("long-prompts-beside-chat", [CHAT | {"weight": 1, "output_tokens": 24}, DOCUMENT], 3, 24,
         _with("--max-num-batched-tokens", "2048"), ("token_budget_large", "head_of_line", "prefill_chunk"),
         ("request", "compute"), objectives=[{"klass": "chat", "ttft_ms": 500, "tpot_ms": 14},
                                             {"klass": "document", "ttft_ms": 3000}]),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--into", required=True, type=Path)
    parser.add_argument("--case", action="append", help="only these; repeatable")
    chosen = parser.parse_args()
    wanted = [case for case in CASES if not chosen.case or case.name in chosen.case]
    missing = [case for case in wanted if not (chosen.into / case.name / "diagnosis.json").exists()]
    for (flags, length), cases in groupby(missing, key=lambda case: (case.flags, case.max_model_len)):
        measure(chosen.python, chosen.into.resolve(), flags, length, list(cases))
    print(table(chosen.into, [case for case in wanted if (chosen.into / case.name / "diagnosis.json").exists()]))


def measure(python: str, folder: Path, flags: Sequence[str], max_model_len: int, cases: Sequence[Case]) -> None:
    """One server for cases with the same flags."""
    record = folder / f"probe-{cases[0].name}"
    server = vllm_with_probe(python, record, *flags, max_model_len=max_model_len, threads=THREADS)
    server.start()
    try:
        for case in cases:
            with _reached(server, case, folder) as url:
                _load(case, folder, url, record)
    finally:
        server.stop()


@contextmanager
def _reached(server: Server, case: Case, folder: Path) -> Iterator[str]:
    """The address of the server, or of the planted network before it."""
    url = f"http://{HOST}:{server.port}"
    if case.network is None:
        yield url
        return
    surroundings = PlantedSurroundings([case.network])
    try:
        yield surroundings.begin(parse_base_url(url), folder).url
    finally:
        surroundings.end()


def _load(case: Case, folder: Path, url: str, record: Path) -> None:
    scenario = {
        "description": case.name,
        "target": {"api": "completions", "usage": "continuous", "tokenizer": str(TINY_MODEL), "timeout_s": 60},
        "arrivals": {"process": "poisson", "rate_rps": case.rate_rps, "duration_s": case.seconds},
        "workload": {"classes": case.classes},
        "objectives": [bounds | {"source": "our own choice"} for bounds in case.objectives],
        "measure": {"seed": 1, "warmup_requests": 4},
    }
    file = folder / f"{case.name}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(scenario), encoding="utf-8")
    words = ["load", str(file), "--base-url", url, "--output", str(folder / case.name), "--server-run", str(record)]
    done = subprocess.run(
        [sys.executable, "-m", "sojourn", *words], cwd=ROOT, capture_output=True, text=True, timeout=LOAD_SECONDS
    )
    print(f"{case.name}: exit code {done.returncode}", *done.stdout.splitlines()[-1:], done.stderr[-500:], flush=True)
    run = RunDirectory.open(folder / case.name)
    write_fault(run, case.record)


def table(folder: Path, cases: Sequence[Case]) -> str:
    """Markdown: what each level says first, and whether that is right."""
    lines = ["| case | good | with the probe | `/metrics` only | thresholds | ledgers that close |", "|---" * 6 + "|"]
    for case in cases:
        run = RunDirectory.open(folder / case.name)
        good = attainment(run)
        said = {
            "probe": said_of(json.loads((run.path / "diagnosis.json").read_text(encoding="utf-8"))),
            "metrics": said_of(msgspec.to_builtins(diagnose(run, level="metrics"))),
            "thresholds": threshold_verdict(run),
        }
        cells = [_cell(case, level, verdict, good) for level, verdict in said.items()]
        closed = closure(read_evidence(run).rows)
        lines.append(f"| {case.name} | {good:.0%} | {' | '.join(cells)} | {closed.closed} of {closed.joined} |")
    return "\n".join(lines)


def _cell(case: Case, level: str, said: Said, good: float) -> str:
    judged = judge(case.name, case.record, level, said, good, None, {})
    right = said.state == case.state if case.state else bool(judged.first)
    also = "" if right or case.state or not judged.among_three else " (among three)"
    first = said.causes[0].key if said.causes and not (case.state and right) else said.state
    return f"{'right' if right else 'wrong' if said.causes else 'none'}: `{first}`{also}"


if __name__ == "__main__":
    main()
