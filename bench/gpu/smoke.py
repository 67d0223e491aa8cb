"""Does the engine start on this device, and do its ways of computing agree? Or, with --profile, where does a step's
time go?

    python -m bench.gpu.smoke [--device cuda] --json smoke.json
    python -m bench.gpu.smoke --profile qwen3-0.6b --json profile.json

The file is whole after every part: one that fails leaves its error and the parts before it.
"""

import argparse
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.shapes import model_to_bench, vocab_size
from sojourn.engine import LLM, SamplingParams

WISHES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"temperature": 0.8, "seed": 3}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"temperature": 0.7, "min_p": 0.05, "seed": 5}, {"temperature": 0.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logprobs": 2},
)  # fmt: skip
EAGER = {"graphs": "off", "overlap": "off"}
REFERENCE = EAGER | {"attention_backend": "torch", "fused_operations": "off"}
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "graphs and overlap": {"graphs": "on"}, "graphs": {"graphs": "on", "overlap": "off"}, "eager": EAGER,
        "reference": REFERENCE, "fp8": {"graphs": "on", "kv_cache_dtype": "fp8"},
        "tiers": {"graphs": "on", "kv_host_gib": 0.5, "kv_store_policy": "fill"},
        "float32": {"graphs": "on", "dtype": "float32"}, "float32 reference": REFERENCE | {"dtype": "float32"},
    },
    "cpu": {
        "overlap": {"overlap": "on"}, "eager": EAGER, "reference": REFERENCE, "tiers": EAGER | {"kv_host_gib": 0.5},
    },
}  # fmt: skip
AGREEMENTS = {
    "cuda": (
        ("graphs and overlap", "graphs"), ("graphs", "eager"), ("eager", "reference"), ("float32", "float32 reference"),
        ("graphs and overlap", "tiers"),
    ),
    "cpu": (("overlap", "eager"), ("eager", "reference"), ("eager", "tiers")),
}  # fmt: skip
BATCHES = (1, 8, 32, 128, 256)
CONTEXT, STEPS = 1000, 100  # tokens, and decode steps behind them
PROFILED = 5  # steps


class Parts:
    """The parts of a report."""

    def __init__(self, path: Path):
        self.path, self.found = path, {}

    def add(self, name: str, work: Callable[[], Any]) -> None:
        began = time.monotonic()
        try:
            self.found[name] = work()
        except Exception as error:
            self.found[name] = {"failed": repr(error)[:500], "where": traceback.format_exc()[-1500:]}
        self.found[f"{name}, seconds"] = round(time.monotonic() - began, 2)
        self.save()

    def save(self) -> None:
        self.path.write_text(json.dumps(self.found, indent=1))

    @property
    def failed(self) -> list[str]:
        return [name for name, part in self.found.items() if isinstance(part, dict) and "failed" in part]


def smoke(parts: Parts, model: str, load_format: str, device: str) -> None:
    """Starts the engine in every way, gives all the same requests, and compares their tokens."""
    vocabulary = vocab_size(model)
    prompts = [[(7 * i + j) % (vocabulary - 300) + 300 for j in range(20 + 37 * i)] for i in range(12)]
    controls = [
        SamplingParams(max_tokens=40 + 3 * i, ignore_eos=True, **WISHES[i % len(WISHES)]) for i in range(len(prompts))
    ]
    tokens: dict[str, list[list[int]]] = {}

    def start(name: str, settings: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        sizes = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 2048}
        with LLM(model, device=device, load_format=load_format, **sizes, **settings) as llm:
            marks = [began, time.monotonic()]
            outputs = llm.generate(prompts, controls)
            marks.append(time.monotonic())
            llm.generate([prompts[0]], controls[0])
            marks.append(time.monotonic())
            tokens[name] = [output.token_ids for output in outputs]
            names = ("start_s", "first_requests_s", "later_request_s")
            times = {key: round(b - a, 3) for key, a, b in zip(names, marks, marks[1:], strict=False)}
            return times | {"blocks": llm.ready.num_kv_blocks, "errors": [o.error for o in outputs if o.error][:2]}

    def agreement(one: str, other: str) -> list[float]:
        """Share of equal tokens of each request."""
        pairs = zip(tokens[one], tokens[other], strict=True)
        return [round(sum(x == y for x, y in zip(a, b, strict=True)) / len(a), 2) for a, b in pairs]

    for name, settings in WAYS[device].items():
        parts.add(name, lambda name=name, settings=settings: start(name, settings))
    if device == "cuda":
        from bench.gpu.quantised import KINDS, product

        for kind in KINDS:
            parts.add(f"quantised, {kind}", lambda kind=kind: product(kind))
    for one, other in AGREEMENTS[device]:
        parts.add(f"{one} = {other}", lambda one=one, other=other: agreement(one, other))


def profile(parts: Parts, model: str, load_format: str, device: str, steps: int = STEPS) -> None:
    """Two bursts of the engine's profiler, then the time of a decode step by the size of its batch."""
    parts.add("bursts", lambda: [burst(device) for _ in range(2)])
    parts.add("step_times", lambda: step_times(parts, model, load_format, device, steps))


def burst(device: str) -> dict[str, Any]:
    import torch

    from sojourn.engine.compute.profiler import TorchProfiler

    profiler = TorchProfiler(torch.device(device))
    profiler.start()
    torch.ones(1 << 20, device=device).sum()
    profiler.stop()
    kernels = [event.name[:60] for event in profiler.events() if event is not None]
    return {"kernels": kernels[:5], "offset_error_ns": profiler.offset().error_ns}


def step_times(parts: Parts, model: str, load_format: str, device: str, steps: int) -> dict[str, Any]:
    """Medians, in milliseconds, of the device's and of the host's part of a decode step."""
    from sojourn.engine.config import EngineConfig
    from sojourn.engine.runner.runner import make_single_runner

    size, result = 16, parts.found.setdefault("step times so far", {})
    batches = [batch for batch in BATCHES if device == "cuda" or batch <= 8]
    blocks = -(-(CONTEXT + steps + PROFILED) // size)
    config = EngineConfig(
        model=model, load_format=load_format, device=device, max_num_seqs=max(batches), block_size=size,
        max_num_batched_tokens=max(2048, max(batches)), max_model_len=2048, num_kv_blocks=blocks * max(batches),
    )  # fmt: skip
    runner = make_single_runner(config, Path(model))
    for batch in batches:
        result[batch] = _times_of(runner, batch, blocks, steps, profiled=device == "cuda" and batch == max(batches))
        parts.save()
    return parts.found.pop("step times so far")


def _times_of(runner: Any, batch: int, blocks: int, steps: int, profiled: bool) -> dict[str, Any]:
    from sojourn.engine.request.plan import ScheduledTokens, StepPlan
    from sojourn.engine.request.request import Request

    requests = []
    for index in range(batch):
        params = SamplingParams(max_tokens=steps + PROFILED, temperature=0.6, seed=index)
        own = list(range(index * blocks, (index + 1) * blocks))
        requests.append(Request(index, f"{batch}-{index}", CONTEXT, [7] * CONTEXT, params, blocks=own))

    def launch(past: int) -> Any:
        plan = StepPlan(0, 0)
        for request in requests:
            plan.add(ScheduledTokens(request, 1, past, "decode", samples=True))
            request.token_ids.append(7)
        return runner.launch(plan)

    device_ns, host_ns, under_way = [], [], []
    for past in range(CONTEXT, CONTEXT + steps):
        began = time.perf_counter_ns()
        under_way.append(launch(past))
        host_ns.append(time.perf_counter_ns() - began)
        if len(under_way) > 1:
            outcome = runner.collect(under_way.pop(0))
            device_ns.append(outcome.device_end_ns - outcome.device_begin_ns)
    runner.collect(under_way.pop())
    found = {
        "device_ms": sorted(device_ns)[len(device_ns) // 2] / 1e6, "launch_ms": sorted(host_ns)[steps // 2] / 1e6,
    }  # fmt: skip
    if profiled:
        found["kernels"] = _kernels(lambda step: runner.collect(launch(CONTEXT + steps + step)))
    for request in requests:
        runner.forget(request.id)
    return found


def _kernels(step: Callable[[int], Any]) -> list[tuple[str, float, float]]:
    """Name, launches a step and microseconds a step of the kernels that take longest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for number in range(PROFILED):
            step(number)
    events = [(e.key[:90], e.count / PROFILED, e.self_device_time_total / PROFILED) for e in found.key_averages()]
    return sorted(events, key=lambda event: -event[2])[:40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="small", help="the model that smoke starts: a shape or a checkpoint")
    parser.add_argument("--profile", metavar="MODEL", help="profile this model instead")
    parser.add_argument("--steps", type=int, default=STEPS, help="decode steps that --profile times for each batch")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps} is too few: a time needs 2 steps")
    parts = Parts(options.json)
    with tempfile.TemporaryDirectory() as folder:
        model, load_format = model_to_bench(options.profile or options.model, Path(folder))
        if options.profile is None:
            smoke(parts, model, load_format, options.device)
        else:
            profile(parts, model, load_format, options.device, options.steps)
    print(json.dumps(parts.found, indent=1))
    if parts.failed:
        parser.exit(1, f"failed: {', '.join(parts.failed)}\n")


if __name__ == "__main__":
    main()
