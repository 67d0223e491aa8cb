"""Tokens per second of vLLM with the probe and without it, interleaved; and the probe's own time a step.

    python -m bench.probe.overhead --python .../vllm/bin/python --pairs 20

Both servers stay up. A pair is the same work on both, one after the other, and the order changes from pair to pair.
Figures are medians with a bootstrapped 95 % interval:

- the ratio of tokens per second, which has all of the machine's noise in it;
- CPU time a token of the engine's loop and of the HTTP server, without the workers that compute;
- CPU time in each hook of a running server, a step: it has least noise. Over the time of a step it is the most that
  tokens per second can lose, as if nothing of it ran beside a step.

What it cannot show: the cost on a GPU.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil

from bench.engines.client_process import run_client
from bench.engines.servers import Server
from bench.probe.vllm_with_probe import PROBE, vllm_with_probe
from bench.workloads import Workload

CONCURRENCY, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 48, 64, 48
RESAMPLES = 10_000
COMPUTES = "Worker"  # in the title of a process of vLLM that computes steps
BATCHES = (1, 8, 32, 128)
BURSTS = 5  # of the clocked server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--pairs", type=int, default=20)
    chosen = parser.parse_args()
    for batch in BATCHES:
        print(f"the probe's own time a step with {batch} requests: {step_microseconds(batch):.1f} µs")
    in_server(chosen.python)
    with tempfile.TemporaryDirectory() as folder:
        servers = [vllm_with_probe(chosen.python, None), vllm_with_probe(chosen.python, Path(folder) / "probe")]
        try:
            for server in servers:
                server.start()
            for server in servers:
                burst(server, seed=0)
            report(measured(servers, chosen.pairs))
        finally:
            for server in servers:
                server.stop()


@dataclass(frozen=True, slots=True)
class Burst:
    """One burst of requests on one server."""

    tokens_per_s: float
    cpu_us: float  # a token, of the loop and of the HTTP server


def measured(servers: list[Server], pairs: int) -> list[tuple[Burst, Burst]]:
    """Of each pair: without the probe, and with it."""
    off, on = servers
    found = []
    for pair in range(pairs):
        order = (off, on) if pair % 2 else (on, off)
        bursts = {server.name: burst(server, seed=pair) for server in order}
        found.append((bursts[off.name], bursts[on.name]))
        print(*(f"{each.tokens_per_s:.1f} tok/s {each.cpu_us:.0f} µs" for each in found[-1]), sep="   ", flush=True)
    return found


def in_server(python: str) -> None:
    """CPU time in each hook of a running server, and its share of a step."""
    with tempfile.TemporaryDirectory() as folder:
        server = vllm_with_probe(python, Path(folder) / "probe", times=Path(folder) / "times")
        server.start()
        try:
            speeds = [burst(server, seed).tokens_per_s for seed in range(BURSTS)]
            time.sleep(1)
        finally:
            server.stop()
        spent: dict[str, tuple[int, int]] = {}
        for file in Path(folder).glob("times.*"):
            spent |= {name: tuple(found) for name, found in json.loads(file.read_text()).items() if found[0]}
    steps = spent["CoreProbe.planned"][0]
    for name, (calls, ns) in sorted(spent.items()):
        print(f"{name}: {ns / calls / 1e3:.1f} µs a call, {ns / steps / 1e3:.1f} µs a step")
    loop_us = sum(ns for name, (_, ns) in spent.items() if name.startswith("CoreProbe")) / steps / 1e3
    step_us = 1e6 * CONCURRENCY / float(np.median(speeds))
    print(f"in the engine's loop {loop_us:.0f} µs of a step of {step_us / 1e3:.1f} ms: {loop_us / step_us:.2%}")


def report(pairs: list[tuple[Burst, Burst]]) -> None:
    ratios = np.array([on.tokens_per_s / off.tokens_per_s for off, on in pairs])
    print("tokens/s with the probe / without it: {1:.3f} ({0:.3f} to {2:.3f})".format(*interval(ratios)))
    added = np.array([on.cpu_us - off.cpu_us for off, on in pairs])
    without = float(np.median([off.cpu_us for off, _ in pairs]))
    print("CPU a token: {3:.0f} µs without, and {1:.1f} more ({0:.1f} to {2:.1f}) with it".format(
        *interval(added), without))  # fmt: skip
    lost = np.array([(on.cpu_us - off.cpu_us) * off.tokens_per_s / 1e6 for off, on in pairs])
    print("of the time a token, at most: {1:.2%} ({0:.2%} to {2:.2%})".format(*interval(lost)))


def burst(server: Server, seed: int) -> Burst:
    """Streamed requests, CONCURRENCY at a time."""
    draw = random.Random(seed)
    work = Workload(
        "streams",
        [[draw.randrange(100, 2000) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)],
        [OUTPUT_TOKENS] * REQUESTS,
    )
    before = cpu_seconds(server)
    figures = run_client(server, work, CONCURRENCY, stream=True)["figures"]
    spent = cpu_seconds(server) - before
    return Burst(figures["output_tokens_per_s"], spent / work.output_tokens * 1e6)


def cpu_seconds(server: Server) -> float:
    """User and system time of the server's processes until now, without those that compute."""
    total = 0.0
    for process in psutil.process_iter(["pid", "cmdline"]):
        with suppress(psutil.Error, ProcessLookupError):
            words = " ".join(process.info["cmdline"] or ())
            if os.getpgid(process.pid) == server.group and COMPUTES not in words:
                times = process.cpu_times()
                total += times.user + times.system
    return total


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """The median of the pairs, between the ends of 95 % of the medians of resampled pairs."""
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(values, (RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(np.median(values)), float(high)


def step_microseconds(batch: int, steps: int = 3000) -> float:
    """CPU time of the probe in the loop and in its thread, of a step that gives every request a token."""
    sys.path.append(str(PROBE))
    from sojourn_probe.records import Start
    from sojourn_probe.vllm_scheduler import CoreProbe
    from sojourn_probe.writer import FileSink, Writer

    names = [f"cmpl-0123456789abcdef-{number}-0-00000000" for number in range(batch)]
    pool = SimpleNamespace(num_gpu_blocks=1000, get_num_free_blocks=lambda: 10, cached_block_hash_to_block={})
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=pool), max_num_running_reqs=batch, max_num_scheduled_tokens=8192,
        waiting=(), running=names,
    )  # fmt: skip
    outputs = SimpleNamespace(
        outputs=[SimpleNamespace(request_id=name, new_token_ids=[1], finish_reason=None) for name in names]
    )
    with tempfile.TemporaryDirectory() as folder:
        writer = Writer(FileSink(Path(folder), "core"), Start(1, "core", 0, None, 0, 0, "vllm", "", ""))
        probe = CoreProbe(writer, scheduler)
        allocate = probe.allocation(lambda request, tokens: True)
        requests = [SimpleNamespace(request_id=name, num_prompt_tokens=9) for name in names]
        for request in requests:
            probe.arrived(request)
        begin = time.process_time()
        for number in range(steps):
            plan = SimpleNamespace(
                num_scheduled_tokens=dict.fromkeys(names, 1), total_num_scheduled_tokens=batch, scheduled_new_reqs=(),
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=names, num_computed_tokens=[number] * batch, resumed_req_ids=()
                ),
                scheduled_spec_decode_tokens={},
            )  # fmt: skip
            begin_ns = probe.turn()
            for request in requests:
                allocate(request, 1)
            probe.planned(scheduler, plan, begin_ns)
            probe.launched(plan)
            probe.updated(plan, {0: outputs}, probe.turn())
        writer.close()
        return (time.process_time() - begin) / steps * 1e6


if __name__ == "__main__":
    main()
