"""Load generators against the truth: what each says of when tokens came, against when the server wrote them.

    python -m bench.load_generators.accuracy --guidellm .../guidellm --aiperf .../aiperf --vllm .../vllm/bin/python

Every client sends the same: completions at a constant rate (open loop), so many that `--streams` are open at once, to
the reference server, on the same two cores. Of vLLM's benchmark and of AIPerf the stamp of every token is in their
result files, of GuideLLM those of the first and the last token of a request. Only what the server wrote while all
streams were open counts. AIPerf writes raw records for it (`--export-level raw`), which it does not do by default.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from sojourn.loadgen.record.parse import read_records
from sojourn.loadgen.reference_server.instructions import ReplyTiming, ServedRequest
from sojourn.loadgen.run.experiment import load_url
from sojourn.loadgen.sweeps.calibrate import open_streams, reference_log, reference_server
from sojourn.metrics.compute.roofline import device_name
from sojourn.metrics.errors import SojournError
from sojourn.metrics.machine.host import company

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "scenarios" / "tiny-model"
TTFT_S, STREAM_S, PROMPT_TOKENS = 0.1, 3.0, 32
CLIENT_TIMEOUT_S = 300
# vLLM's own command asks for the name of its distribution, which a build for CPUs has another one of.
VLLM_BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)


class ClientFailed(SojournError):
    """A client that did not run to its end, with the end of what it said."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load that every client sends."""

    streams: int
    tokens_per_s: float
    seconds: float  # for how long all streams are open
    in_step: bool

    @property
    def rate_rps(self) -> float:
        return self.streams / STREAM_S

    @property
    def requests(self) -> int:
        return round(self.rate_rps * (TTFT_S + STREAM_S + self.seconds))

    @property
    def tokens(self) -> int:
        return round(STREAM_S * self.tokens_per_s)


@dataclass(frozen=True, slots=True)
class Seen:
    """When a client says that tokens of one request came: by position in the reply, -1 for the last one."""

    request_id: str
    stamps_ns: dict[int, int]  # of the monotonic clock


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A client's error, and what it cost. Milliseconds."""

    client: str
    requests: int  # that the client reports and the server answered
    stamps: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float | None  # None if the client reports no single gaps
    streams: float  # open at once in the window, by the server
    cpu_seconds: float  # of the client and all its processes, from start to end
    wall_seconds: float


def accuracy(
    client: str, seen: list[Seen], answers: list[ServedRequest], cpu_seconds: float, wall_seconds: float
) -> Accuracy:  # fmt: skip
    """Compares one to one. Raises ClientFailed where nothing can be compared."""
    known = {answer.request_id: answer for answer in answers}
    window_ns = (min(answer.read_ns for answer in answers) + (TTFT_S + STREAM_S) * 1e9,
                 max(answer.read_ns for answer in answers))  # fmt: skip
    errors, first, gaps = [], [], []
    matched = 0
    for each in seen:
        answer = known.get(each.request_id)
        if answer is None or answer.end != "ok":
            continue
        matched += 1
        by_position = {}
        for position, ns in each.stamps_ns.items():
            position %= len(answer.write_ns)
            if window_ns[0] <= answer.write_ns[position] < window_ns[1]:
                by_position[position] = ns - answer.write_ns[position]
        errors += by_position.values()
        first += [error for position, error in by_position.items() if position == 0]
        gaps += [error - by_position[position - 1] for position, error in by_position.items()
                 if position - 1 in by_position]  # fmt: skip
    if not errors or not first:
        raise ClientFailed(f"{client} told {len(seen)} requests, {matched} of them known, none while all were open")
    p50, p99, most = np.quantile(errors, [0.5, 0.99, 1.0]) / 1e6
    written = sum(window_ns[0] <= ns < window_ns[1] for answer in answers for ns in answer.write_ns)
    per_stream = 1e9 / np.median(np.diff(answers[0].due_ns)) * (window_ns[1] - window_ns[0]) / 1e9
    return Accuracy(
        client, matched, len(errors), float(p50), float(p99), float(most),
        float(np.quantile(np.abs(first), 0.99) / 1e6),
        float(np.quantile(np.abs(gaps), 0.99) / 1e6) if gaps else None,
        written / per_stream, cpu_seconds, wall_seconds,
    )  # fmt: skip


def run_ours(load: Load, url: str, folder: Path) -> list[Seen]:
    """`sojourn load`, in its own processes, live table and scraper included."""
    scenario = open_streams(load.streams, load.tokens_per_s, load.seconds, STREAM_S, TTFT_S)
    load_url(scenario, url, folder / "run")
    return [Seen(record.request_id, dict(enumerate(record.chunk_ns))) for record in read_records(folder / "run")]


def run_vllm(python: str, load: Load, url: str, folder: Path) -> list[Seen]:
    _run([
        python, "-c", VLLM_BENCH, "--backend", "openai", "--base-url", url, "--model", "reference",
        "--tokenizer", str(TOKENIZER), "--dataset-name", "random", "--random-input-len", str(PROMPT_TOKENS),
        "--random-output-len", str(load.tokens), "--num-prompts", str(load.requests),
        "--request-rate", str(load.rate_rps), "--burstiness", "1000000", "--ignore-eos", "--save-result",
        "--save-detailed", "--result-dir", str(folder), "--result-filename", "vllm.json",
        "--request-id-prefix", "vllm-", "--disable-tqdm",
    ])  # fmt: skip
    return vllm_seen(json.loads((folder / "vllm.json").read_text()))


def vllm_seen(result: dict) -> list[Seen]:
    """Its arrays are in the order of the prompts, whose number it sends as the request's id."""
    seen = []
    for number, (start, ttft, itl) in enumerate(
        zip(result["start_times"], result["ttfts"], result["itls"], strict=True)
    ):
        if ttft:
            stamps = (start + ttft + np.concatenate([[0.0], np.cumsum(itl)])) * 1e9
            seen.append(Seen(f"vllm-{number}", {position: int(ns) for position, ns in enumerate(stamps)}))
    return seen


def run_guidellm(program: str, load: Load, url: str, folder: Path) -> list[Seen]:
    _run([
        program, "run", "--backend", f"kind=openai_http,target={url},model=reference",
        "--profile", f"kind=constant,rate={load.rate_rps}", "--constraint", f"kind=max_requests,count={load.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={load.tokens}",
        "--output", f"kind=json,path={folder / 'guidellm.json'}", "--disable-progress",
    ])  # fmt: skip
    return guidellm_seen(json.loads((folder / "guidellm.json").read_text()), time.time_ns() - time.monotonic_ns())


def guidellm_seen(report: dict, wall_ahead_ns: int) -> list[Seen]:
    """It reports the first and the last token of a request, by the wall clock; the reply's id names the request."""
    seen = []
    for request in report["benchmarks"][0]["requests"]["successful"]:
        timings = request["info"]["timings"]
        stamps = {0: timings["first_token_iteration"], -1: timings["last_token_iteration"]}
        stamps_ns = {position: int(moment * 1e9) - wall_ahead_ns for position, moment in stamps.items()}
        seen.append(Seen(request["response_id"], stamps_ns))
    return seen


def run_aiperf(program: str, load: Load, url: str, folder: Path) -> list[Seen]:
    # Offline it takes a tokenizer from a hub's cache only.
    revision, cache = "0" * 40, folder / "hub" / "models--local--tiny"
    snapshot = cache / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(revision)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TOKENIZER / name, snapshot)
    _run([
        program, "profile", "-m", "reference", "--tokenizer", "local/tiny", "--endpoint-type", "completions",
        "--streaming",
        "-u", url, "--request-rate", str(load.rate_rps), "--request-rate-mode", "constant",
        "--request-count", str(load.requests), "--synthetic-input-tokens-mean", str(PROMPT_TOKENS),
        "--synthetic-input-tokens-stddev", "0", "--output-tokens-mean", str(load.tokens),
        "--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true", "--ui", "none", "--export-level", "raw",
        "--output-artifact-dir", str(folder / "out"),
    ], {"HF_HOME": str(folder)})  # fmt: skip
    return aiperf_seen((folder / "out" / "profile_export_raw.jsonl").read_text().splitlines())


def aiperf_seen(lines: list[str]) -> list[Seen]:
    """One line a request: every read of an event has a stamp of the monotonic clock."""
    seen = []
    for record in map(json.loads, lines):
        stamps = [
            response["perf_ns"]
            for response in record["responses"]
            for packet in response["packets"]
            if packet["name"] == "data" and packet["value"].startswith("{") and json.loads(packet["value"])["choices"]
        ]
        seen.append(Seen(record["metadata"]["x_request_id"], dict(enumerate(stamps))))
    return seen


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    """Runs a foreign client, offline. Raises ClientFailed with the end of what it said."""
    offline = os.environ | {"HF_HUB_OFFLINE": "1"} | (environment or {})
    done = subprocess.run(command, env=offline, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S)
    if done.returncode:
        raise ClientFailed(f"{command[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}")


def measure(client: str, run: Callable[[Load, str, Path], list[Seen]], load: Load) -> Accuracy:
    """One client against a fresh reference server."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sojourn-clients-")))
        timing = ReplyTiming(ttft_s=TTFT_S, token_s=1 / load.tokens_per_s, in_step=load.in_step)
        endpoint = stack.enter_context(reference_server(timing, folder / "server.log"))
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        seen = run(load, endpoint.url, folder)
        after, wall_seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - begin
        cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return accuracy(client, seen, reference_log(endpoint).requests, cpu_seconds, wall_seconds)


def contenders(guidellm: str | None, aiperf: str | None, vllm: str | None) -> dict[str, Callable]:
    """Ours, and each peer that is named."""
    found: dict[str, Callable] = {"sojourn": run_ours}
    for name, program, run in (
        ("guidellm", guidellm, run_guidellm), ("aiperf", aiperf, run_aiperf), ("vllm bench serve", vllm, run_vllm)
    ):  # fmt: skip
        if program:
            found[name] = lambda load, url, folder, program=program, run=run: run(program, load, url, folder)
    return found


def table(results: list[Accuracy], load: Load) -> Table:
    found = Table(title=f"{load.streams} streams of {load.tokens_per_s:g} tokens/s, "
                        f"{'in step' if load.in_step else 'each on its own'}; error of a stamp, ms")  # fmt: skip
    for head in ("client", "stamps", "p50", "p99", "max", "TTFT p99", "ITL p99", "streams open", "CPU s", "wall s"):
        found.add_column(head, justify="left" if head == "client" else "right")
    for each in results:
        gap = "–" if each.itl_p99_ms is None else f"{each.itl_p99_ms:.2f}"
        found.add_row(
            each.client, f"{each.stamps:,}", f"{each.p50_ms:.2f}", f"{each.p99_ms:.2f}", f"{each.max_ms:.1f}",
            f"{each.ttft_p99_ms:.2f}", gap, f"{each.streams:.0f}", f"{each.cpu_seconds:.1f}",
            f"{each.wall_seconds:.0f}",
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, what in (("guidellm", "program"), ("aiperf", "program"), ("vllm", "Python that has vLLM")):
        parser.add_argument(f"--{name}", help=f"its {what}; without it, it is left out")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--rate", type=float, default=50.0, help="tokens/s of each stream")
    parser.add_argument("--seconds", type=float, default=6.0, help="for how long all streams are open")
    parser.add_argument("--own", action="store_true", help="each stream on its own instead of all in step")
    parser.add_argument("--repeats", type=int, default=1, help="in turns; each is a line")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)  # children too: client and server share them
    load, out = Load(options.streams, options.rate, options.seconds, not options.own), Console(width=110)
    if busy := company():
        out.print(busy, highlight=False)
    results = []
    for _ in range(options.repeats):
        for name, run in contenders(options.guidellm, options.aiperf, options.vllm).items():
            try:
                results.append(measure(name, run, load))
            except (ClientFailed, subprocess.TimeoutExpired) as error:
                out.print(f"{name}: {error}", highlight=False, markup=False)
    out.print(table(results, load))
    out.print(f"{device_name()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC", highlight=False)
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in results], indent=2))


if __name__ == "__main__":
    sys.exit(main())
