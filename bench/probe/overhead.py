"""Tokens per second of one vLLM whose probe goes on and off, and the probe's own time a step.

    python -m bench.probe.overhead --python .../vllm/bin/python

One server runs all the time (bench.probe.switched). Every 50 steps its probe is switched on or off, in the order on,
off, off, on. So on and off have the same process, the same load and nearly the same moment. Figures are medians
with a bootstrapped 95% interval:

- the ratio of tokens per second, plain and with what the sizes of the batches explain taken out;
- CPU time of the engine's loop and of the HTTP server;
- CPU time in each hook of a running server, a step. Over the time of a step it is the most that tokens per second can
  lose, as if nothing of it ran beside a step.

What it cannot show: the cost on a GPU.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd

from bench.engines.client_process import run_client
from bench.engines.servers import Server
from bench.probe.vllm_with_probe import PROBE, vllm_with_probe
from bench.workloads import Workload

CONCURRENCY, REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 48, 64, (32, 96)
RESAMPLES = 10_000
BATCHES = (1, 8, 32, 128)
BURSTS = 5  # of REQUESTS, on the clocked server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter of vLLM's environment")
    parser.add_argument("--requests", type=int, default=4000, help="that the switched server gets, 12 a second or so")
    parser.add_argument("--keep", type=Path, help="a folder for the windows; it is made")
    chosen = parser.parse_args()
    for batch in BATCHES:
        print(f"the probe's own time a step with {batch} requests: {step_microseconds(batch):.1f} µs", flush=True)
    in_server(chosen.python)
    with tempfile.TemporaryDirectory() as folder:
        kept = chosen.keep or Path(folder) / "windows"
        kept.mkdir(parents=True, exist_ok=True)
        switched(chosen.python, kept, chosen.requests)
        report(windows_of(kept, "core"), windows_of(kept, "front"))


def switched(python: str, kept: Path, requests: int) -> None:
    """One server whose probe goes on and off, under one load of CONCURRENCY streams. Its windows are below `kept`."""
    module = "bench.probe.switched"
    server = vllm_with_probe(python, kept / "probe", times=kept / "times", threads=1, module=module)
    server.start()
    try:
        burst(server, seed=0, requests=requests)
        time.sleep(1)
    finally:
        server.stop()


def windows_of(kept: Path, role: str) -> pd.DataFrame:
    """The windows of one process, in their order: not the first four, in which it warmed up, nor the last, cut one."""
    (file,) = kept.glob(f"times.{role}.*")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return pd.DataFrame(rows).iloc[4:-1].reset_index(drop=True)


def report(core: pd.DataFrame, front: pd.DataFrame) -> None:
    core = core.iloc[: len(core) - len(core) % 4]
    speed = np.log(core.tokens / core.wall_ns)
    print(f"{len(core)} windows of {core.wall_ns.median() / 1e6:.0f} ms in one server")
    print("tokens/s, probe on over off: {1:.4f} ({0:.4f} to {2:.4f})".format(*ratio_of(speed, core.on)))
    print("... with equal tokens a step: {1:.4f} ({0:.4f} to {2:.4f})".format(*ratio_of(-per_step(core), core.on)))
    for name, windows in (("loop", core), ("HTTP server", front)):
        each = windows.groupby("on")[["cpu_ns", "wall_ns"]].sum()
        share = each.cpu_ns / each.wall_ns
        print(f"CPU of the {name}: {share[False]:.2%} of a core off, {share[True]:.2%} on")
    print("CPU of the loop a step, on over off: {1:.4f} ({0:.4f} to {2:.4f})".format(
        *ratio_of(np.log(core.cpu_ns / core.steps), core.on)))  # fmt: skip


def per_step(windows: pd.DataFrame) -> pd.Series:
    """The log of the time of a step, without what the number of tokens in its batches explains."""
    sizes = np.column_stack([np.ones(len(windows)), windows.scheduled / windows.steps, windows.tokens / windows.steps])
    seconds = windows.wall_ns / windows.steps
    fit, *_ = np.linalg.lstsq(sizes, seconds, rcond=None)
    return np.log(seconds / (sizes @ fit))


def ratio_of(logs: pd.Series, on: pd.Series) -> tuple[float, float, float]:
    """On over off, from windows in the order on, off, off, on: each block of four gives one difference, in which a slow
    drift of the machine cancels."""
    signed = np.where(on, logs, -logs)
    blocks = signed.reshape(-1, 4).sum(axis=1) / 2
    return tuple(np.exp(each) for each in interval(blocks))  # type: ignore[return-value]


def in_server(python: str) -> None:
    """CPU time in each hook of a running server, and its share of a step."""
    with tempfile.TemporaryDirectory() as folder:
        times, module = Path(folder) / "times", "bench.probe.timed"
        server = vllm_with_probe(python, Path(folder) / "probe", times=times, threads=1, module=module)
        server.start()
        try:
            speeds = [burst(server, seed, REQUESTS) for seed in range(BURSTS)]
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


def burst(server: Server, seed: int, requests: int) -> float:
    """Streamed requests, CONCURRENCY at a time; output tokens per second. Lengths vary, so that no two streams end
    together."""
    draw = random.Random(seed)
    work = Workload(
        "streams",
        [[draw.randrange(100, 2000) for _ in range(PROMPT_TOKENS)] for _ in range(requests)],
        [draw.randint(*OUTPUT_TOKENS) for _ in range(requests)],
    )
    return run_client(server, work, CONCURRENCY, stream=True)["figures"]["output_tokens_per_s"]


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """The median, between the ends of 95% of the medians of resamples."""
    draw = np.random.default_rng(0)
    medians = np.median(draw.choice(values, (RESAMPLES, len(values))), axis=1)
    low, high = np.quantile(medians, (0.025, 0.975))
    return float(low), float(np.median(values)), float(high)


def step_microseconds(batch: int, steps: int = 3000) -> float:
    """CPU time of the probe in the loop and in its thread, of a step that gives every request a token. Each 16th token
    of a request fills a block, which takes the room of another one."""
    sys.path.append(str(PROBE))
    from sojourn_probe.records import Start
    from sojourn_probe.vllm_blocks import BlockProbe
    from sojourn_probe.vllm_scheduler import CoreProbe
    from sojourn_probe.writer import FileSink, Writer

    names = [f"cmpl-0123456789abcdef-{number}-0-00000000" for number in range(batch)]
    pool = SimpleNamespace(
        num_gpu_blocks=1000, get_num_free_blocks=lambda: 10, cached_block_hash_to_block={}, enable_caching=True,
        hash_block_size=16, cache_full_blocks=lambda *_: None, _maybe_evict_cached_block=lambda _: True,
        reset_prefix_cache=lambda: True,
    )  # fmt: skip
    evicted = SimpleNamespace(block_hash=bytes(36))
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
        probe._blocks = BlockProbe(writer, pool, probe._handles, 16)

        fills = [False]

        def allocate_slots(request: SimpleNamespace, tokens: int) -> bool:
            if fills[0]:
                pool._maybe_evict_cached_block(evicted)
                pool.cache_full_blocks(request, (), 0, 1, 16, 0)
            return True

        allocate = probe.allocation(allocate_slots)
        requests = [
            SimpleNamespace(
                request_id=name,
                num_prompt_tokens=9,
                prompt_token_ids=[1] * 9,
                all_token_ids=[1] * 9,
                block_hashes=[bytes(32)],
            )
            for name in names
        ]
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
            fills[0] = number % 16 == 0
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
