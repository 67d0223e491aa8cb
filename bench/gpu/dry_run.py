"""The engine's CUDA path on a machine without a GPU: a whole ModelRunner on tensors without data.

    python -m bench.gpu.dry_run qwen3-0.6b [--set max_num_seqs=256] [--json FILE]

The runner starts, captures its graphs, and takes prompts, decodes, mixed steps and each sampling control. The report
says which operations mix devices or make the host wait, which Triton kernels are compiled while the engine serves, and
how many kernels each step launches. There is no data: wrong numbers, NaNs and times are not seen.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu.fake_device import ROOT, Record, install
from bench.gpu.watch import OperationWatch, watch_triton
from bench.shapes import model_to_bench

CONTROLS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.1}, {"top_n_sigma": 1.0},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5}, {"logit_bias": {3: 1.0}, "bad_words": [[4], [2, 6]]},
    {"min_tokens": 9, "stop_token_ids": [2]}, {"lz_penalty": 0.5}, {"logprobs": 3}, {"prompt_logprobs": 2},
)  # fmt: skip
LEAST_SEQUENCES = 7  # that the steps of a dry run have at most


class Steps:
    """Steps as a scheduler plans them."""

    def __init__(self, runner: Any, record: Record):
        self.runner, self.record, self.count = runner, record, 0

    def request(self, length: int, **controls: Any) -> Any:
        from sojourn.engine.request.request import Request
        from sojourn.engine.sampling import SamplingParams

        self.count += 1
        size, num_blocks = self.runner.config.block_size, self.runner.memory.num_kv_blocks
        blocks = [block % num_blocks for block in range(-(-(length + 64) // size))]
        params = SamplingParams(**({"max_tokens": 64, "temperature": 0.6, "seed": self.count} | controls))
        return Request(self.count, f"dry {self.count}", length, [7] * length, params, blocks=blocks)

    def take(self, name: str, parts: Sequence[tuple[Any, int, int, bool]]) -> None:
        """A step of (request, new tokens, past tokens, whether it samples)."""
        from sojourn.engine.request.plan import ScheduledTokens, StepPlan

        plan, record = StepPlan(0, 0), self.record
        for request, new, past, samples in parts:
            plan.add(ScheduledTokens(request, new, past, "decode" if new == 1 else "prefill", samples=samples))
        record.counted, record.phase = record.steps.setdefault(name, Counter()), "launch"
        launched = self.runner.launch(plan)
        record.counted, record.phase = None, "collect"
        self.runner.collect(launched)
        record.phase = "between"

    def prompts_then_decodes(self, name: str, requests: Sequence[Any]) -> None:
        self.take(f"prompts{name}", [(r, r.prompt_tokens, 0, True) for r in requests])
        for request in requests:
            request.token_ids.append(5)
        self.take(f"decodes{name}", [(r, 1, r.prompt_tokens, True) for r in requests])

    def forget(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self.runner.forget(request.id)


def dry_run(folder: Path | str, settings: dict[str, Any], serves: bool = True) -> Record:
    """Changes torch for this process. `settings` are those of EngineConfig; max_num_seqs is LEAST_SEQUENCES or more.
    Without `serves` the runner only starts."""
    from sojourn.engine.config import EngineConfig, model_folder
    from sojourn.engine.runner.runner import make_single_runner
    from sojourn.engine.techniques.computing import computing

    # Modules make real tensors when they are imported: before the mode is on.
    import sojourn.engine.compute.attention.triton_backend  # isort: skip
    import sojourn.engine.compute.operations.triton_backend  # isort: skip
    import sojourn.engine.compute.triton.step_inputs  # isort: skip
    import sojourn.engine.token.sampling.fused_sampler  # noqa: F401  # isort: skip

    record = Record()
    mode = install(record)
    watch_triton(record)
    config = EngineConfig(**({"model": str(folder), "device": "cuda", "load_format": "dummy"} | settings))
    with mode, OperationWatch(record):
        runner = make_single_runner(config, model_folder(config.model), None, computing(config))
        record.phase = "between"
        if config.graphs != "off" and getattr(runner.forward, "graphs", None) is None:
            record.fault("graphs were not captured")
        sizes = [*reversed(runner.forward.sizes)]
        for size, launches in zip(sizes, record.graphs[-len(sizes) :] if sizes else [], strict=True):
            record.steps[f"graph of {size}"] = launches
        if serves:
            take_steps(runner, record, min(config.max_num_seqs, LEAST_SEQUENCES) - 1)
    return record


def take_steps(runner: Any, record: Record, count: int) -> None:
    """Steps of all kinds, with `count` requests at most beside a prompt that is cut."""
    steps, length = Steps(runner, record), min(100, runner.placed.max_model_len - 64)
    plain = [steps.request(length + i) for i in range(count)]
    steps.prompts_then_decodes("", plain)
    steps.take("decodes whose last token is not read yet", [(r, 1, r.prompt_tokens + 1, True) for r in plain])
    chunk, past = steps.request(length), 0
    for number, new in enumerate((length // 2, 8, 5, 3, 2, 1)):  # a prompt that ends in remainders of all sizes
        decodes = [(r, 1, r.prompt_tokens + 2 + number, True) for r in plain[:-1]]
        steps.take(f"decodes and {new} tokens of a prompt", [*decodes, (chunk, new, past, False)])
        past += new
    steps.forget([*plain, chunk])
    for controls in CONTROLS:
        requests = [steps.request(length, **controls), steps.request(length)]
        steps.prompts_then_decodes(f" with {controls}", requests)
        steps.forget(requests)
    if runner.entropy_probe is not None:
        requests = [steps.request(length, top_p=0.9)]
        runner.entropy_probe.steps = 10**6
        steps.prompts_then_decodes(" with a sample of the entropy", requests)


def in_a_process(shape: str, settings: dict[str, Any], serves: bool = True, timeout_seconds: int = 300) -> Record:
    """`dry_run` of a shape of bench.shapes, or of a file of config.json, without a trace in this process."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        pairs = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "bench.gpu.dry_run", shape, "--json", file.name, *pairs]
        command += [] if serves else ["--start-only"]
        environment = {**os.environ, "TRITON_INTERPRET": "0"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout_seconds
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        found = json.loads(Path(file.name).read_text())
    return Record(
        faults=Counter(found["faults"]), specialisations=found["specialisations"],
        steps={name: Counter(launches) for name, launches in found["steps"].items()},
    )  # fmt: skip


def report(record: Record) -> str:
    lines = []
    for name, launches in record.steps.items():
        kinds = ", ".join(f"{count} {kernel}" for kernel, count in launches.most_common())
        lines += [f"{name}: {launches.total()} launches", f"  {kinds}"]
    lines.append(f"{len(record.specialisations)} Triton specialisations")
    late = [kind for kind in record.specialisations.values() if kind["phase"] != "start"]
    lines += [f"  compiled in {kind['phase']}: {kind['kernel']} at {kind['first']}" for kind in late]
    lines.append(f"{record.faults.total()} faults")
    lines += [f"  {count} x {text}" for text, count in record.faults.most_common()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a shape of bench/shapes.py, or a file of config.json")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the engine")
    parser.add_argument("--json", type=Path, help="where the report goes as JSON")
    parser.add_argument("--start-only", action="store_true", help="start the engine, and serve nothing")
    options = parser.parse_args()
    given = dict(item.split("=", 1) for item in options.set)
    settings = {"graphs": "on", "max_num_seqs": 256, "max_num_batched_tokens": 16384, "max_model_len": 4096} | given
    if int(settings["max_num_seqs"]) < LEAST_SEQUENCES:
        parser.error(f"max_num_seqs {settings['max_num_seqs']} is too small: a dry run takes {LEAST_SEQUENCES}")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, _ = model_to_bench(options.model, folder)
        record = dry_run(model, settings, not options.start_only)
    print(report(record))
    if options.json is not None:
        found = {"faults": record.faults, "steps": record.steps, "specialisations": record.specialisations}
        options.json.write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
