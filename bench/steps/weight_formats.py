"""Time of a decode step by format of the weights. On one thread processor time: what a busy machine does not change.

python -m bench.steps.weight_formats [SHAPE] [--formats int8 int4] [--batches 1 8 32] [--threads 1]

Formats take turns, step by step. To compare with llama.cpp, take the processor time of two lengths of
`llama-batched-bench -t 1 -tb 1 -npp 64 -ntg N -npl BATCH`: the difference is that of the steps between.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.shapes import model_to_bench
from sojourn.engine.config import EngineConfig
from sojourn.engine.request.plan import ScheduledTokens, StepPlan
from sojourn.engine.request.request import Request
from sojourn.engine.runner.runner import ModelRunner, make_single_runner
from sojourn.engine.sampling import SamplingParams

CONTEXT, BLOCK_SIZE = 80, 16  # tokens


def times(
    shape: str, formats: list[str], batches: list[int], steps: int, threads: int = 1
) -> dict[tuple[str, int], float]:
    """(format, batch) → median milliseconds of a step: of processor time on one thread, of wall time on several."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model, load_format = model_to_bench(shape, Path(folder))
        blocks = -(-(CONTEXT + steps) // BLOCK_SIZE)
        runners = {}
        for weights in formats:
            config = EngineConfig(
                model=model, load_format=load_format, device="cpu", threads=threads, weights=weights,
                block_size=BLOCK_SIZE, max_num_seqs=max(batches), max_num_batched_tokens=512, max_model_len=1024,
                num_kv_blocks=blocks * max(batches),
            )  # fmt: skip
            runners[weights] = make_single_runner(config, Path(model))
        for batch in batches:
            for weights, milliseconds in _interleaved(runners, batch, blocks, steps, clock).items():
                found[weights, batch] = statistics.median(milliseconds[1:])
    return found


def _interleaved(
    runners: dict[str, ModelRunner], batch: int, blocks: int, steps: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    milliseconds: dict[str, list[float]] = {weights: [] for weights in runners}
    requests = {weights: [_request(index, batch, blocks, steps) for index in range(batch)] for weights in runners}
    for past in range(CONTEXT, CONTEXT + steps):
        for weights, runner in runners.items():
            plan = StepPlan(0, 0)
            for request in requests[weights]:
                plan.add(ScheduledTokens(request, 1, past, "decode", samples=True))
                request.token_ids.append(7)
            begin = clock()
            runner.collect(runner.launch(plan))
            milliseconds[weights].append((clock() - begin) * 1e3)
    for weights, runner in runners.items():
        for request in requests[weights]:
            runner.forget(request.id)
    return milliseconds


def _request(index: int, batch: int, blocks: int, steps: int) -> Request:
    params = SamplingParams(max_tokens=steps + 1, temperature=0.0)
    own = list(range(index * blocks, (index + 1) * blocks))
    return Request(index, f"{batch}-{index}", CONTEXT, [7] * CONTEXT, params, blocks=own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", nargs="?", default="qwen3-0.6b", help="a shape of bench/shapes.py, or a checkpoint")
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"], help="values of `weights`")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=9, help="of each batch; the first one is left out")
    parser.add_argument("--threads", type=int, default=1, help="of the engine; above 1 the figures are wall time")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps} is too few: the first one is left out")
    found = times(options.shape, options.formats, options.batches, options.steps, options.threads)
    for (weights, batch), milliseconds in found.items():
        print(f"{weights:<9} {batch:>3} streams {milliseconds:8.1f} ms {batch / milliseconds * 1e3:8.1f} tokens/s")


if __name__ == "__main__":
    main()
