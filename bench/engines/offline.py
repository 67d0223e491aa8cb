"""Offline throughput: all requests at once, in the engine's own process, no server between."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.engines.contenders import Contender, Run, ours, transformers
from bench.report.breakdown import Steps, complaint, explain, utilisation
from bench.report.ceilings import measured_ceilings, precision_of
from bench.results import BenchError, Report, new_report
from bench.shapes import model_to_bench
from bench.variants import BASE, ablations, check_settings
from bench.workloads import WORKLOADS, Workload, streams
from sojourn.metrics.compute.roofline import Ceilings

BLOCK_TOKENS = 16
WARM_UP = 8  # requests


@dataclass(frozen=True, slots=True)
class OfflineOptions:
    """The options of `sojourn dev bench offline`."""

    model: str
    workload: str = "cpu"
    settings: dict[str, Any] = field(default_factory=dict)
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)
    ablate: bool = False
    transformers: str | None = None  # the Python that has it
    repeats: int = 3
    one_at_a_time: bool = False  # where memory does not hold all engines together


def bench_offline(
    options: OfflineOptions, folder: Path, show: Callable[[str], None], save: Callable[[Report], None]
) -> Report:
    """Runs every engine `repeats` times, in turns; `save` gets the report as it grows. Temporary files go below
    `folder`. An engine that fails leaves a note, unless it is the first. Raises BenchError.
    """
    if options.workload not in WORKLOADS:
        raise BenchError(f"--workload {options.workload} is not known; known are {', '.join(WORKLOADS)}")
    workload = WORKLOADS[options.workload]()
    model, load_format = model_to_bench(options.model, folder)
    settings = _defaults(workload) | {"load_format": load_format} | options.settings
    check_settings(model, settings)
    base = ours(BASE, model, settings)
    with ExitStack() as stack:
        stack.callback(base.stop)
        base.start()
        contenders = _contenders(base, options)
        for contender in contenders:
            stack.callback(contender.stop)
        ceilings = measured_ceilings(base.facts["device"], show)
        report = new_report("offline", f"{Path(model).name}, workload {workload.name}", ceilings=ceilings)
        report.workload = _described(workload)
        for repeat in range(options.repeats):
            for contender in list(contenders):
                try:
                    run = _turn(contender, workload, base.facts["vocab_size"], repeat, options, show)
                except BenchError as error:
                    if contender is base:
                        raise
                    contenders.remove(contender)
                    contender.stop()
                    report.notes.append(f"Given up: {error}")
                    show(f"given up: {error}")
                else:
                    _book(report, contender, workload, run, ceilings)
                save(report)
        return report


def _turn(
    contender: Contender, workload: Workload, vocab_size: int, repeat: int, options: OfflineOptions,
    show: Callable[[str], None],
) -> Run:  # fmt: skip
    contender.start()
    if repeat == 0 or options.one_at_a_time:
        show(f"{contender.name}: warming up")
        contender.run(_warm_up(workload).within(vocab_size))
    run = contender.run(workload.reworded(repeat).within(vocab_size))
    show(f"{contender.name}: {run.output_tokens / run.wall_ns * 1e9:,.1f} output tokens/s")
    if options.one_at_a_time:
        contender.stop()
    return run


def _defaults(workload: Workload) -> dict[str, Any]:
    """Settings that the workload fits into without a preemption."""
    return {
        "max_num_seqs": workload.streams or min(256, len(workload.prompts)),
        "max_num_batched_tokens": 16_384 if workload.input_tokens > 100_000 else 2048,
        "max_model_len": -(-workload.longest // 256) * 256,
        "num_kv_blocks": workload.blocks(BLOCK_TOKENS) + 64,
    }


def _contenders(base: Contender, options: OfflineOptions) -> list[Contender]:
    """Ours as the options say, its variants and its ablations, and the peers."""
    others = {name: base.settings | changed for name, changed in options.variants.items()}
    if options.ablate:
        others |= ablations(base.settings, base.facts["device"])
    for settings in others.values():
        check_settings(base.model, settings)
    contenders = [base, *(ours(name, base.model, settings) for name, settings in others.items())]
    if options.transformers is not None:
        device = "cpu" if base.facts["device"] == "cpu" else "cuda"
        blocks = base.settings["num_kv_blocks"] * base.settings.get("block_size", BLOCK_TOKENS)
        peer = {
            "device": device,
            "dtype": base.facts["dtype"],
            "load_format": base.settings["load_format"],
            # On a CPU it would take more than half of the memory. Its pages have 256 tokens; the last are not full.
            "num_blocks": 2 * blocks // 256 if device == "cpu" else None,
        }
        contenders.append(transformers(options.transformers, base.model, peer))
    return contenders


def _warm_up(workload: Workload) -> Workload:
    """A few short requests, and one prompt as long as the longest: kernels compile, pools grow."""
    few, long = streams(WARM_UP, 64, 8, seed=99), streams(1, max(map(len, workload.prompts)), 8, seed=98)
    return Workload("warm-up", few.prompts + long.prompts, few.output_lens + long.output_lens, workload.temperature)


def _described(workload: Workload) -> dict[str, object]:
    return {
        "name": workload.name, "requests": len(workload.prompts), "input_tokens": workload.input_tokens,
        "output_tokens": workload.output_tokens, "longest": workload.longest, "temperature": workload.temperature,
    }  # fmt: skip


def _book(report: Report, contender: Contender, workload: Workload, run: Run, ceilings: Ceilings) -> None:
    point = report.at(contender.name, workload.name)
    point.settings, point.peer = contender.settings, "version" in contender.facts
    point.facts = contender.facts
    point.version = contender.facts.get("version", "")
    figures = {"output_tokens_per_s": run.output_tokens / run.wall_ns * 1e9, "wall_s": run.wall_ns / 1e9}
    breakdown = None
    if run.steps is not None:
        steps = Steps({name: np.array(values) for name, values in run.steps.items()})
        precision = precision_of(contender.settings, contender.facts["dtype"])
        figures |= utilisation(steps, run.wall_ns, ceilings, precision)
        breakdown = explain(steps, run.begin_ns, run.end_ns)
        if sentence := complaint(breakdown):
            report.notes.append(f"{contender.name}: {sentence}")
    point.add(figures, breakdown)
